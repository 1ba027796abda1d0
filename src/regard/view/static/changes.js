// An experiment as plain data, its text in the link, and the request for it.
//   off: [attention, head]; temperature: [attention or "", number]; edits: [stream, position, text]
//   forbid, force: [attention, head or -1, query, key], where a kind instead of an attention means all its layers
export const NOTHING = { off: [], temperature: [], forbid: [], force: [], edits: [] };
const MOST = 256;
const KINDS = ["encoder", "decoder", "cross"];

const whole = (value) => Number.isInteger(value) && value >= 0 && value < 1e9;
const id = (value) => typeof value === "string" && /^\d{0,6}$/.test(value);
const FORMS = {
  off: (entry) => entry.length === 2 && id(entry[0]) && entry[0] !== "" && whole(entry[1]),
  temperature: (entry) => entry.length === 2 && id(entry[0]) && Number.isFinite(entry[1]) && entry[1] >= 1e-30 && entry[1] <= 1e30,
  forbid: isPair,
  force: isPair,
  edits: (entry) => entry.length === 3 && ["source", "target"].includes(entry[0]) && whole(entry[1]) && typeof entry[2] === "string" && entry[2] !== "",
};

function isPair(entry) {
  const all = KINDS.includes(entry[0]);
  return entry.length === 4 && (all || (id(entry[0]) && entry[0] !== "")) && (entry[1] === -1 || (!all && whole(entry[1]))) && whole(entry[2]) && whole(entry[3]);
}

// Parse the text of a link; undefined if it is not an experiment.
export function parse(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch {
    return undefined;
  }
  if (!given || typeof given !== "object" || Array.isArray(given)) return undefined;
  const experiment = {};
  for (const name of Object.keys(NOTHING)) {
    const entries = given[name] ?? [];
    if (!Array.isArray(entries) || entries.length > MOST || !entries.every((entry) => Array.isArray(entry) && FORMS[name](entry))) return undefined;
    experiment[name] = entries;
  }
  return experiment;
}

// The text for a link, without the parts that are empty.
export function format(experiment) {
  return isEmpty(experiment) ? null : JSON.stringify(Object.fromEntries(Object.entries(experiment).filter(([, entries]) => entries.length)));
}

export function isEmpty(experiment) {
  return Object.values(experiment).every((entries) => !entries.length);
}

// Drop entries that the document does not have.
export function fit(experiment, about) {
  const find = (attention) => about.attentions.find((one) => one.id === attention);
  const ofKind = (kind) => {
    const found = about.attentions.filter((one) => one.kind === kind);
    return found.length ? found : [null];
  };
  const pairs = ([attention, head, query, key]) =>
    (KINDS.includes(attention) ? ofKind(attention) : [find(attention)]).every((one) => one && query < one.Q && key < one.K && (head < 0 || one.heads.includes(head)));
  const keep = {
    off: ([attention, head]) => find(attention)?.heads.includes(head),
    temperature: ([attention]) => attention === "" || find(attention),
    forbid: pairs,
    force: pairs,
    edits: ([stream, position]) => position < (about.streams[stream]?.tokens.length ?? 0),
  };
  return Object.fromEntries(Object.entries(experiment).map(([name, entries]) => [name, entries.filter(keep[name])]));
}

// Add an entry, or remove it if it is there.
export function toggle(experiment, name, entry) {
  const key = JSON.stringify(entry);
  const others = experiment[name].filter((other) => JSON.stringify(other) !== key);
  return { ...experiment, [name]: others.length < experiment[name].length ? others : [...others, entry] };
}

// Replace the entry that starts with the same `width` values; `value` null removes it.
export function put(experiment, name, start, value) {
  const key = JSON.stringify(start);
  const others = experiment[name].filter((other) => JSON.stringify(other.slice(0, start.length)) !== key);
  return { ...experiment, [name]: value === null ? others : [...others, [...start, value]] };
}

export function toRequest({ off, temperature, forbid, force, edits }) {
  const where = (attention) => (attention === "" ? {} : KINDS.includes(attention) ? { kind: attention } : { attention });
  const pair = (name) => ([attention, head, query, key]) => ({ ...where(attention), ...(head < 0 ? {} : { heads: [head] }), [name]: [[query, key]] });
  const tokens = {};
  for (const [stream, position, text] of edits) (tokens[stream] ??= {})[position] = text;
  const heads = new Map();
  for (const [attention, head] of off) heads.set(attention, [...(heads.get(attention) ?? []), head]);
  return {
    changes: [
      ...[...heads].map(([attention, some]) => ({ attention, heads: some, factor: 0 })),
      ...temperature.map(([attention, value]) => ({ ...where(attention), temperature: value })),
      ...forbid.map(pair("forbid")),
      ...force.map(pair("force")),
    ],
    tokens,
  };
}
