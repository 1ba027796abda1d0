// Entry point of a saved page: the document is embedded in it, and there is nothing to request.
import { start } from "./app.js";
import { readDocument } from "./embedded.js";
import { createSource } from "./source.js";

const { root, about, load } = readDocument();
start(root, createSource(about, load), { language: root.dataset.lang, address: true, keys: document });
