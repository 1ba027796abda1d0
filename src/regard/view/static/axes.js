// Axis labels and cell values of a map: texts with positions, drawn on a canvas or in SVG.
import { el, svg } from "./dom.js";
import { number, short } from "./text.js";

const GAP = 9.5; // least distance of labels, in pixels

// letters: most letters of a label above the map.
export function axes(field, view, size, level, palette, top, letters) {
  const labelled = [];
  const down = size.height / (view.bottom - view.top);
  const across = size.width / (view.right - view.left);
  for (const [token, text, strong] of labels(view.top, view.bottom, down, field.rowText, field.rowMarks, 15)) {
    labelled.push({ x: -8, y: (token + 0.5 - view.top) * down, text, strong, size: Math.min(11, Math.max(9.5, down)), align: "right" });
  }
  for (const [token, text, strong] of labels(view.left, view.right, across, field.columnText, field.columnMarks, letters)) {
    labelled.push({ x: (token + 0.5 - view.left) * across, y: -8, text, strong, size: Math.min(11, Math.max(9.5, across)), align: "left", rotation: -55 });
  }
  labelled.push({ x: -8, y: -12, text: field.corner, size: 11, align: "right", soft: true });
  if (isSingle(level) && across >= 48 && down >= 18) {
    for (let i = 0; i < level.rows; i++) {
      for (let j = 0; j < level.columns; j++) {
        const [x, y] = [(level.columnEdges[j] + 0.5 - view.left) * across, (level.rowEdges[i] + 0.5 - view.top) * down];
        if (x < 0 || y < 0 || x > size.width || y > size.height) continue;
        const value = level.data[i * level.columns + j];
        if (value > 0 || (palette.signed && value < 0)) {
          const text = Math.abs(value) < 0.001 ? (palette.signed ? "≈0" : "<.001") : number(value).replace(/^(-?)0/, "$1");
          labelled.push({ x, y, text, size: 11, align: "center", fill: palette.ink(value, top) });
        }
      }
    }
  }
  return labelled;
}

// Token texts where they fit, otherwise positions at round steps; matches of the search are highlighted.
function labels(from, to, pixels, text, marks, letters) {
  const labelled = [];
  if (pixels >= GAP) {
    for (let token = Math.max(0, Math.floor(from)); token < to; token++) {
      if (token + 0.5 >= from && token + 0.5 <= to) labelled.push([token, short(text(token), letters), marks.has(token)]);
    }
    return labelled;
  }
  let step = 1;
  for (const factor of cycle([2, 2.5, 2])) {
    if (step * pixels >= 36) break;
    step *= factor;
  }
  let last = -Infinity;
  for (const token of [...marks].sort((a, b) => a - b)) {
    if (token < from || token >= to || (token - last) * pixels < GAP) continue;
    labelled.push([token, short(text(token), letters), true]);
    last = token;
  }
  const taken = labelled.map(([token]) => token);
  for (let token = Math.ceil(from / step) * step; token < to; token += step) {
    if (!taken.some((other) => Math.abs(other - token) * pixels < GAP)) labelled.push([token, String(token), false]);
  }
  return labelled;
}

function* cycle(items) {
  for (;;) yield* items;
}

// The upper end of a scale, as a number of two digits.
export function scaleText(top) {
  return top && Math.abs(top) < 0.001 ? top.toExponential(1) : String(Number(top.toPrecision(2)));
}

export function legend(element, palette, top, label) {
  const low = palette.signed ? -1 : 0;
  const from = palette.signed ? scaleText(-top) : "0";
  const stops = Array.from({ length: 33 }, (_, n) => palette.css(low + ((1 - low) * n) / 32, 1)).join(", "); // linear in the weights
  const bar = el("span", { class: "legend-bar", role: "img", "aria-label": `${label}: ${from} – ${scaleText(top)}` });
  bar.style.background = `linear-gradient(to right, ${stops})`;
  element.replaceChildren(
    el("span", { text: from }),
    bar,
    el("span", { text: scaleText(top) }),
    el("span", { class: "legend-label", text: label }),
  );
}

// The colour scale of a saved picture at (x, y), with a label and the texts of both ends. With `even`, colours are linear
// in the numbers instead of their square roots.
export function colourBar(x, y, palette, label, [from, to], even = false) {
  const bar = svg("g", { class: "colour-bar", transform: `translate(${x} ${y})` });
  const start = 8 + 7 * from.length;
  bar.append(svg("text", { x: 0, y: 10, "font-size": 11, text: from }));
  for (let n = 0; n < 60; n++) {
    const share = palette.signed ? (2 * n) / 59 - 1 : even ? (n / 59) ** 2 : n / 59;
    bar.append(svg("rect", { x: start + 2 * n, y: 0, width: 2.2, height: 12, fill: palette.css(share, 1) }));
  }
  const end = svg("text", { x: start + 128, y: 10, "font-size": 11 }, to);
  if (label) end.append(svg("tspan", { dx: 10, "font-weight": 600, text: label }));
  bar.append(end);
  return bar;
}

// Whether every cell of a level is one query and one key.
export function isSingle({ rows, columns, rowEdges, columnEdges }) {
  return Boolean(rows && rowEdges[rows] - rowEdges[0] === rows && columnEdges[columns] - columnEdges[0] === columns);
}
