// Thumbnails of all heads: one row per layer, or a continuous flow under another sort order.
import { colourBar } from "./axes.js";
import { el, svg } from "./dom.js";
import { coarsen, topOf } from "./levels.js";
import { toColours } from "./raster.js";
import { brief } from "./text.js";
import { role } from "./words.js";

const SIDE = 64;

export function headsView(app) {
  const grid = el("div", { class: "heads", role: "grid" });
  const element = el("section", { class: "view view-heads" }, grid);
  const thumbs = new Map();
  let shown = [];
  let version = 0;

  // Only thumbnails on the screen are decoded and drawn.
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      entry.target.regardVisible = entry.isIntersecting;
      if (entry.isIntersecting) draw(entry.target);
    }
  }, { rootMargin: "200px" });

  async function draw(button) {
    const { attention, head } = button.regardHead;
    const palette = app.palette();
    const mark = `${version}/${palette.theme}`;
    if (button.regardDrawn === mark) return;
    button.regardDrawn = mark;
    const level = coarsen(await app.source.level(attention, head), SIDE, SIDE);
    if (button.regardDrawn === mark) paint(button.querySelector("canvas"), level, palette);
  }

  function thumb(entry) {
    const key = `${entry.attention.id}/${entry.head}`;
    if (!thumbs.has(key)) {
      const button = el(
        "button",
        { type: "button", class: "thumb", role: "gridcell", tabindex: "-1", "data-head": key },
        el("canvas", { width: 1, height: 1, "aria-hidden": "true" }),
        el("span", { class: "thumb-name" }),
        el("span", { class: "thumb-role" }),
      );
      button.addEventListener("click", () =>
        app.set({ view: "map", attention: entry.attention.id, head: entry.head, rows: null, columns: null }),
      );
      button.addEventListener("pointermove", (event) => showTip(event, button.regardHead));
      button.addEventListener("pointerleave", () => app.tip.hide());
      observer.observe(button);
      thumbs.set(key, button);
    }
    const button = thumbs.get(key);
    const names = entry.found.map((one) => role(app.t, one));
    button.regardHead = entry;
    button.children[1].textContent = `${entry.attention.layer}·${entry.head}`;
    button.children[2].textContent =
      app.state.sort === "layer" || app.state.sort === "found" ? names[0] ?? "" : brief(entry[app.state.sort]);
    const label = app.t("heads.one", { layer: entry.attention.layer, head: entry.head });
    button.setAttribute("aria-label", [label, ...names].join(", "));
    button.toggleAttribute("data-found", names.length > 0);
    const chosen = entry.attention.id === app.state.attention && entry.head === app.state.head;
    button.tabIndex = chosen ? 0 : -1;
    button.toggleAttribute("data-chosen", chosen);
    return button;
  }

  function showTip(event, entry) {
    const { t } = app;
    app.tip.show(event.clientX, event.clientY, [
      [t("heads.one", { layer: entry.attention.layer, head: entry.head }), null],
      ...entry.found.map((one) => [role(t, one), null, brief(one.score)]),
      ...["entropy", "distance", "max_logit", "sink"].map((name) => [t(name), null, brief(entry[name])]),
    ], entry.attention.name);
  }

  grid.addEventListener("keydown", (event) => {
    const at = shown.indexOf(document.activeElement);
    if (at < 0) return;
    const across = columns();
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + across, ArrowUp: at - across, Home: 0, End: shown.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = shown[Math.max(0, Math.min(shown.length - 1, to))];
    for (const button of shown) button.tabIndex = button === next ? 0 : -1;
    next.focus();
  });

  function columns() {
    const top = shown[0]?.offsetTop;
    const count = shown.findIndex((button) => button.offsetTop !== top);
    return count < 0 ? shown.length : count;
  }

  return {
    element,
    update() {
      const { state, t } = app;
      const entries = app.heads();
      grid.setAttribute("aria-label", t("view.heads"));
      const byLayer = state.sort === "layer";
      const widest = Math.max(1, ...app.attentions().map((attention) => attention.heads.length));
      grid.style.setProperty("--across", byLayer && !state.named ? widest : Math.min(widest, 12));
      const nodes = [];
      let layer = null;
      let row = null;
      shown = [];
      for (const entry of entries) {
        if (byLayer && entry.attention.id !== layer) {
          layer = entry.attention.id;
          const header = el("div", { class: "heads-layer", role: "rowheader", text: entry.attention.layer, title: entry.attention.name });
          row = el("div", { class: "heads-row", role: "presentation" });
          nodes.push(el("div", { class: "heads-line", role: "row" }, header, row));
        }
        if (!byLayer && !row) nodes.push((row = el("div", { class: "heads-row heads-flow", role: "row" })));
        shown.push(thumb(entry));
        row.append(shown.at(-1));
      }
      grid.replaceChildren(...nodes);
      if (shown.length && !shown.some((button) => button.tabIndex === 0)) shown[0].tabIndex = 0;
      for (const button of shown) if (button.regardVisible) draw(button);
    },
    focus: () => shown.find((button) => button.tabIndex === 0)?.focus(),
    forget() {
      version++;
      for (const button of thumbs.values()) observer.unobserve(button);
      thumbs.clear();
    },
    hint: "hint.heads",
    async figure() {
      const entries = app.heads();
      const palette = app.palette();
      const across = Math.min(entries.length, Math.max(...app.attentions().map(({ heads }) => heads.length), 1));
      const down = Math.ceil(entries.length / across);
      const drawing = svg("svg", { width: Math.max(380, across * 108 + 16), height: down * 138 + 40 });
      drawing.append(colourBar(12, down * 138 + 18, palette, "", ["0", app.t("strongest")]));
      for (const [n, { attention, head, found }] of entries.entries()) {
        const level = coarsen(await app.source.level(attention, head), SIDE, SIDE);
        const canvas = el("canvas");
        paint(canvas, level, palette);
        const [x, y] = [12 + (n % across) * 108, 12 + Math.floor(n / across) * 138];
        drawing.append(
          svg("image", { x, y, width: 100, height: 100, href: canvas.toDataURL(), preserveAspectRatio: "none", "image-rendering": "pixelated" }),
          svg("text", { x, y: y + 112, "font-size": 10, text: app.t("heads.one", { layer: attention.layer, head }) }),
          svg("text", { x, y: y + 123, "font-size": 9, fill: palette.theme === "dark" ? "#8ea2ff" : "#4553d6", text: found[0] ? role(app.t, found[0]) : "" }),
        );
      }
      return drawing;
    },
  };
}

function paint(canvas, level, palette) {
  canvas.width = level.columns;
  canvas.height = level.rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(level.columns, level.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const top = topOf(level.data);
  pixels.set(toColours(level, palette, top));
  context.putImageData(image, 0, 0);
}
