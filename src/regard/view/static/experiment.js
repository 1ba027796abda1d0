// Experiments on a live model: changes, and two maps side by side or their difference, with predictions and reasons.
import { isEmpty, NOTHING, toRequest } from "./changes.js";
import { choice, el, setOptions, svg } from "./dom.js";
import { level } from "./levels.js";
import { createPlane } from "./plane.js";
import { createPrediction } from "./prediction.js";
import { createPanelOfChanges } from "./experiment_panel.js";
import { isolate } from "./text.js";
import { createWhy } from "./why.js";

const CELLS = 192; // rows and columns of the maps before they are zoomed

export function experimentView(app) {
  const onWindow = (window) => app.set(window);
  const pick = (spot) => app.set({ cell: [spot.query, spot.key] });
  const planes = ["left", "right", "difference"].map((name) => {
    const plane = createPlane(app, onWindow, { bare: true, onPick: pick });
    const title = el("h3");
    return { name, plane, title, box: el("figure", { class: "compared", "data-map": name }, title, plane.element) };
  });
  const layout = choice("", (value) => app.set({ layout: value }));
  const compare = choice("", (value) => app.set({ compare: value }));
  const other = el("textarea", { class: "text other-text", rows: 1, spellcheck: "false" });
  const second = ["layer", "head"].map((name) => {
    const select = el("select", { "data-second": name });
    const label = el("span");
    select.addEventListener("change", () => {
      const [attention, head] = app.state.second || [app.state.attention, app.state.head];
      app.set({ second: name === "layer" ? [select.value, head] : [attention, Number(select.value)] });
    });
    return { name, select, label, element: el("label", { class: "picker" }, label, select) };
  });
  const status = el("p", { class: "status muted", role: "status" });
  const changes = createPanelOfChanges(app);
  const prediction = createPrediction(app);
  const why = createWhy(app, () => app.set({ cell: null }));
  const maps = el("div", { class: "maps" }, planes.map(({ box }) => box));
  const head = el("div", { class: "compare-bar" }, compare.element, other, second.map(({ element: each }) => each), layout.element, status);
  const element = el("section", { class: "view view-experiment" }, changes.element, el("div", { class: "experiment-main" }, head, el("div", { class: "results" }, maps, prediction.element), why.element));
  let latest = 0;
  let known = { key: "", right: null }; // the answer, or the promise of it, by what was asked for
  other.addEventListener("change", () => app.set({ other: other.value }));

  // The record, attention and head to compare with, and what to call it; null while there is none.
  async function rightSide(attention) {
    const { state, source } = app;
    const { about } = source;
    if (state.compare === "head") {
      const [id, head] = state.second ?? [attention.id, state.head];
      const chosen = about.attentions.find((one) => one.id === id);
      return { about, record: about.record, attention: chosen, head, title: app.t("heads.one", { layer: chosen.layer, head }) };
    }
    const request = toRequest(state.experiment);
    const ask = {
      changes: isEmpty(state.experiment) ? null : ["experiment", { record: about.record, ...request }],
      text: state.other.trim() ? ["compare", { text: state.other }] : null,
      model: ["compare", { text: about.text, second: true }],
      record: null,
    }[state.compare];
    const key = JSON.stringify([about.record, state.compare, ask]);
    if (key !== known.key) known = { key, right: state.compare === "record" ? about.against : ask ? source.ask(...ask) : null };
    const right = await known.right;
    if (!right) return null;
    const chosen = right.attentions.find(({ id }) => id === attention.id);
    if (!chosen || !chosen.heads.includes(state.head)) return null;
    return { about: right, record: right.record, attention: chosen, head: state.head, title: app.t(`compare.${state.compare}.title`) };
  }

  function side(about, record, attention, head) {
    const window = (rows, columns, size) => app.source.window({ record, attention, head, rows, columns, size, scaled: app.scaled() });
    const text = (stream) => (n) => about.streams[stream]?.tokens[n] ?? String(n);
    return { about, record, attention, head, window, rowText: text(attention.queries), columnText: text(attention.keys) };
  }

  const whole = ({ window, attention }) => window([0, attention.Q], [0, attention.K], [Math.min(CELLS, attention.Q), Math.min(CELLS, attention.K)]);

  function show({ plane, title }, name, from, data, options = {}) {
    const { Q, K } = from.attention;
    title.textContent = name;
    plane.show(
      {
        key: [app.version, from.record, from.attention.id, from.head, app.scaled(), options.key ?? ""].join("/"), Q, K, level: data,
        fetch: Q > CELLS || K > CELLS ? options.window ?? from.window : null, rowText: from.rowText, columnText: from.columnText,
        rowMarks: app.matches(from.attention.queries), columnMarks: app.matches(from.attention.keys),
        value: app.scaled() ? "scaled" : "weight", ...options,
      },
      app.state.rows && app.state.rows[1] <= Q ? app.state.rows : null,
      app.state.columns && app.state.columns[1] <= K ? app.state.columns : null,
    );
  }

  // Changed minus original, cell by cell; both have the same bands.
  function subtract(a, b) {
    return level(Float32Array.from(b.data, (value, n) => value - a.data[n]), a.rowBands, a.columnBands);
  }

  async function update() {
    const now = ++latest;
    const { t, state, source } = app;
    const { about } = source;
    const attention = app.attention();
    if (!attention) return;
    changes.update();
    const compares = [...(about.runs ? ["changes"] : []), "head", ...(about.compares ?? [])];
    compare.set(compares.map((name) => [name, t(`compare.${name}`)]), state.compare, t("compare"));
    layout.set([["both", t("layout.both")], ["difference", t("layout.difference")]], state.layout, t("layout"));
    other.hidden = state.compare !== "text";
    other.placeholder = t("compare.text.hint");
    other.setAttribute("aria-label", t("compare.text"));
    if (document.activeElement !== other) other.value = state.other;
    const chosen = state.second ? about.attentions.find(({ id }) => id === state.second[0]) : attention;
    for (const { name, select, label, element: box } of second) {
      box.hidden = state.compare !== "head";
      label.textContent = t(name);
      const options = name === "layer"
        ? about.attentions.map(({ id, kind, layer: n }) => [id, about.attentions.some((one) => one.kind !== kind) ? `${t(`kind.${kind}`)} ${n}` : String(n)])
        : chosen.heads.map((n) => [String(n), String(n)]);
      setOptions(select, options, name === "layer" ? chosen.id : String(state.second?.[1] ?? state.head));
    }
    element.dataset.busy = "";
    status.classList.remove("failed");
    status.textContent = t("text.busy");
    const left = side(about, about.record, attention, state.head);
    const name = state.compare === "head" ? t("heads.one", { layer: attention.layer, head: state.head }) : t("original");
    let right = null;
    let failure = null;
    const levels = [whole(left)];
    levels[0].catch(() => null); // reported below
    try {
      const found = await rightSide(attention);
      if (now !== latest) return;
      if (found) {
        right = { ...side(found.about, found.record, found.attention, found.head), title: found.title };
        levels.push(whole(right));
      }
    } catch (error) {
      failure = error;
    }
    let [ours, theirs] = [null, null];
    try {
      [ours, theirs] = await Promise.all(levels);
    } catch (error) {
      failure = error;
    }
    if (now !== latest) return;
    delete element.dataset.busy;
    if (failure) {
      known = { key: "", right: null };
      if (app.recover(failure)) return;
      status.textContent = t("text.failed", { reason: failure.message });
      status.classList.add("failed");
    }
    if (!ours) {
      for (const { box } of planes) box.hidden = true;
      prediction.element.hidden = true;
      why.hide();
      return;
    }
    const same = right && right.attention.Q === attention.Q && right.attention.K === attention.K;
    const difference = right && state.layout === "difference";
    if (!failure) status.textContent = !right ? t(`compare.${state.compare}.none`) : difference && !same ? t("difference.none") : "";
    const one = Boolean(difference && same);
    const visible = { left: !one, right: Boolean(right) && !one, difference: one };
    for (const { name: which, box } of planes) box.hidden = !visible[which]; // before maps measure their room
    if (visible.left) show(planes[0], name, left, ours);
    if (visible.right) show(planes[1], right.title, right, theirs);
    if (one) {
      show(planes[2], t("difference.of", { a: right.title, b: name }), left, subtract(ours, theirs), {
        key: `difference/${right.record}/${right.attention.id}/${right.head}`, diverging: true, value: app.scaled() ? "scaled.difference" : "difference",
        window: async (...part) => subtract(...(await Promise.all([left.window(...part), right.window(...part)]))),
        rowText: (n) => both(left.rowText(n), right.rowText(n)), columnText: (n) => both(left.columnText(n), right.columnText(n)),
      });
    }
    const titles = [name, right?.title ?? ""];
    const predicts = state.compare !== "head";
    prediction.element.hidden = !predicts;
    const tasks = [];
    if (predicts) {
      const stream = about.attentions.find(({ kind }) => kind === "decoder")?.keys ?? "source";
      const texts = [about, right?.about].map((each) => (n) => each?.streams[stream]?.tokens[n] ?? String(n));
      tasks.push(prediction.update(about.record, right?.record ?? null, titles, about, texts));
    }
    const { cell } = state;
    if (cell && cell[0] < attention.Q && cell[1] < attention.K) {
      const fits = right && cell[0] < right.attention.Q && cell[1] < right.attention.K;
      tasks.push(why.show([{ ...left, title: right ? name : "" }, ...(fits ? [{ ...right, title: right.title }] : [])], { query: cell[0], key: cell[1] }, [left.rowText(cell[0]), left.columnText(cell[1])]));
    } else why.hide();
    await Promise.all(tasks);
  }

  return {
    element,
    update,
    reveal(token, stream) {
      const attention = app.attention();
      for (const { plane, box } of planes) if (!box.hidden) plane.center(stream === attention.queries ? token : null, stream === attention.keys ? token : null);
    },
    zoom(factor) {
      for (const { plane, box } of planes) if (!box.hidden) plane.zoom(factor);
    },
    forget() {
      known = { key: "", right: null };
    },
    focus: () => changes.element.querySelector("button")?.focus(),
    // The maps that are shown, each below its title, and the changes.
    async figure() {
      const whole = svg("svg", {});
      let [width, height] = [0, 0];
      for (const { plane, title, box } of planes) {
        if (box.hidden) continue;
        const drawing = plane.figure();
        drawing.setAttribute("x", width);
        drawing.setAttribute("y", 24);
        whole.append(svg("text", { x: width + 12, y: 16, "font-size": 13, "font-weight": 600, text: title.textContent }), drawing);
        width += Number(drawing.getAttribute("width"));
        height = Math.max(height, 24 + Number(drawing.getAttribute("height")));
      }
      const made = app.state.compare === "changes" ? changes.texts() : [];
      for (const text of made) whole.append(svg("text", { x: 12, y: (height += 18) - 6, "font-size": 12, text: isolate(text) }));
      whole.setAttribute("width", width);
      whole.setAttribute("height", height);
      return whole;
    },
    reset: () => app.set({ experiment: NOTHING }),
    hint: "hint.experiment",
  };
}

const both = (a, b) => (a === b ? a : `${a} | ${b}`);
