// In a notebook: the document is the widget's state, and windows are asked of the kernel.
import { start } from "./app.js";
import { createSource } from "./source.js";

const PATIENCE = 15_000; // milliseconds; a saved notebook has no kernel

function bytesOf(view) {
  return new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
}

// Questions to the kernel have numbers; answers come back with them.
function kernel(model) {
  const waiting = new Map();
  let last = 0;
  const answered = (message, buffers) => {
    const asked = waiting.get(message.id);
    if (!asked) return;
    waiting.delete(message.id);
    if (message.error) asked.reject(new Error(message.error));
    else {
      const bytes = bytesOf(buffers[0]).slice(); // a copy starts at a multiple of four
      asked.resolve({ data: new Float32Array(bytes.buffer), rows: Int32Array.from(message.rows.flat()), columns: Int32Array.from(message.columns.flat()) });
    }
  };
  model.on("msg:custom", answered);
  return {
    window: (asked) =>
      new Promise((resolve, reject) => {
        const id = ++last;
        waiting.set(id, { resolve, reject });
        setTimeout(() => {
          if (waiting.delete(id)) reject(new Error("the kernel does not answer"));
        }, PATIENCE);
        model.send({ id, kind: "window", ...asked });
      }),
    stop: () => model.off("msg:custom", answered),
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
  start(root, createSource(model.get("_about"), load, remote), { language: model.get("_lang") });
  return () => remote?.stop();
}

export default { render };
