// The words of the interface, in the language of the page.
import WORDS from "./words.json" with { type: "json" };

export const LANGUAGES = Object.keys(WORDS);

export function translator(language) {
  const known = WORDS[language] ?? WORDS.en;
  return (key, values = {}) => (known[key] ?? WORDS.en[key] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

// Roles come from the document: one that the dictionary does not know keeps its name.
export function role(t, name) {
  const found = t(`role.${name}`);
  return found === `role.${name}` ? name : found;
}
