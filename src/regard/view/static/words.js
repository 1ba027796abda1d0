// Texts of the interface, in the language of the page.
import WORDS from "./words.json" with { type: "json" };

export const LANGUAGES = Object.keys(WORDS);

// more: further texts, by language.
export function translator(language, more = {}) {
  const known = { ...(WORDS[language] ?? WORDS.en), ...more[language] };
  return (key, values = {}) => (known[key] ?? WORDS.en[key] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

// The name of a head's role; a role that words.json does not have keeps its name. A positional head has an offset.
export function role(t, { name, offset }) {
  const translated = t(`role.${name}`);
  const shown = translated === `role.${name}` ? name : translated;
  return Number.isFinite(offset) ? `${shown} ${offset > 0 ? "+" : offset < 0 ? "−" : ""}${Math.abs(offset)}` : shown;
}
