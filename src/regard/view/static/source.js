// The data source of the viewer: a page, a server or a notebook kernel. Interface:
//   source.about, source.live, source.array(name), source.weights(name), source.level(attention, head),
//   source.window({attention, head, rows, columns, size}), source.run(text), source.ask(kind, request)
import { decode } from "./digits.js";
import { bands, level } from "./levels.js";

const TYPES = { uint8: Uint8Array, uint16: Uint16Array, int32: Int32Array, float32: Float32Array };
let halves = null;

function halfTable() {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    const size =
      exponent === 31 ? (fraction ? NaN : Infinity)
      : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024)
      : 2 ** -24 * fraction;
    table[bits] = bits & 32768 ? -size : size;
  }
  return table;
}

function toTypedArray(dtype, buffer) {
  if (dtype === "float16") {
    halves ??= halfTable();
    const bits = new Uint16Array(buffer);
    const data = new Float32Array(bits.length);
    for (let i = 0; i < bits.length; i++) data[i] = halves[bits[i]];
    return data;
  }
  if (!TYPES[dtype]) throw new Error(`arrays of ${dtype} are not supported`);
  return new TYPES[dtype](buffer);
}

export function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

async function unpack({ dtype, shape, bytes }) {
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return { data: toTypedArray(dtype, await new Response(plain).arrayBuffer()), shape };
}

// `load(name)` returns {dtype, shape, bytes}, gzipped; `remote`, if any, has window(), ask() and optionally run().
export function createSource(about, load, remote = null) {
  let known = new Map();
  let numbers = new Map();

  const source = {
    about,
    live: Boolean(remote?.window),
    canRun: Boolean(remote?.run),
    array(name) {
      if (!known.has(name)) known.set(name, Promise.resolve(load(name)).then(unpack));
      return known.get(name);
    },
    // A decoded array of weights.
    weights(name) {
      if (!numbers.has(name)) numbers.set(name, source.array(name).then(decode));
      return numbers.get(name);
    },
    async level(attention, head) {
      const { data, shape } = await source.weights(attention.maps);
      const [, rows, columns] = shape;
      const at = Math.max(0, attention.heads.indexOf(head));
      const size = rows * columns;
      return level(data.subarray(at * size, (at + 1) * size), bands(attention.Q, rows), bands(attention.K, columns));
    },
    // The level of a window, whose bands the host chooses; live sources only. record: an id, by default that of the
    // document. scaled: each weight times the length of the value of its key.
    async window({ record = source.about.record, attention, head, rows, columns, size, scaled = false }) {
      const cells = await remote.window({ ...(record ? { record } : {}), attention: attention.id, head, rows, columns, size, ...(scaled ? { scaled } : {}) });
      return level(cells.data, cells.rows, cells.columns);
    },
    // Answers may arrive out of order; one that is no longer `wanted` is dropped.
    run: (text, wanted) => take(remote.run(text), wanted),
    open: (request, wanted) => take(remote.ask("open", request).then(unpackDocument), wanted),
    ask: (kind, request) => remote.ask(kind, request),
  };
  async function take(answering, wanted) {
    const answer = await answering;
    if (!wanted()) return;
    known = new Map();
    numbers = new Map();
    const { compares, against } = source.about; // of the host, not of a record
    source.about = { compares, against, ...answer.about };
    load = answer.load;
  }
  return source;
}

// A document as a host sends it: arrays are base64 of gzip.
export function unpackDocument({ about, arrays }) {
  return { about, load: (name) => ({ ...arrays[name], bytes: fromBase64(arrays[name].data) }) };
}
