// Attention over a picture: choose a token in the picture or in a list to see its row or column of weights.
import { createList } from "./column.js";
import { choice, el, oncePerFrame } from "./dom.js";
import { number, span } from "./text.js";

// A stage: {element, kind: a key of about, hit(event) -> token or null, inside(token) -> bool, name(token) -> text,
// paint({values, token, side, largest, pooled}), clear(), prepare(), figure(caption)}.
export function overView(app, stage) {
  const sides = choice("", (side) => app.set({ side, token: null }));
  const list = createList({ hover: (row) => point(row === null ? null : outside[row]), pick: (row) => pick(outside[row]) });
  const readout = el("output", { class: "readout", "aria-live": "polite" });
  const element = el(
    "section",
    { class: `view view-over view-${stage.kind}` },
    el("div", { class: "over-main" }, el("div", { class: "bar" }, sides.element, stage.control, readout), stage.element),
    list.element,
  );
  let outside = []; // tokens of the chosen side that are not part of the picture
  let hovered = null;
  let weights = null;
  let caption = ""; // the token that the picture shows, and its side
  let latest = 0;
  let at = null; // the last pointer event over the picture

  const stream = () => app.source.about[stage.kind].stream;
  const fits = (attention, side) => (side === "query" ? attention.keys : attention.queries) === stream();
  const own = (attention, side) => (side === "query" ? attention.queries : attention.keys) === stream();

  const point = oncePerFrame((token) => {
    if (token === hovered) return;
    hovered = token;
    read();
  });

  function pick(token) {
    app.set({ token: app.state.token === token ? null : token });
  }

  // While a token is pinned, hovering shows values; otherwise it chooses a token.
  stage.element.addEventListener("pointermove", (event) => {
    at = event;
    const token = stage.hit(event);
    if (app.state.token === null && own(app.attention(), app.state.side)) point(token);
    if (token === hovered || app.state.token !== null || !own(app.attention(), app.state.side)) showTip();
  });

  function showTip() {
    const token = stage.hit(at);
    const { side } = app.state;
    const attention = app.attention();
    if (token === null || !weights) {
      app.tip.hide();
      return;
    }
    const { t } = app;
    const rows = [[stage.name(token), app.tokens(stream())[token] ?? ""]];
    let note = "";
    if (app.state.token !== null || !own(attention, side)) {
      const cell = weights.exact && !weights.exact.has(token) ? weights.cell(token) : null;
      if (cell && !cell.single) {
        const [tall, wide] = [cell.rows, cell.columns].map(([from, to]) => to - from);
        rows.push([`${t(tall === 1 ? "query" : "queries")} ${span(...cell.rows)}`, null], [`${t(wide === 1 ? "key" : "keys")} ${span(...cell.columns)}`, null]);
        note = t("weight.mean", { rows: tall, columns: wide });
      }
      rows.push([t(note ? "weight.pooled" : "weight"), null, number(weights.values[token])]);
    } else {
      for (const [other, weight] of weights.top.slice(0, 4)) rows.push([`${t(side === "query" ? "looks" : "looked")} ${label(other)}`, null, number(weight)]);
    }
    app.tip.show(at.clientX, at.clientY, rows, note);
  }
  stage.element.addEventListener("pointerleave", () => {
    at = null;
    app.tip.hide();
    point(null);
  });
  stage.element.addEventListener("click", (event) => {
    const token = stage.hit(event);
    if (token !== null && own(app.attention(), app.state.side)) pick(token);
  });

  function label(token) {
    return stage.inside(token) ? stage.name(token) : app.tokens(stream())[token] ?? String(token);
  }

  function current() {
    return hovered ?? app.state.token ?? (outside.length ? outside[0] : null);
  }

  async function read() {
    const now = ++latest;
    const attention = app.attention();
    const { side, head } = app.state;
    const token = current();
    if (token === null) {
      weights = null;
      caption = "";
      readout.textContent = app.t(`hint.${app.state.view}`);
      stage.clear();
    } else {
      let answer;
      try {
        answer = await app.neighbours.spread(attention, head, token, side);
      } catch (error) {
        app.showError(error);
        return;
      }
      if (now !== latest) return;
      weights = answer;
      let largest = 0;
      for (let n = 0; n < weights.values.length; n++) if (stage.inside(n) && weights.values[n] > largest) largest = weights.values[n];
      stage.paint({ values: weights.values, token: own(attention, side) ? token : null, side, largest, pooled: Boolean(weights.exact) });
      const texts = app.tokens(side === "query" ? attention.queries : attention.keys);
      const name = own(attention, side) && stage.inside(token) ? stage.name(token) : texts[token] ?? String(token);
      const best = weights.top.slice(0, 3).map(([other, weight]) => `${label(other)} (${number(weight)})`).join(", ");
      caption = `${name} · ${app.t(side === "query" ? "looks" : "looked")}`;
      readout.textContent = `${caption} ${best}`;
    }
    renderList();
    if (at) showTip();
  }

  function renderList() {
    const attention = app.attention();
    const { side } = app.state;
    const from = side === "query" ? attention.queries : attention.keys;
    const texts = app.tokens(from);
    const marks = app.matches(from);
    const active = outside.indexOf(current());
    list.element.hidden = outside.length === 0;
    list.set({
      count: outside.length, label: app.t("tokens"), text: (row) => texts[outside[row]] ?? String(outside[row]),
      number: (row) => outside[row], active: active < 0 ? null : active, marks: { has: (row) => marks.has(outside[row]) },
    });
  }

  return {
    element,
    async update() {
      const all = app.source.about.attentions;
      let { side } = app.state;
      let attention = app.attention();
      if (!fits(attention, side)) {
        const other = side === "query" ? "key" : "query";
        if (fits(attention, other)) side = other;
        else {
          attention = all.find((one) => one.keys === stream()) ?? all.find((one) => one.queries === stream());
          side = attention && attention.keys === stream() ? "query" : "key";
        }
        if (attention) app.set({ attention: attention.id, kind: attention.kind, side, token: null });
        return;
      }
      const { t } = app;
      const options = [["query", t("looks")], ["key", t("looked")]].filter(([key]) => fits(attention, key));
      sides.set(options, side, t("view." + app.state.view));
      const length = side === "query" ? attention.Q : attention.K;
      outside = [];
      for (let token = 0; token < length; token++) if (!own(attention, side) || !stage.inside(token)) outside.push(token);
      stage.prepare();
      hovered = null;
      await read();
    },
    reveal(token) {
      const row = outside.indexOf(token);
      if (row >= 0) list.reveal(row);
      app.set({ token });
    },
    focus: () => (list.element.hidden ? stage.element : list.element.querySelector(".column")).focus(),
    figure: async () => stage.figure(caption),
    hint: `hint.${stage.kind === "image" ? "image" : "sound"}`,
    key(event) {
      const attention = app.attention();
      const step = stage.steps?.[event.key];
      if (!step || !own(attention, app.state.side)) return false;
      const from = app.state.token ?? hovered ?? stage.first();
      const to = from + step();
      if (to >= 0 && stage.inside(to)) app.set({ token: to });
      return true;
    },
  };
}
