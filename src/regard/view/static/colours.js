// Sequential colour maps for light and dark pages: anchors interpolated in OKLab, with monotone lightness.
const ANCHORS = {
  light: ["#fbfbfd", "#d7ebe3", "#86c9b6", "#3a97a8", "#33609f", "#3a2f7d", "#1d1040"],
  dark: ["#14161f", "#2a2455", "#35457f", "#2f7290", "#3fa48c", "#9acb62", "#fdf0a0"],
};
// For differences: less, equal, more.
const DIVERGING = {
  light: ["#7a2a08", "#c2570c", "#f0a868", "#fbfbfd", "#93a3ee", "#4553d6", "#222a86"],
  dark: ["#ffd9b8", "#ff9b52", "#8a4a1c", "#14161f", "#343f8f", "#7d90ff", "#dfe4ff"],
};
const STEPS = 256;

function linear(hex) {
  return [1, 3, 5].map((at) => {
    const value = parseInt(hex.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
}

function toLab(hex) {
  const [r, g, b] = linear(hex);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function toBytes([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((value) => {
    const inside = Math.min(1, Math.max(0, value));
    return Math.round(255 * (inside <= 0.0031308 ? 12.92 * inside : 1.055 * inside ** (1 / 2.4) - 0.055));
  });
}

function build(theme, signed = false) {
  const anchors = (signed ? DIVERGING : ANCHORS)[theme].map(toLab);
  const bytes = [];
  for (let step = 0; step < STEPS; step++) {
    const at = (step / (STEPS - 1)) * (anchors.length - 1);
    const low = Math.min(Math.floor(at), anchors.length - 2);
    bytes.push(toBytes(anchors[low].map((value, n) => value + (at - low) * (anchors[low + 1][n] - value))));
  }
  const pixels = Uint32Array.from(bytes, ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0);
  // The square root makes small weights distinguishable; the legend shows the same scale.
  const share = (value, most) => (value > 0 && most > 0 ? Math.min(1, Math.sqrt(value / most)) : 0);
  const index = signed
    ? (value, most) => Math.round(127.5 + 127.5 * (value < 0 ? -share(-value, most) : share(value, most)))
    : (value, most) => Math.round(255 * share(value, most));
  const strong = (n) => (signed ? 255 - 2 * Math.min(n, 255 - n) : n);
  return {
    theme,
    signed,
    pixels,
    index,
    at: (share) => `rgb(${bytes[Math.round(255 * Math.min(1, Math.max(0, share)))].join(" ")})`,
    css: (value, most) => `rgb(${bytes[index(value, most)].join(" ")})`,
    ink: (value, most) => (theme === "light" ? strong(index(value, most)) > (signed ? 150 : 115) : strong(index(value, most)) < 155) ? "#ffffff" : "#0d1018",
    bytes: (value, most) => bytes[index(value, most)],
  };
}

const palettes = {};

export function palette(dark) {
  const theme = dark ? "dark" : "light";
  palettes[theme] ??= build(theme);
  return palettes[theme];
}

export function diverging(dark) {
  const theme = dark ? "dark" : "light";
  palettes[`diverging ${theme}`] ??= build(theme, true);
  return palettes[`diverging ${theme}`];
}
