// A zoomable matrix of weights: canvas, axes, tooltip, keys.
import { axes, colourBar, isSingle, legend, scaleText } from "./axes.js";
import { debounce, el, oncePerFrame, svg } from "./dom.js";
import { cellAt, cut, coarsen, topOf } from "./levels.js";
import { createPanel } from "./panel.js";
import { raster } from "./raster.js";
import { isolate, number, short, span } from "./text.js";
import { createWindow } from "./window.js";

const EDGE = 10;
const CELLS = 192; // rows and columns requested from a live source per window

// A field: {key, Q, K, level, fetch(rows, columns, size) or null, rowText(i), columnText(j), rowMarks, columnMarks,
// top(query) -> promise of [[key, weight], ...], row(query) and column(key) -> promises of answers of neighbours.js,
// value: a key of words.json, "weight" by default; `${value}.pooled` and `${value}.mean` must be keys as well; diverging:
// whether the numbers are differences}. bare: without the panel. onPick({query, key}): called when a cell is clicked.
export function createPlane(app, onWindow, { bare = false, onPick = null, aside = null } = {}) {
  const [LEFT, TOP, RIGHT] = bare ? [116, 66, 44] : [116, 84, 56]; // room for labels
  const letters = bare ? 10 : 14; // of a label above the map
  const canvas = el("canvas", { class: "plane", tabindex: "0", role: "application" });
  const readout = el("output", { class: "readout", "aria-live": "polite" });
  const scale = el("div", { class: "legend" });
  const buttons = el("div", { class: "zoom" });
  const box = el("div", { class: "plane-box" }, canvas, el("div", { class: "plane-foot" }, buttons, scale, readout));
  const panel = createPanel(app, (token, side) => plane.center(side === "query" ? token : null, side === "key" ? token : null), 10);
  const element = bare ? el("div", { class: "plane-alone" }, box) : el("div", { class: "plane-pair" }, box, el("div", { class: "plane-side" }, aside, panel.element));
  const colours = () => (field.diverging ? app.diverging() : app.palette());
  let field = null;
  let frame = null; // the window
  let detail = null; // the latest answer of a live source
  let drawn = null; // the level that colours come from
  let base = null; // the level that numbers come from
  let size = { width: 0, height: 0 };
  let pointer = null;
  let cursor = null;
  let latest = 0;
  let known = ""; // the window in the state, as last seen by this map

  const fetchDetail = debounce(async () => {
    const now = ++latest;
    const { view } = frame;
    const cell = Math.max(1, Math.ceil(Math.max(view.bottom - view.top, view.right - view.left) / CELLS));
    const finest = Math.min(field.Q / field.level.rows, field.K / field.level.columns);
    if (!field.fetch || cell >= finest || covers(detail, view, cell)) return;
    // Align the window with multiples of a cell, so that cells do not change while the map moves.
    const rows = [Math.floor(view.top / cell) * cell, Math.min(field.Q, Math.ceil(view.bottom / cell) * cell)];
    const columns = [Math.floor(view.left / cell) * cell, Math.min(field.K, Math.ceil(view.right / cell) * cell)];
    const { key } = field;
    try {
      const found = await field.fetch(rows, columns, [rows, columns].map(([from, to]) => Math.ceil((to - from) / cell)));
      if (now !== latest || key !== field.key) return;
      detail = { ...found, cell };
      draw();
    } catch (error) {
      app.showError(error);
    }
  }, 60);

  const reportWindow = debounce(() => {
    const window = frame.rounded();
    known = String([window.rows, window.columns]);
    onWindow(window);
  }, 120);

  function changed() {
    draw();
    fetchDetail();
    reportWindow();
  }

  function measure() {
    const room = box.getBoundingClientRect();
    const most = { width: Math.max(160, room.width - LEFT - RIGHT), height: Math.max(160, room.height - TOP - EDGE - 44) };
    const shape = Math.min(2, Math.max(0.5, field.K / field.Q));
    const height = Math.min(most.height, most.width / shape);
    size = { width: Math.floor(height * shape), height: Math.floor(height) };
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round((size.width + LEFT + RIGHT) * ratio);
    canvas.height = Math.round((size.height + TOP + EDGE) * ratio);
    canvas.style.width = `${size.width + LEFT + RIGHT}px`;
    canvas.style.height = `${size.height + TOP + EDGE}px`;
    canvas.dataset.plot = [LEFT, TOP, size.width, size.height];
  }

  function choose() {
    const { view } = frame;
    base = detail && covers(detail, view, Infinity) ? detail : field.level;
    if (base === detail) return detail;
    const cells = [size.height, size.width].map((pixels) => Math.max(1, pixels));
    const shares = [(view.bottom - view.top) / field.Q, (view.right - view.left) / field.K];
    return coarsen(field.level, Math.ceil(cells[0] / shares[0]), Math.ceil(cells[1] / shares[1]));
  }

  const draw = oncePerFrame(() => {
    if (!field || !element.isConnected || element.offsetParent === null) return;
    const { view } = frame;
    const palette = colours();
    drawn = choose();
    const visible = cut(drawn, [Math.floor(view.top), Math.ceil(view.bottom)], [Math.floor(view.left), Math.ceil(view.right)]);
    const top = topOf(visible.data);
    const ratio = devicePixelRatio || 1;
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    const image = raster(visible, view, Math.round(size.width * ratio), Math.round(size.height * ratio), palette, top);
    context.putImageData(image, Math.round(LEFT * ratio), Math.round(TOP * ratio));
    context.setTransform(ratio, 0, 0, ratio, LEFT * ratio, TOP * ratio);
    const style = getComputedStyle(element);
    const ink = (name) => style.getPropertyValue(name).trim();
    for (const part of axes(field, view, size, visible, palette, top, letters)) {
      context.save();
      context.translate(part.x, part.y);
      if (part.rotation) context.rotate((part.rotation * Math.PI) / 180);
      context.font = `${part.strong ? "600 " : ""}${part.size}px ${style.fontFamily}`;
      context.textAlign = part.align;
      context.textBaseline = "middle";
      context.direction = "ltr";
      context.fillStyle = part.fill ?? ink(part.strong ? "--accent" : "--muted");
      context.fillText(isolate(part.text), 0, 0);
      context.restore();
    }
    context.strokeStyle = ink("--line");
    context.strokeRect(-0.5, -0.5, size.width + 1, size.height + 1);
    if (app.state.cell && onPick) outline(context, { query: app.state.cell[0], key: app.state.cell[1] }, ink("--accent"));
    outline(context, pointer ?? cursor, ink("--mark"));
    legend(scale, palette, top, valueName(isSingle(visible)));
  });

  function valueName(single) {
    const value = field.value ?? "weight";
    return app.t(single ? value : `${value}.pooled`);
  }

  function outline(context, spot, colour) {
    if (!spot) return;
    if (spot.query >= field.Q || spot.key >= field.K) return;
    const cell = cellAt(base, spot.query, spot.key);
    const { view } = frame;
    const x = (token) => ((token - view.left) / (view.right - view.left)) * size.width;
    const y = (token) => ((token - view.top) / (view.bottom - view.top)) * size.height;
    context.save();
    context.beginPath();
    context.rect(0, 0, size.width, size.height);
    context.clip();
    context.strokeStyle = colour;
    context.lineWidth = 2;
    const box = [x(cell.columns[0]), y(cell.rows[0]), x(cell.columns[1]), y(cell.rows[1])];
    context.strokeRect(box[0], box[1], box[2] - box[0], box[3] - box[1]);
    context.globalAlpha = 0.35;
    context.lineWidth = 1;
    context.strokeRect(-2, box[1], size.width + 4, box[3] - box[1]);
    context.strokeRect(box[0], -2, box[2] - box[0], size.height + 4);
    context.restore();
  }

  function lines(spot) {
    const { t } = app;
    const cell = cellAt(base, spot.query, spot.key);
    const side = (label, [from, to], text) => [
      `${t(label)} ${span(from, to)}`,
      to - from === 1 ? text(from) : `${short(text(from), 14)} … ${short(text(to - 1), 14)}`,
    ];
    return {
      cell,
      lines: [
        side(cell.rows[1] - cell.rows[0] === 1 ? "query" : "queries", cell.rows, field.rowText),
        side(cell.columns[1] - cell.columns[0] === 1 ? "key" : "keys", cell.columns, field.columnText),
        [valueName(cell.single), null, number(cell.value)],
      ],
      note: [
        cell.single ? "" : t(`${field.value ?? "weight"}.mean`, { rows: cell.rows[1] - cell.rows[0], columns: cell.columns[1] - cell.columns[0] }),
        field.estimate ? t("estimate") : "",
      ].filter(Boolean).join("; "),
    };
  }

  const read = debounce(async (spot) => {
    const { key } = field;
    if (!field.row) return;
    try {
      const answers = await Promise.all([field.row(spot.query), field.column(spot.key)]);
      const now = pointer ?? cursor ?? spot;
      if (key !== field.key || now.query !== spot.query || now.key !== spot.key) return;
      panel.pair(spot, field, ...answers);
    } catch (error) {
      app.showError(error);
    }
  }, 40);

  async function showTip(spot, at) {
    read(spot);
    const found = lines(spot);
    const put = (extra) => {
      readout.textContent = [...found.lines, ...extra].map(([label, text, value]) => [label, text === null ? null : short(text, 24), value].filter(Boolean).join(" ")).join("  ·  ");
      if (at) app.tip.show(at.clientX, at.clientY, [...found.lines, ...extra], found.note);
    };
    put([]);
    if (found.cell.single || !field.top) return;
    const top = await field.top(spot.query);
    const weight = top?.find(([key]) => key === spot.key)?.[1];
    const same = pointer ?? cursor;
    if (weight === undefined || same?.query !== spot.query || same?.key !== spot.key) return;
    put([[`${app.t("weight")} ${spot.query} → ${spot.key}`, null, number(weight)]]);
  }

  function spotAt(event) {
    const box = canvas.getBoundingClientRect();
    const x = (event.clientX - box.left - LEFT) / size.width;
    const y = (event.clientY - box.top - TOP) / size.height;
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return null;
    const { view } = frame;
    return {
      x,
      y,
      query: Math.min(field.Q - 1, Math.floor(view.top + y * (view.bottom - view.top))),
      key: Math.min(field.K - 1, Math.floor(view.left + x * (view.right - view.left))),
    };
  }

  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    dragged = { x: event.clientX, y: event.clientY, from: [event.clientX, event.clientY] };
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = dragged?.from ?? [Infinity, 0];
    dragged = null;
    if (Math.hypot(event.clientX - x, event.clientY - y) > 4) return;
    const spot = field && spotAt(event);
    if (spot && onPick) onPick(spot);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!field || !drawn) return;
    if (dragged) {
      frame.move((dragged.x - event.clientX) / size.width, (dragged.y - event.clientY) / size.height);
      dragged = { ...dragged, x: event.clientX, y: event.clientY };
      changed();
    }
    pointer = spotAt(event);
    if (pointer) showTip(pointer, event);
    else app.tip.hide();
    draw();
  });
  canvas.addEventListener("pointerleave", () => {
    pointer = null;
    app.tip.hide();
    draw();
  });
  canvas.addEventListener("wheel", (event) => {
    const spot = field && spotAt(event);
    if (!spot) return;
    event.preventDefault();
    frame.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), spot.x, spot.y);
    changed();
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => {
    const spot = spotAt(event);
    if (!spot) return;
    frame.zoom(0.5, spot.x, spot.y);
    changed();
  });
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Enter" && cursor && onPick) {
      event.preventDefault();
      onPick(cursor);
    }
    if (!way || !drawn) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.shiftKey) {
      frame.move(way[0] / 8, way[1] / 8);
      changed();
      return;
    }
    if (!cursor) cursor = { query: Math.floor(frame.view.top), key: Math.floor(frame.view.left) };
    else {
      const cell = cellAt(base, cursor.query, cursor.key);
      const step = (from, [low, high], by, count) => Math.max(0, Math.min(count - 1, by > 0 ? high : by < 0 ? low - 1 : from));
      cursor = { query: step(cursor.query, cell.rows, way[1], field.Q), key: step(cursor.key, cell.columns, way[0], field.K) };
    }
    pointer = null;
    frame.show(cursor.query, cursor.key);
    changed();
    showTip(cursor, null);
  });

  const plane = {
    element,
    zoom(factor) {
      if (!field) return;
      const { view } = frame;
      const at = cursor
        ? [(cursor.key + 0.5 - view.left) / (view.right - view.left), (cursor.query + 0.5 - view.top) / (view.bottom - view.top)]
        : [0.5, 0.5];
      if (factor === 0) frame.set(null, null);
      else frame.zoom(factor, ...at);
      changed();
    },
    show(next, rows, columns) {
      if (field?.key !== next.key) {
        detail = cursor = pointer = null;
        base = next.level; // do not read numbers from the previous map
        readout.textContent = "";
        panel.clear(app.t(next.row ? "hint.cell" : "hint.map"));
      }
      if (!field || field.Q !== next.Q || field.K !== next.K) {
        frame = createWindow(next.Q, next.K);
        known = "?";
      }
      field = { ...next, corner: `${app.t("queries")} ↓  ${app.t("keys")} →` };
      if (known !== String([rows, columns])) frame.set(rows, columns);
      known = String([rows, columns]);
      canvas.setAttribute("aria-label", app.t("map"));
      buttons.replaceChildren(
        ...[["zoom.in", "+", 0.5], ["zoom.out", "−", 2], ["zoom.fit", "⤢", 0]].map(([name, text, factor]) =>
          el("button", { type: "button", class: "icon", title: app.t(name), "aria-label": app.t(name), text, on: { click: () => plane.zoom(factor) } }),
        ),
      );
      measure();
      draw();
      fetchDetail();
    },
    resize() {
      if (!field) return;
      measure();
      draw();
    },
    center(query, key) {
      frame.show(query ?? frame.view.top, key ?? frame.view.left);
      changed();
    },
    figure() {
      const { view } = frame;
      const palette = colours();
      drawn = choose();
      const visible = cut(drawn, [Math.floor(view.top), Math.ceil(view.bottom)], [Math.floor(view.left), Math.ceil(view.right)]);
      const top = topOf(visible.data);
      const plot = el("canvas", { width: size.width * 2, height: size.height * 2 });
      plot.getContext("2d").putImageData(raster(visible, view, plot.width, plot.height, palette, top), 0, 0);
      const inside = svg("g", { transform: `translate(${LEFT} ${TOP})` });
      inside.append(svg("image", { width: size.width, height: size.height, href: plot.toDataURL() }));
      for (const part of axes(field, view, size, visible, palette, top, letters)) {
        inside.append(
          svg("text", {
            transform: `translate(${part.x} ${part.y})${part.rotation ? ` rotate(${part.rotation})` : ""}`,
            "font-size": part.size, "font-weight": part.strong ? 600 : 400, fill: part.fill ?? null,
            "text-anchor": { left: "start", right: "end", center: "middle" }[part.align], "dominant-baseline": "central",
            text: isolate(part.text),
          }),
        );
      }
      const bar = colourBar(LEFT, size.height + TOP + 18, palette, valueName(isSingle(visible)), [field.diverging ? scaleText(-top) : "0", scaleText(top)]);
      return svg("svg", { width: Math.max(440, size.width + LEFT + RIGHT), height: size.height + TOP + 40 }, inside, bar);
    },
  };
  new ResizeObserver(oncePerFrame(() => plane.resize())).observe(box);
  return plane;
}

function covers(level, view, cell) {
  return (
    level && level.cell <= cell && level.rowEdges[0] <= view.top && level.rowEdges[level.rows] >= view.bottom &&
    level.columnEdges[0] <= view.left && level.columnEdges[level.columns] >= view.right &&
    // far more cells than pixels: a coarser level is drawn instead
    (view.bottom - view.top) / level.cell <= 4 * CELLS
  );
}
