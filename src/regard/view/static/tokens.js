// Queries on the left, keys on the right, and a line per weight.
import { createColumn, ROW } from "./column.js";
import { el, oncePerFrame, svg } from "./dom.js";
import { createPanel } from "./panel.js";
import { isolate, number, short } from "./text.js";

const FAINT = 3; // lines per query while no token is chosen

export function tokensView(app) {
  const on = (side) => ({
    hover: (token, event) => point(token === null ? null : { token, side }, event),
    pick: (token) => pick({ token, side }),
    key: (event) => key(event, side),
  });
  const queries = createColumn("query", on("query"));
  const keys = createColumn("key", on("key"));
  const lines = svg("svg", { class: "lines", "aria-hidden": "true", preserveAspectRatio: "none" });
  const titles = [el("h3"), el("h3")];
  const stage = el("div", { class: "stage" }, queries.element, lines, keys.element);
  const space = el("div", { class: "lines-space" }, stage);
  const scroller = el("div", { class: "scroller", tabindex: "-1" }, space);
  const panel = createPanel(app, (token, side) => pick({ token, side }, true));
  const element = el(
    "section",
    { class: "view view-tokens" },
    el("div", { class: "lines-box" }, el("div", { class: "lines-head" }, ...titles), scroller),
    panel.element,
  );
  let hovered = null;
  let loaded = ""; // the spot that `looks` and `looked` belong to
  let looks = null;
  let looked = null;
  let faint = [];
  let latest = 0;

  function focusSpot() {
    const { token, side } = app.state;
    return hovered ?? (token === null ? null : { token, side });
  }

  const point = oncePerFrame((spot, event) => {
    if (spot?.token === hovered?.token && spot?.side === hovered?.side) return;
    hovered = spot;
    if (!spot) app.tip.hide();
    read(event);
  });

  function pick(spot, reveal = false) {
    const { token, side } = app.state;
    const same = token === spot.token && side === spot.side && !reveal;
    hovered = null;
    app.set(same ? { token: null } : spot);
    if (reveal) show(spot.token);
  }

  function key(event, side) {
    const attention = app.attention();
    const count = side === "key" ? attention.K : attention.Q;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (step) {
      const from = app.state.side === side && app.state.token !== null ? app.state.token : Math.floor(scroller.scrollTop / ROW) - (step > 0);
      const token = Math.max(0, Math.min(count - 1, from + step));
      app.set({ token, side });
      show(token);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const other = event.key === "ArrowRight" ? keys : queries;
      other.element.focus();
      if (app.state.token !== null) app.set({ side: event.key === "ArrowRight" ? "key" : "query" });
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function show(token) {
    const top = token * ROW;
    if (top < scroller.scrollTop || top + ROW > scroller.scrollTop + scroller.clientHeight) {
      scroller.scrollTop = top - scroller.clientHeight / 2;
    }
  }

  // Load the weights of the token in focus, once per token.
  async function read(event) {
    const now = ++latest;
    const attention = app.attention();
    const { head } = app.state;
    const spot = focusSpot();
    const name = spot ? `${app.version}/${attention.id}/${head}/${spot.side}/${spot.token}/${app.scaled()}` : "";
    if (name !== loaded) {
      const self = attention.kind !== "cross" && attention.Q === attention.K;
      let answers = [null, null];
      if (spot) {
        try {
          answers = await Promise.all([
            self || spot.side === "query" ? app.neighbours.row(attention, head, spot.token) : null,
            self || spot.side === "key" ? app.neighbours.column(attention, head, spot.token) : null,
          ]);
        } catch (error) {
          app.showError(error);
        }
      }
      if (now !== latest) return;
      [looks, looked] = answers;
      loaded = name;
      if (spot) panel.show(spot, attention, looks, looked);
      else panel.clear(app.t("hint.tokens"));
    }
    if (!spot) {
      draw(); // draw the tokens before their lines are loaded
      faint = await app.neighbours.overview(attention, head, ...visibleRows(attention.Q), FAINT);
    }
    if (now !== latest) return;
    draw();
    if (hovered && event) showTip(event, spot, attention);
  }

  function showTip(event, spot, attention) {
    const texts = app.tokens(spot.side === "key" ? attention.keys : attention.queries);
    const others = app.tokens(spot.side === "key" ? attention.queries : attention.keys);
    const answer = spot.side === "key" ? looked : looks;
    app.tip.show(event.clientX, event.clientY, [
      [`${app.t(spot.side)} ${spot.token}`, texts[spot.token] ?? ""],
      ...(answer?.top.slice(0, 4) ?? []).map(([token, weight]) => [String(token), others[token] ?? "", number(weight)]),
    ]);
  }

  function heading(side, stream) {
    const scaled = side === "keys" && app.scaled() ? `, ${app.t("scaled")}` : "";
    return `${app.t(side)}: ${app.streamName(stream)}${scaled}`;
  }

  function visibleRows(count) {
    const from = Math.floor(scroller.scrollTop / ROW);
    return [Math.min(count, from), Math.min(count, Math.ceil((scroller.scrollTop + scroller.clientHeight) / ROW))];
  }

  // [query, key, weight, way] of the lines to draw.
  function drawnLines(spot) {
    if (!spot) return faint.map((line) => [...line, "faint"]);
    const answer = spot.side === "query" ? looks : looked;
    return (answer?.top ?? []).slice(0, 48).map(([token, weight]) =>
      spot.side === "query" ? [spot.token, token, weight, "looks"] : [token, spot.token, weight, "looked"],
    );
  }

  function draw() {
    const attention = app.attention();
    if (!attention || element.hidden) return;
    const spot = focusSpot();
    const scroll = scroller.scrollTop;
    const height = scroller.clientHeight;
    stage.style.height = `${height}px`;
    const shades = (answer) => {
      const known = new Map(answer?.top ?? []);
      const largest = answer?.top[0]?.[1] ?? 1;
      return {
        shade: (token) => Math.sqrt((answer?.all?.[token] ?? known.get(token) ?? 0) / largest),
        value: (token) => {
          const weight = answer?.all?.[token] ?? known.get(token);
          return weight === undefined ? "" : number(weight);
        },
      };
    };
    const common = (stream, side, count) => ({
      count, scroll, height, label: app.t(side === "query" ? "queries" : "keys"),
      text: (token) => app.tokens(stream)[token] ?? String(token),
      marks: app.matches(stream), special: app.special(stream),
      active: spot?.side === side ? spot.token : null,
    });
    queries.render({ ...common(attention.queries, "query", attention.Q), ...(spot ? shades(looked) : {}) });
    keys.render({ ...common(attention.keys, "key", attention.K), ...(spot ? shades(looks) : {}) });
    const width = lines.clientWidth || 240;
    lines.replaceChildren(...drawnLines(spot).map((line) => path(line, width, scroll)));
  }

  function path([query, key, weight, way], width, scroll) {
    const [from, to] = [query, key].map((token) => (token + 0.5) * ROW - scroll);
    return svg("path", {
      d: `M0 ${from} C${width * 0.45} ${from} ${width * 0.55} ${to} ${width} ${to}`,
      class: `line line-${way}`, ...strokes(weight / strongest()),
    });
  }

  // The weight of the thickest line: 1, or the largest one if weights are scaled and can exceed 1.
  function strongest() {
    if (!app.scaled()) return 1;
    const shown = drawnLines(focusSpot()).map(([, , weight]) => weight);
    return Math.max(...shown, 1e-30);
  }

  const scrolled = oncePerFrame(() => (focusSpot() ? draw() : read()));
  scroller.addEventListener("scroll", scrolled);
  new ResizeObserver(scrolled).observe(scroller);

  return {
    element,
    async update() {
      const attention = app.attention();
      if (!attention) return;
      titles[0].textContent = heading("queries", attention.queries);
      titles[1].textContent = heading("keys", attention.keys);
      space.style.height = `${Math.max(attention.Q, attention.K) * ROW}px`;
      loaded = "?";
      await read();
    },
    reveal(token) {
      show(token);
      draw();
    },
    focus: () => (app.state.side === "key" ? keys : queries).element.focus(),
    hint: "hint.tokens",
    async figure() {
      const attention = app.attention();
      const [from, to] = visibleRows(Math.max(attention.Q, attention.K));
      const top = from * ROW;
      const below = 34 + (to - from) * ROW;
      const spot = focusSpot();
      const drawing = svg("svg", { width: 640, height: below + 30 });
      const middle = svg("svg", { x: 200, y: 30, width: 240, height: (to - from) * ROW });
      const colour = app.palette().theme === "dark" ? { faint: "#8fa3c8", looks: "#8ea2ff", looked: "#ffab70" } : { faint: "#5b6f97", looks: "#4553d6", looked: "#c2570c" };
      for (const line of drawnLines(spot)) {
        const drawn = path(line, 240, top);
        drawn.setAttribute("stroke", colour[line[3]]);
        drawn.setAttribute("fill", "none");
        middle.append(drawn);
      }
      drawing.append(middle);
      for (const [side, stream, count, x, anchor] of [["query", attention.queries, attention.Q, 192, "end"], ["key", attention.keys, attention.K, 448, "start"]]) {
        drawing.append(svg("text", { x, y: 20, "font-size": 12, "font-weight": 600, "text-anchor": anchor, text: heading(side === "key" ? "keys" : "queries", stream) }));
        for (let token = from; token < Math.min(to, count); token++) {
          const y = (token + 0.5) * ROW - top + 30;
          const chosen = spot?.side === side && spot.token === token;
          drawing.append(svg("text", { x, y, "font-size": 12, "font-weight": chosen ? 700 : 400, "text-anchor": anchor, "dominant-baseline": "central", text: isolate(short(app.tokens(stream)[token] ?? String(token), 24)) }));
        }
      }
      if (app.scaled()) return drawing; // widths are relative to the largest
      // Legend of line widths.
      drawing.append(svg("text", { x: 192, y: below + 12, "font-size": 11, "text-anchor": "end", "dominant-baseline": "central", text: app.t("weight") }));
      for (const [n, weight] of [0.1, 0.5, 1].entries()) {
        drawing.append(
          svg("line", { ...strokes(weight), class: "line-legend", x1: 204 + 84 * n, x2: 234 + 84 * n, y1: below + 12, y2: below + 12, stroke: colour.looks }),
          svg("text", { x: 240 + 84 * n, y: below + 12, "font-size": 11, "dominant-baseline": "central", text: String(weight) }),
        );
      }
      return drawing;
    },
  };
}

function strokes(weight) {
  return { "stroke-width": (0.6 + 5 * weight).toFixed(2), "stroke-opacity": Math.min(1, 0.12 + Math.sqrt(weight)).toFixed(2) };
}
