// The tooltip: lines of [label, text, number], shown next to the pointer.
import { el } from "./dom.js";
import { visible } from "./text.js";

export function createTip() {
  const element = el("div", { class: "tip", role: "tooltip", hidden: true });
  return {
    element,
    show(x, y, lines, note = "") {
      element.replaceChildren(
        ...lines.map(([label, text, value]) =>
          el(
            "div",
            { class: "tip-line" },
            el("span", { class: "tip-label", text: label }),
            text === null || text === undefined ? null : el("bdi", { class: "tip-token", text: visible(text) }),
            value === undefined ? null : el("span", { class: "tip-value", text: value }),
          ),
        ),
        note ? el("div", { class: "tip-note", text: note }) : "",
      );
      element.hidden = false;
      element.style.left = element.style.top = "0px";
      // Position 0 is not the corner of the window inside a contained or transformed element, such as a JupyterLab cell.
      const { left: zeroX, top: zeroY, width, height } = element.getBoundingClientRect();
      const left = x + 16 + width > innerWidth ? x - width - 12 : x + 16;
      const top = y + 16 + height > innerHeight ? y - height - 12 : y + 16;
      element.style.left = `${Math.max(4, left) - zeroX}px`;
      element.style.top = `${Math.max(4, top) - zeroY}px`;
    },
    hide() {
      element.hidden = true;
    },
  };
}
