// The words of the interface, in the language of the page.
import WORDS from "./words.json" with { type: "json" };

export const LANGUAGES = Object.keys(WORDS);

export function translator(language) {
  const known = WORDS[language] ?? WORDS.en;
  return (key, values = {}) => (known[key] ?? WORDS.en[key] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

// Roles come from the document: one that the dictionary does not know keeps its name. A positional head has an offset.
export function role(t, { name, offset }) {
  const found = t(`role.${name}`);
  const shown = found === `role.${name}` ? name : found;
  return Number.isFinite(offset) ? `${shown} ${offset > 0 ? "+" : offset < 0 ? "−" : ""}${Math.abs(offset)}` : shown;
}
