// Levels: the weights of one head as a grid of cells. A cell is the mean weight over its rows and columns; a cell of one
// row and one column is exact. Bands are a flat array of [start, stop] pairs. Since neighbouring bands may overlap by one
// token, a cell is drawn from the start of its band to the start of the next.

// Band n of N over a length L is floor(n L / N) ... ceil((n + 1) L / N), as in pool.py.
export function bands(length, count) {
  const result = new Int32Array(2 * count);
  for (let n = 0; n < count; n++) {
    result[2 * n] = Math.floor((n * length) / count);
    result[2 * n + 1] = Math.ceil(((n + 1) * length) / count);
  }
  return result;
}

export function level(data, rows, columns) {
  return { data, rows: rows.length / 2, columns: columns.length / 2, rowBands: rows, columnBands: columns, rowEdges: edges(rows), columnEdges: edges(columns) };
}

function edges(pairs) {
  const result = new Int32Array(pairs.length / 2 + 1);
  for (let n = 0; n < result.length - 1; n++) result[n] = pairs[2 * n];
  result[result.length - 1] = pairs[pairs.length - 1];
  return result;
}

// Merge cells to at most `rows` x `columns`, for colours only.
export function coarsen(fine, rows, columns) {
  const down = Math.ceil(fine.rows / rows);
  const across = Math.ceil(fine.columns / columns);
  if (down <= 1 && across <= 1) return fine;
  const coarse = { rows: Math.ceil(fine.rows / down), columns: Math.ceil(fine.columns / across), rowEdges: every(fine.rowEdges, down), columnEdges: every(fine.columnEdges, across) };
  const data = new Float32Array(coarse.rows * coarse.columns);
  const share = (all, n, coarseEdges, to) => (all[n + 1] - all[n]) / (coarseEdges[to + 1] - coarseEdges[to]);
  for (let i = 0; i < fine.rows; i++) {
    const y = Math.floor(i / down);
    const tall = share(fine.rowEdges, i, coarse.rowEdges, y);
    for (let j = 0; j < fine.columns; j++) {
      const x = Math.floor(j / across);
      data[y * coarse.columns + x] += tall * share(fine.columnEdges, j, coarse.columnEdges, x) * fine.data[i * fine.columns + j];
    }
  }
  return { ...coarse, data };
}

function every(all, step) {
  const kept = [];
  for (let i = 0; i < all.length - 1; i += step) kept.push(all[i]);
  kept.push(all[all.length - 1]);
  return Int32Array.from(kept);
}

// The cells that overlap a window of tokens, for colours.
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

// The cell that contains a query and a key: its bands and its value.
export function cellAt(whole, query, key) {
  const i = find(whole.rowEdges, query);
  const j = find(whole.columnEdges, key);
  const rows = [...whole.rowBands.subarray(2 * i, 2 * i + 2)];
  const columns = [...whole.columnBands.subarray(2 * j, 2 * j + 2)];
  const single = rows[1] - rows[0] === 1 && columns[1] - columns[0] === 1;
  return { rows, columns, single, value: whole.data[i * whole.columns + j] };
}

// Index of the interval that contains a token.
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
  let result = 0;
  for (const value of data) if (Math.abs(value) > result) result = Math.abs(value);
  return result;
}

// Upper end of a colour scale: the largest value rounded up to two digits, so that the legend can print it exactly.
export function topOf(data) {
  return roundUp(most(data));
}

export function roundUp(value) {
  if (!(value > 0)) return 0;
  const step = 10 ** (Math.floor(Math.log10(value)) - 1);
  return Number((Math.ceil(value / step - 1e-9) * step).toPrecision(2));
}
