// Entry point of the notebook widget: the document is the widget's state, and windows are requested from the kernel.
import { start } from "./app.js";
import { LIVE } from "./live_parts.js";
import { createSource } from "./source.js";

const TIMEOUT = 15_000; // milliseconds; a saved notebook has no kernel
const LONG = 180_000; // for requests that run the model

function bytesOf(view) {
  return new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
}

// Requests to the kernel are numbered, and answers carry the same number.
function kernel(model) {
  const waiting = new Map();
  let last = 0;
  const onMessage = (message, buffers) => {
    const request = waiting.get(message.id);
    if (!request) return;
    waiting.delete(message.id);
    if (message.error) request.reject(new Error(message.error));
    else if (message.answer) request.resolve(message.answer);
    else {
      const bytes = bytesOf(buffers[0]).slice(); // a copy is aligned to four bytes
      request.resolve({ data: new Float32Array(bytes.buffer), rows: Int32Array.from(message.rows.flat()), columns: Int32Array.from(message.columns.flat()) });
    }
  };
  model.on("msg:custom", onMessage);
  const send = (kind, request, most) =>
    new Promise((resolve, reject) => {
      const id = ++last;
      waiting.set(id, { resolve, reject });
      setTimeout(() => {
        if (waiting.delete(id)) reject(new Error("the kernel does not answer"));
      }, most);
      model.send({ id, kind, ...request });
    });
  return {
    window: (request) => send("window", request, TIMEOUT),
    ask: (kind, request) => send(kind, request, LONG),
    stop: () => model.off("msg:custom", onMessage),
  };
}

function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "regard regard-widget";
  root.tabIndex = -1;
  el.append(root);
  const load = (name) => {
    const { dtype, shape, data } = model.get("_arrays")[name];
    return { dtype, shape, bytes: bytesOf(data) };
  };
  const remote = model.get("_live") ? kernel(model) : null;
  start(root, createSource(model.get("_about"), load, remote), { language: model.get("_lang"), live: LIVE });
  return () => remote?.stop();
}

export default { render };
