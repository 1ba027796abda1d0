// The document that is embedded in an HTML page.
import { fromBase64 } from "./source.js";

export function readDocument() {
  const load = (name) => {
    const node = document.getElementById(`array-${name}`);
    if (!node) throw new Error(`the page has no array ${name}`);
    const { dtype, shape } = node.dataset;
    return { dtype, shape: shape.split(",").filter(Boolean).map(Number), bytes: fromBase64(node.textContent) };
  };
  return { root: document.getElementById("regard"), about: JSON.parse(document.getElementById("about").textContent), load };
}
