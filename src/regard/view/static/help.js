// The keyboard help, opened with `?`.
import { el } from "./dom.js";

const KEYS = [
  ["1 – 8", "keys.views"],
  ["[  ]", "keys.head"],
  [",  .", "keys.layer"],
  ["k", "keys.kind"],
  ["/", "keys.search"],
  ["n  N", "keys.matches"],
  ["+  −  0", "keys.zoom"],
  ["← ↑ → ↓", "keys.move"],
  ["Shift + ← ↑ → ↓", "keys.pan"],
  ["Enter", "keys.pin"],
  ["Esc", "keys.escape"],
  ["p  s  c", "keys.export"],
  ["t", "keys.theme"],
  ["l", "keys.language"],
  ["?", "keys.help"],
];

export function createHelp() {
  const element = el("dialog", { class: "help" });
  element.addEventListener("click", (event) => {
    if (event.target === element) element.close();
  });
  return {
    element,
    open(t) {
      element.setAttribute("aria-label", t("help"));
      element.replaceChildren(
        el("header", {}, el("h2", { text: t("help") }), el("button", { type: "button", class: "icon", "aria-label": t("close"), text: "✕", on: { click: () => element.close() } })),
        el("dl", {}, KEYS.flatMap(([keys, name]) => [
          el("dt", {}, keys.split("  ").map((key) => el("kbd", { text: key }))),
          el("dd", { text: t(name) }),
        ])),
      );
      if (!element.open) element.showModal();
    },
  };
}
