// The state of the viewer as plain values, and its serialisation in the URL fragment.
import { fit, format, NOTHING, parse } from "./changes.js";

export const VIEWS = ["heads", "map", "tokens", "image", "sound", "rollout", "statistics", "experiment"];
export const STATISTICS = ["entropy", "distance", "max_logit", "sink"];
export const SORTS = ["layer", ...STATISTICS, "found"];

export const DEFAULTS = {
  view: "heads",
  kind: "",
  attention: "",
  head: 0,
  token: null, // the pinned token
  side: "query", // whether it is a query or a key
  rows: null, // the window of the map, in tokens; null is everything
  columns: null,
  sort: "layer",
  down: false,
  named: "",
  only: "", // a layer
  statistic: "entropy",
  step: -1, // the layer up to which attention is rolled out; -1 is all of them
  search: "",
  scaled: false, // weights times the lengths of the values
  cell: null, // [query, key] of the weight that is explained
  experiment: NOTHING,
  compare: "changes", // what the experiment view compares with
  layout: "both", // two maps side by side, or their difference
  second: null, // [attention, head] to compare with
  other: "", // the text to compare with
  position: null, // of the prediction; null is the last
  text: "", // of a live page
};
const COMPARES = ["changes", "head", "text", "model", "record"];

const KINDS = {
  head: whole,
  token: whole,
  step: (text) => (text === "-1" ? -1 : whole(text)),
  rows: pair,
  columns: pair,
  down: (text) => text === "1",
  scaled: (text) => text === "1",
  cell: numbers,
  second: (text) => (numbers(text) ? [String(numbers(text)[0]), numbers(text)[1]] : undefined),
  position: whole,
  experiment: parse,
  compare: oneOf(COMPARES),
  layout: oneOf(["both", "difference"]),
  view: oneOf(VIEWS),
  side: oneOf(["query", "key"]),
  sort: oneOf(SORTS),
  statistic: oneOf(STATISTICS),
};

function whole(text) {
  return /^\d{1,9}$/.test(text) ? Number(text) : undefined;
}

function pair(text) {
  const match = /^(\d{1,9})-(\d{1,9})$/.exec(text);
  return match && Number(match[1]) < Number(match[2]) ? [Number(match[1]), Number(match[2])] : undefined;
}

function numbers(text) {
  const match = /^(\d{1,9})-(\d{1,9})$/.exec(text);
  return match ? [Number(match[1]), Number(match[2])] : undefined;
}

function oneOf(known) {
  return (text) => (known.includes(text) ? text : undefined);
}

export function toHash(state) {
  const shown = new URLSearchParams();
  for (const [name, usual] of Object.entries(DEFAULTS)) {
    const value = state[name];
    if (value === usual || value === null || value === undefined) continue;
    if (name === "kind" && state.attention) continue; // implied by the attention
    if (name === "experiment") {
      if (format(value)) shown.set(name, format(value));
      continue;
    }
    shown.set(name, Array.isArray(value) ? value.join("-") : value === true ? "1" : String(value));
  }
  return shown.toString();
}

// Parse a URL fragment; unknown names and invalid values are ignored.
export function fromHash(hash) {
  const state = {};
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    const value = KINDS[name] ? KINDS[name](text) : text;
    if (value !== undefined) state[name] = value;
  }
  return state;
}

// Fill in defaults and replace attentions, heads and windows that the document does not have.
export function fitState(state, about) {
  const result = { ...DEFAULTS, ...state };
  const all = about.attentions;
  let chosen = all.find((attention) => attention.id === result.attention);
  const opens = all.find((attention) => attention.id === about.opens?.attention);
  if (!chosen && !result.kind && opens) {
    chosen = opens;
    result.head = state.head ?? about.opens.head;
  }
  if (!chosen) chosen = all.find((attention) => attention.kind === result.kind) ?? all[0];
  result.attention = chosen?.id ?? "";
  result.kind = chosen?.kind ?? "";
  if (chosen && !chosen.heads.includes(result.head)) result.head = chosen.heads[0] ?? 0;
  const Q = chosen?.Q ?? 0;
  const K = chosen?.K ?? 0;
  if (result.view !== "rollout") {
    if (result.token !== null && result.token >= (result.side === "key" ? K : Q)) result.token = null;
    if (result.rows && result.rows[1] > Q) result.rows = result.columns = null;
    if (result.columns && result.columns[1] > K) result.rows = result.columns = null;
  }
  const ofKind = all.filter(({ kind }) => kind === result.kind);
  if (!ofKind.some(({ layer }) => String(layer) === result.only)) result.only = "";
  if (!ofKind.some(({ found }) => found?.some(({ name }) => name === result.named))) result.named = "";
  if (!available(about).includes(result.view)) result.view = "heads";
  if (result.cell && (result.cell[0] >= Q || result.cell[1] >= K)) result.cell = null;
  if (result.second) {
    const second = all.find(({ id }) => id === result.second[0]);
    result.second = second ? [second.id, second.heads.includes(result.second[1]) ? result.second[1] : second.heads[0]] : null;
  }
  result.experiment = fit(result.experiment, about);
  if (result.compare === "changes" && !about.runs) result.compare = "head";
  if (["text", "model", "record"].includes(result.compare) && !about.compares?.includes(result.compare)) result.compare = about.runs ? "changes" : "head";
  const layers = about.rollout?.steps ?? Infinity;
  if (result.step >= layers) result.step = -1;
  return result;
}

export function available(about) {
  return VIEWS.filter(
    (view) =>
      !(view === "experiment" && !about.live) &&
      !(view === "image" && !about.image) &&
      !(view === "sound" && !about.spectrogram) &&
      !(view === "rollout" && !about.rollout),
  );
}
