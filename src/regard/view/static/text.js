// Format tokens and numbers.
const NAMED = { "\n": "↵", "\r": "␍", "\t": "⇥", "\u00ad": "⟨-⟩" };
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

// Replace invisible characters, and those that change the direction of a line, with their names.
export function visible(text) {
  if (text === "") return "∅";
  const named = text.replace(
    HIDDEN,
    (letter) => NAMED[letter] ?? `⟨U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );
  return named.trim() === "" ? "␣".repeat(Math.min(named.length, 8)) : named;
}

export function short(text, length = 18) {
  const letters = [...visible(text).trim()];
  return letters.length > length ? `${letters.slice(0, length - 1).join("")}…` : letters.join("");
}

// Isolate the direction of a text, for canvas and SVG, which have no <bdi>.
export function isolate(text) {
  return `\u2068${text}\u2069`;
}

// Print the digits that are stored: four, and multiples of 1e-9 below 1e-6 (digits.js).
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 9.5e-10) return "<1e-9";
  if (size < 9.995e-7) return value.toExponential(Math.max(0, Math.floor(Math.log10(size * (1 + 1e-6))) + 9));
  if (size < 0.001) return value.toExponential(3);
  return size >= 1000 ? value.toFixed(0) : value.toPrecision(4);
}

export function brief(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function span(from, to) {
  return to - from === 1 ? `${from}` : `${from}–${to - 1}`;
}
