// Decode weights stored as decimal digits in two bytes each (see digits.py); the stored digits are the printed ones.
const TINY = 64000;
let table = null;

function build() {
  const values = new Float64Array(65536);
  for (let code = 0; code < TINY; code++) {
    const power = Math.max(0, Math.floor((code - 1000) / 9000));
    values[code] = Number(`${code - 9000 * power}e${power - 9}`);
  }
  values[TINY] = 1e-10;
  return values;
}

// Decode an array of codes; an array of floats, used where a number is too large for a code, is returned unchanged.
export function decode({ data, shape }) {
  if (!(data instanceof Uint16Array)) return { data, shape };
  table ??= build();
  return { data: Float32Array.from(data, (code) => table[code]), shape };
}
