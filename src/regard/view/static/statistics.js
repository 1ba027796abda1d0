// Statistics of every head, the heads with a known role, and a curve over the queries of one head.
import { colourBar } from "./axes.js";
import { choice, el, svg } from "./dom.js";
import { brief, number } from "./text.js";
import { STATISTICS } from "./state.js";
import { role } from "./words.js";

const [WIDTH, HEIGHT] = [640, 150];
const ARRAYS = { sink: "first" }; // names of arrays that differ from the name of the statistic

// About `count` round numbers within [low, high]: multiples of 1, 2 or 5 times a power of ten.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

function tickText(value) {
  return value && Math.abs(value) < 0.001 ? value.toExponential(0) : String(value);
}

export function statisticsView(app) {
  const which = choice("", (statistic) => app.set({ statistic }));
  const meaning = el("p", { class: "muted" });
  const table = el("div", { class: "table-box" });
  const found = el("section", { class: "found-box" });
  const title = el("h3");
  const curve = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const element = el(
    "section",
    { class: "view view-statistics" },
    el("div", { class: "statistics-main" }, el("div", { class: "bar" }, which.element), meaning, table, title, curve),
    found,
  );
  let turn = 0;

  function matrix() {
    const { t, state } = app;
    const palette = app.palette();
    const entries = app.heads();
    const values = entries.map((entry) => entry[state.statistic]).filter(Number.isFinite);
    const [low, high] = [Math.min(0, ...values), Math.max(...values, 1e-9)];
    const sorted = state.sort !== "layer";
    const rows = byLayer(entries, sorted);
    const widest = Math.max(0, ...rows.map((row) => row.length));
    const head = el("tr", {}, el("th", { scope: "col", text: t("layer") }));
    if (!sorted && !state.named) for (let n = 0; n < widest; n++) head.append(el("th", { scope: "col", text: app.attentions()[0].heads[n] ?? n }));
    const body = rows.map((row) =>
      el("tr", {}, el("th", { scope: "row", text: row[0].attention.layer }), row.map((entry) => cell(entry, palette, low, high))),
    );
    table.replaceChildren(el("table", { class: "matrix" }, el("thead", {}, head), el("tbody", {}, body)));
  }

  // One row per layer, in the order of their first heads.
  function byLayer(entries, sorted) {
    const layers = new Map();
    for (const entry of entries) {
      if (!layers.has(entry.attention.id)) layers.set(entry.attention.id, []);
      layers.get(entry.attention.id).push(entry);
    }
    if (!sorted) for (const row of layers.values()) row.sort((a, b) => a.head - b.head);
    return [...layers.values()];
  }

  function cell(entry, palette, low, high) {
    const { t, state } = app;
    const value = entry[state.statistic];
    const button = el("button", {
      type: "button", text: brief(value), "data-head": `${entry.attention.id}/${entry.head}`,
      "aria-label": `${t("heads.one", { layer: entry.attention.layer, head: entry.head })}: ${t(state.statistic)} ${number(value)}`,
      on: {
        click: () => app.set({ attention: entry.attention.id, kind: entry.attention.kind, head: entry.head }),
        dblclick: () => app.set({ view: "map" }),
        pointermove: (event) => app.tip.show(event.clientX, event.clientY, [
          [t("heads.one", { layer: entry.attention.layer, head: entry.head }), null],
          ...STATISTICS.map((name) => [t(name), null, number(entry[name])]),
          ...entry.found.map((one) => [role(t, one), null, brief(one.score)]),
        ]),
        pointerleave: () => app.tip.hide(),
      },
    });
    const share = Number.isFinite(value) ? (value - low) / (high - low) : 0;
    button.style.background = palette.css(share * share, 1); // squared to cancel the square root of the palette: statistics use a linear scale
    button.style.color = palette.ink(share * share, 1);
    const chosen = entry.attention.id === state.attention && entry.head === state.head;
    button.toggleAttribute("data-chosen", chosen);
    return el("td", {}, button);
  }

  function roles() {
    const { t } = app;
    const rows = app.heads().flatMap((entry) => entry.found.map((one) => ({ ...one, entry })));
    rows.sort((a, b) => b.score - a.score);
    found.replaceChildren(
      el("h3", { text: t("found") }),
      rows.length
        ? el("table", { class: "roles" },
            el("thead", {}, el("tr", {}, ["role", "layer", "head", "score"].map((name) => el("th", { scope: "col", text: t(name) })))),
            el("tbody", {}, rows.slice(0, 200).map(({ entry, ...one }) =>
              el("tr", {},
                el("td", {}, el("button", {
                  type: "button", class: "link", text: role(t, one),
                  on: { click: () => app.set({ view: "map", attention: entry.attention.id, head: entry.head, rows: null, columns: null }) },
                })),
                el("td", { text: entry.attention.layer }), el("td", { text: entry.head }), el("td", { text: brief(one.score) }),
              ))))
        : el("p", { class: "muted", text: t("found.none") }),
    );
  }

  async function chart() {
    const now = ++turn;
    const { t, state } = app;
    const attention = app.attention();
    const name = attention?.statistics?.[ARRAYS[state.statistic] ?? state.statistic];
    curve.replaceChildren();
    curve.toggleAttribute("hidden", !name);
    title.textContent = "";
    if (!name) return;
    const { data, shape } = await app.source.array(name);
    if (now !== turn) return;
    const count = shape[1];
    const at = Math.max(0, attention.heads.indexOf(state.head));
    const values = data.subarray(at * count, (at + 1) * count);
    const finite = Array.from(values).filter(Number.isFinite);
    const [low, high] = [Math.min(0, ...finite), Math.max(1e-9, ...finite)];
    const x = (n) => 44 + ((WIDTH - 54) * n) / Math.max(1, count - 1);
    const y = (value) => HEIGHT - 24 - ((HEIGHT - 36) * (value - low)) / (high - low);
    const path = Array.from(values, (value, n) => (Number.isFinite(value) ? `${x(n).toFixed(1)} ${y(value).toFixed(1)}` : null)).filter(Boolean);
    title.textContent = t("curve", { statistic: t(state.statistic), layer: attention.layer, head: state.head });
    curve.setAttribute("aria-label", title.textContent);
    for (const value of ticks(low, high, 4)) {
      curve.append(
        svg("line", { class: "grid", x1: 44, x2: WIDTH - 10, y1: y(value), y2: y(value) }),
        svg("text", { class: "tick", x: 38, y: y(value), "text-anchor": "end", "dominant-baseline": "central", text: tickText(value) }),
      );
    }
    const last = Math.max(1, attention.Q - 1);
    for (const token of ticks(0, last, 8).filter(Number.isInteger)) {
      curve.append(svg("text", { class: "tick", x: 44 + ((WIDTH - 54) * token) / last, y: HEIGHT - 8, "text-anchor": "middle", text: token }));
    }
    if (path.length) curve.append(svg("path", { class: "curve-line", d: `M${path.join("L")}` }));
  }

  return {
    element,
    async update() {
      const { t, state } = app;
      which.set(STATISTICS.map((name) => [name, t(name)]), state.statistic, t("statistic"));
      meaning.textContent = t(state.kind === "cross" && state.statistic === "distance" ? "distance.none" : `${state.statistic}.long`);
      matrix();
      roles();
      await chart();
    },
    focus: () => table.querySelector("button")?.focus(),
    hint: "",
    async figure() {
      const { state } = app;
      const palette = app.palette();
      const entries = app.heads();
      const values = entries.map((entry) => entry[state.statistic]).filter(Number.isFinite);
      const [low, high] = [Math.min(0, ...values), Math.max(...values, 1e-9)];
      const rows = byLayer(entries, state.sort !== "layer");
      const across = Math.max(1, ...rows.map((row) => row.length));
      const drawing = svg("svg", { width: Math.max(240, 60 + across * 52), height: 78 + rows.length * 40 });
      drawing.append(svg("text", { x: 48, y: 22, "font-size": 13, "font-weight": 600, text: app.t(state.statistic) }));
      drawing.append(svg("text", { x: 38, y: 22, "font-size": 9, "text-anchor": "end", text: app.t("layer") }));
      for (const [r, row] of rows.entries()) {
        const y = 36 + r * 40;
        drawing.append(svg("text", { x: 38, y: y + 18, "font-size": 11, "text-anchor": "end", text: row[0].attention.layer }));
        for (const [n, entry] of row.entries()) {
          const x = 48 + n * 52;
          const share = Number.isFinite(entry[state.statistic]) ? (entry[state.statistic] - low) / (high - low) : 0;
          drawing.append(
            svg("rect", { x, y, width: 50, height: 28, rx: 3, fill: palette.css(share * share, 1) }),
            svg("text", { x: x + 25, y: y + 18, "font-size": 11, "text-anchor": "middle", fill: palette.ink(share * share, 1), text: brief(entry[state.statistic]) }),
            svg("text", { x: x + 25, y: y + 37, "font-size": 8, "text-anchor": "middle", text: `${app.t("head")} ${entry.head}` }),
          );
        }
      }
      drawing.append(colourBar(48, 52 + rows.length * 40, palette, "", [low, high].map(brief), true));
      return drawing;
    },
  };
}
