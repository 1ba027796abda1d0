// The keys that a query attends to and the queries that attend to a key, from all weights or, if the source has no more,
// from the top keys.
import { cellAt, find } from "./levels.js";

const PIECE = 4096;

// Answers are {all: weights or null, top: [[token, weight], ...] descending}; `all` is null if only the top is known.
// scaled(): whether weights are multiplied by the lengths of the values, which a live source computes.
export function createNeighbours(source, scaled = () => false, remembered = 64) {
  const rows = new Map();
  const inverse = new Map();
  let failed = false; // whether a live source failed to answer

  function remember(key, make) {
    if (!rows.has(key)) {
      if (rows.size >= remembered) rows.delete(rows.keys().next().value);
      const found = make();
      found.catch(() => rows.delete(key)); // retry after a failure
      rows.set(key, found);
    }
    return rows.get(key);
  }

  async function tops(attention, head) {
    if (!attention.top_keys) return null;
    const [keys, weights, only] = await Promise.all([
      source.array(attention.top_keys),
      source.weights(attention.top_weights),
      attention.top_rows ? source.array(attention.top_rows) : null,
    ]);
    const [, count, width] = keys.shape;
    const at = Math.max(0, attention.heads.indexOf(head)) * count * width;
    const place = (query) => {
      if (!only) return query < count ? query : -1;
      const found = find(only.data, query);
      if (only.data[found] === query) return found;
      return only.data[only.data.length - 1] === query ? only.data.length - 1 : -1;
    };
    return { keys: keys.data, weights: weights.data, only: only?.data, count, width, at, place };
  }

  // Fetch a whole row or column of exact weights, in pieces of a size that the server accepts.
  async function line(length, question) {
    const all = new Float32Array(length);
    const { about } = source;
    const pieces = Array.from({ length: Math.ceil(length / PIECE) }, (_, n) => [n * PIECE, Math.min(length, (n + 1) * PIECE)]);
    try {
      await Promise.all(pieces.map(async ([from, to]) => all.set((await source.window({ ...question(from, to), scaled: scaled() })).data, from)));
    } catch (error) {
      if (source.about === about) failed = true; // fall back to the top keys of the document
      throw error;
    }
    return all;
  }

  async function row(attention, head, query) {
    if (attention.exact && !scaled()) {
      const { data, columns } = await source.level(attention, head);
      const all = data.subarray(query * columns, (query + 1) * columns);
      return { all, top: rank(all) };
    }
    if (scaled() || (source.live && !failed)) {
      const all = await line(attention.K, (from, to) => ({ attention, head, rows: [query, query + 1], columns: [from, to], size: [1, to - from] }));
      return { all, top: rank(all) };
    }
    const known = await tops(attention, head);
    const place = known ? known.place(query) : -1;
    if (place < 0) return { all: null, top: [] };
    const top = [];
    for (let n = known.at + place * known.width; n < known.at + (place + 1) * known.width; n++) {
      if (known.weights[n] > 0) top.push([known.keys[n], known.weights[n]]);
    }
    return { all: null, top };
  }

  async function column(attention, head, key) {
    if (attention.exact && !scaled()) {
      const { data, rows: count, columns } = await source.level(attention, head);
      const all = Float32Array.from({ length: count }, (_, i) => data[i * columns + key]);
      return { all, top: rank(all) };
    }
    if (scaled() || (source.live && !failed)) {
      const all = await line(attention.Q, (from, to) => ({ attention, head, rows: [from, to], columns: [key, key + 1], size: [to - from, 1] }));
      return { all, top: rank(all) };
    }
    const index = await queriesByKey(attention, head);
    return { all: null, top: index?.get(key) ?? [] };
  }

  // Map of key -> [[query, weight], ...] from the top keys; built on first use of a head.
  function queriesByKey(attention, head) {
    const name = `${attention.id}/${head}`;
    if (!inverse.has(name)) {
      if (inverse.size >= 4) inverse.delete(inverse.keys().next().value);
      inverse.set(
        name,
        tops(attention, head).then((known) => {
          if (!known) return null;
          const index = new Map();
          for (let i = 0; i < known.count; i++) {
            const query = known.only ? known.only[i] : i;
            for (let n = known.at + i * known.width; n < known.at + (i + 1) * known.width; n++) {
              if (!(known.weights[n] > 0)) continue;
              const found = index.get(known.keys[n]);
              if (found) found.push([query, known.weights[n]]);
              else index.set(known.keys[n], [[query, known.weights[n]]]);
            }
          }
          for (const found of index.values()) found.sort((a, b) => b[1] - a[1]);
          return index;
        }),
      );
    }
    return inverse.get(name);
  }

  // A value for every token of the other side, for pictures: the exact weight where known (`exact` is the set of those
  // tokens, or null for all), otherwise the mean of the pooled cell `cell(token)`.
  async function spread(attention, head, token, from) {
    const found = await (from === "key" ? neighbours.column : neighbours.row)(attention, head, token);
    if (found.all) return { values: found.all, exact: null, top: found.top, cell: null };
    const pooled = await source.level(attention, head);
    const length = from === "key" ? attention.Q : attention.K;
    const values = new Float32Array(length);
    const cell = (other) => cellAt(pooled, ...(from === "key" ? [other, token] : [token, other]));
    for (let other = 0; other < length; other++) values[other] = cell(other).value;
    const exact = new Set();
    for (const [other, weight] of found.top) {
      values[other] = weight;
      exact.add(other);
    }
    return { values, exact, top: found.top, cell };
  }

  // [query, key, weight] of the strongest keys of the queries [from, to), from data that is already loaded.
  async function overview(attention, head, from, to, count) {
    const found = [];
    if (scaled()) {
      if (from >= to) return found;
      const { data, columns } = await source.window({ attention, head, rows: [from, to], columns: [0, attention.K], size: [to - from, Math.min(PIECE, attention.K)], scaled: true });
      if (columns < attention.K) return found; // pooled: lines are drawn for a chosen token only
      for (let query = from; query < to; query++) {
        for (const [key, weight] of rank(data.subarray((query - from) * columns, (query - from + 1) * columns), count)) found.push([query, key, weight]);
      }
      return found;
    }
    if (attention.exact) {
      const { data, columns } = await source.level(attention, head);
      for (let query = from; query < to; query++) {
        const top = rank(data.subarray(query * columns, (query + 1) * columns), count);
        for (const [key, weight] of top) found.push([query, key, weight]);
      }
      return found;
    }
    const known = await tops(attention, head);
    for (let query = from; known && query < to; query++) {
      const place = known.place(query);
      if (place < 0) continue;
      const start = known.at + place * known.width;
      for (let n = start; n < start + Math.min(count, known.width); n++) {
        if (known.weights[n] > 0) found.push([query, known.keys[n], known.weights[n]]);
      }
    }
    return found;
  }

  const neighbours = {
    overview,
    row: (attention, head, query) => remember(`r/${attention.id}/${head}/${query}/${scaled()}`, () => row(attention, head, query)),
    column: (attention, head, key) => remember(`c/${attention.id}/${head}/${key}/${scaled()}`, () => column(attention, head, key)),
    spread,
    forget() {
      rows.clear();
      failed = false;
      inverse.clear();
    },
  };
  return neighbours;
}

export function rank(all, count = 64) {
  const order = [];
  for (let i = 0; i < all.length; i++) if (all[i] > 0) order.push(i);
  order.sort((a, b) => all[b] - all[a] || a - b);
  return order.slice(0, count).map((i) => [i, all[i]]);
}
