// Entry point of an HTML page: arrays are embedded in the page; a live page also sends requests to its server.
import { start } from "./app.js";
import { createSource, fromBase64 } from "./source.js";

const root = document.getElementById("regard");

function load(name) {
  const node = document.getElementById(`array-${name}`);
  if (!node) throw new Error(`the page has no array ${name}`);
  const { dtype, shape } = node.dataset;
  return { dtype, shape: shape.split(",").filter(Boolean).map(Number), bytes: fromBase64(node.textContent) };
}

async function post(path, body) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (!answer.ok) {
    const text = await answer.text();
    let reason = text;
    try {
      reason = JSON.parse(text).error ?? text;
    } catch {
      // a proxy may answer without JSON
    }
    throw new Error(reason.slice(0, 200) || `${answer.status}`);
  }
  return answer;
}

const remote = {
  async window(request) {
    const answer = await post("api/window", request);
    const body = await answer.arrayBuffer();
    const [rows, columns] = new Int32Array(body, 0, 2);
    return {
      rows: new Int32Array(body, 8, 2 * rows),
      columns: new Int32Array(body, 8 + 8 * rows, 2 * columns),
      data: new Float32Array(body, 8 + 8 * (rows + columns)),
    };
  },
  async run(text) {
    const { about, arrays } = await (await post("api/run", { text })).json();
    return { about, load: (name) => ({ ...arrays[name], bytes: fromBase64(arrays[name].data) }) };
  },
};

const about = JSON.parse(document.getElementById("about").textContent);
const source = createSource(about, load, "live" in root.dataset ? remote : null);
start(root, source, { language: root.dataset.lang, address: true, keys: document });
