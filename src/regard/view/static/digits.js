// Weights as their decimal digits in two bytes each, which digits.py writes: what is printed is what is stored.
const TINY = 64000;
let table = null;

function build() {
  const made = new Float64Array(65536);
  for (let code = 0; code < TINY; code++) {
    const power = Math.max(0, Math.floor((code - 1000) / 9000));
    made[code] = Number(`${code - 9000 * power}e${power - 9}`);
  }
  made[TINY] = 1e-10;
  return made;
}

// The numbers of an array that is one of codes, or of floats where a number is too large for a code.
export function decoded({ data, shape }) {
  if (!(data instanceof Uint16Array)) return { data, shape };
  table ??= build();
  return { data: Float32Array.from(data, (code) => table[code]), shape };
}
