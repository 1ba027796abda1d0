// Entry point of the page of a server: its document is embedded, and everything else is requested from the server.
import { start } from "./app.js";
import { readDocument } from "./embedded.js";
import { LIVE } from "./live_parts.js";
import { createSource, unpackDocument } from "./source.js";

async function post(path, body) {
  let answer;
  try {
    answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  } catch {
    throw new Error("the server does not answer; is regard serve still running?");
  }
  if (!answer.ok) {
    const text = await answer.text();
    let reason = text;
    try {
      reason = JSON.parse(text).error ?? text;
    } catch {
      // a proxy may answer without JSON
    }
    throw Object.assign(new Error(reason.slice(0, 200) || `${answer.status}`), { status: answer.status });
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
  run: async (text) => unpackDocument(await (await post("api/run", { text })).json()),
  ask: async (kind, request) => (await post(`api/${kind}`, request)).json(),
};

const { root, about, load } = readDocument();
start(root, createSource(about, load, remote), { language: root.dataset.lang, address: true, keys: document, live: LIVE });
