// Levels: weights of one head pooled to a grid. A cell is the mean mass that a query of its rows puts on its columns,
// so rows are averaged and columns are summed. Edges are token positions: cell i covers [edges[i], edges[i + 1]).

export function edges(cells, tokens) {
  return Int32Array.from({ length: cells + 1 }, (_, i) => Math.floor((i * tokens) / cells));
}

export function level(data, rows, columns, Q, K) {
  return { data, rows, columns, rowEdges: edges(rows, Q), columnEdges: edges(columns, K) };
}

// The same level with at most `rows` x `columns` cells: exact, since whole cells are joined.
export function joined(fine, rows, columns) {
  const down = Math.ceil(fine.rows / rows);
  const across = Math.ceil(fine.columns / columns);
  if (down <= 1 && across <= 1) return fine;
  const rowEdges = every(fine.rowEdges, down);
  const columnEdges = every(fine.columnEdges, across);
  const made = { rows: rowEdges.length - 1, columns: columnEdges.length - 1, rowEdges, columnEdges };
  const data = new Float32Array(made.rows * made.columns);
  for (let i = 0; i < fine.rows; i++) {
    const to = Math.floor(i / down);
    const share = (fine.rowEdges[i + 1] - fine.rowEdges[i]) / (rowEdges[to + 1] - rowEdges[to]);
    for (let j = 0; j < fine.columns; j++) {
      data[to * made.columns + Math.floor(j / across)] += share * fine.data[i * fine.columns + j];
    }
  }
  return { ...made, data };
}

function every(all, step) {
  const kept = [];
  for (let i = 0; i < all.length - 1; i += step) kept.push(all[i]);
  kept.push(all[all.length - 1]);
  return Int32Array.from(kept);
}

// The cells of a level that a window of tokens touches.
export function cut(whole, [top, bottom], [left, right]) {
  const r = [find(whole.rowEdges, top), find(whole.rowEdges, bottom - 1) + 1];
  const c = [find(whole.columnEdges, left), find(whole.columnEdges, right - 1) + 1];
  const columns = c[1] - c[0];
  const data = new Float32Array((r[1] - r[0]) * columns);
  for (let i = r[0]; i < r[1]; i++) {
    data.set(whole.data.subarray(i * whole.columns + c[0], i * whole.columns + c[1]), (i - r[0]) * columns);
  }
  return {
    data,
    rows: r[1] - r[0],
    columns,
    rowEdges: whole.rowEdges.slice(r[0], r[1] + 1),
    columnEdges: whole.columnEdges.slice(c[0], c[1] + 1),
  };
}

// The cell that holds a token.
export function find(all, token) {
  let low = 0;
  let high = all.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (all[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

export function most(data) {
  let found = 0;
  for (const value of data) if (value > found) found = value;
  return found;
}

// Parts of [from, to) that divide into cells of `size` tokens, and what is left over: asked for apart, so that
// every cell is exactly what its edges say.
export function parts(from, to, size) {
  const whole = Math.floor((to - from) / size);
  const middle = from + whole * size;
  const found = whole ? [[from, middle, whole]] : [];
  if (middle < to) found.push([middle, to, 1]);
  return found;
}

// A level from the answers to such parts, asked for one after the other.
export async function stitched(fetch, rows, columns) {
  const rowEdges = [rows[0][0]];
  const columnEdges = [columns[0][0]];
  const bands = [];
  for (const [from, to, count] of rows) {
    const row = [];
    for (const [left, right, across] of columns) row.push(await fetch([from, to], [left, right], [count, across]));
    bands.push(row);
    rowEdges.push(...row[0].rowEdges.slice(1));
  }
  for (const part of bands[0]) columnEdges.push(...part.columnEdges.slice(1));
  const whole = { rows: rowEdges.length - 1, columns: columnEdges.length - 1, rowEdges: Int32Array.from(rowEdges), columnEdges: Int32Array.from(columnEdges) };
  const data = new Float32Array(whole.rows * whole.columns);
  let down = 0;
  for (const row of bands) {
    let across = 0;
    for (const part of row) {
      for (let i = 0; i < part.rows; i++) {
        data.set(part.data.subarray(i * part.columns, (i + 1) * part.columns), (down + i) * whole.columns + across);
      }
      across += part.columns;
    }
    down += row[0].rows;
  }
  return { ...whole, data };
}
