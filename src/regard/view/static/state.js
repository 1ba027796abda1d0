// What is shown, as plain values, and as the part of an address behind the #.
export const VIEWS = ["heads", "map", "tokens", "image", "sound", "rollout", "statistics"];
export const STATISTICS = ["entropy", "distance", "max_logit", "sink"];
export const SORTS = ["layer", ...STATISTICS, "found"];

export const DEFAULTS = {
  view: "heads",
  kind: "",
  attention: "",
  head: 0,
  token: null, // the pinned token, and whether it is read as a query or as a key
  side: "query",
  rows: null, // the window of the map, in tokens; null is everything
  columns: null,
  sort: "layer",
  down: false,
  named: "",
  only: "", // a layer
  statistic: "entropy",
  step: -1, // the layer up to which attention is rolled out; -1 is all of them
  search: "",
};

const KINDS = {
  head: whole,
  token: whole,
  step: (text) => (text === "-1" ? -1 : whole(text)),
  rows: pair,
  columns: pair,
  down: (text) => text === "1",
  view: oneOf(VIEWS),
  side: oneOf(["query", "key"]),
  sort: oneOf(SORTS),
  statistic: oneOf(STATISTICS),
};

function whole(text) {
  return /^\d{1,9}$/.test(text) ? Number(text) : undefined;
}

function pair(text) {
  const found = /^(\d{1,9})-(\d{1,9})$/.exec(text);
  return found && Number(found[1]) < Number(found[2]) ? [Number(found[1]), Number(found[2])] : undefined;
}

function oneOf(known) {
  return (text) => (known.includes(text) ? text : undefined);
}

export function toHash(state) {
  const shown = new URLSearchParams();
  for (const [name, usual] of Object.entries(DEFAULTS)) {
    const value = state[name];
    if (value === usual || value === null || value === undefined) continue;
    if (name === "kind" && state.attention) continue; // the attention says it
    shown.set(name, Array.isArray(value) ? value.join("-") : value === true ? "1" : String(value));
  }
  return shown.toString();
}

// Anything may stand in an address: what is not understood is left out.
export function fromHash(hash) {
  const state = {};
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    const value = KINDS[name] ? KINDS[name](text) : text;
    if (value !== undefined) state[name] = value;
  }
  return state;
}

// The state made to fit a document: attentions, heads and windows that are there.
export function fitted(state, about) {
  const found = { ...DEFAULTS, ...state };
  const all = about.attentions;
  let chosen = all.find((attention) => attention.id === found.attention);
  const opens = all.find((attention) => attention.id === about.opens?.attention);
  if (!chosen && !found.kind && opens) {
    chosen = opens;
    found.head = state.head ?? about.opens.head;
  }
  if (!chosen) chosen = all.find((attention) => attention.kind === found.kind) ?? all[0];
  found.attention = chosen?.id ?? "";
  found.kind = chosen?.kind ?? "";
  if (chosen && !chosen.heads.includes(found.head)) found.head = chosen.heads[0] ?? 0;
  const Q = chosen?.Q ?? 0;
  const K = chosen?.K ?? 0;
  if (found.view !== "rollout") {
    if (found.token !== null && found.token >= (found.side === "key" ? K : Q)) found.token = null;
    if (found.rows && found.rows[1] > Q) found.rows = found.columns = null;
    if (found.columns && found.columns[1] > K) found.rows = found.columns = null;
  }
  if (!available(about).includes(found.view)) found.view = "heads";
  const layers = about.rollout?.steps ?? Infinity;
  if (found.step >= layers) found.step = -1;
  return found;
}

export function available(about) {
  return VIEWS.filter(
    (view) =>
      !(view === "image" && !about.image) &&
      !(view === "sound" && !about.spectrogram) &&
      !(view === "rollout" && !about.rollout),
  );
}
