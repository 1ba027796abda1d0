// The header, the tabs and the row of controls, which have no state themselves.
import { choice, debounce, el, setOptions, svg } from "./dom.js";
import { available, SORTS } from "./state.js";
import { role } from "./words.js";

const ICONS = {
  theme: "M12 3a9 9 0 1 0 0 18V3z M12 3a9 9 0 0 1 0 18",
  link: "M9.5 14.5l5-5 M8 12l-2 2a3.5 3.5 0 0 0 5 5l2-2 M16 12l2-2a3.5 3.5 0 0 0-5-5l-2 2",
  png: "M4 5h16v14H4z M4 16l5-5 4 4 2-2 5 5",
  svg: "M4 18C8 4 16 20 20 6 M3 16h3v3H3z M18 5h3v3h-3z",
  help: "M9 9a3 3 0 1 1 4 2.8c-.8.4-1 .9-1 1.7 M12 17v.5",
};

function icon(name, act) {
  const filled = name === "theme";
  const drawing = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" });
  for (const [n, d] of ICONS[name].split(/ (?=M)/).entries()) drawing.append(svg("path", { d, class: filled && n === 0 ? "solid" : null }));
  if (name === "help") drawing.append(svg("circle", { cx: 12, cy: 12, r: 9 }));
  return el("button", { type: "button", class: "icon", "data-act": name, on: { click: act } }, drawing);
}

export function createHeader(app) {
  const title = el("h1");
  const note = el("p", { class: "note", "aria-live": "polite" });
  const language = el("button", { type: "button", class: "icon text", "data-act": "language", on: { click: app.nextLanguage } });
  const acts = [["link", app.copyLink], ["png", () => app.save("png")], ["svg", () => app.save("svg")], ["theme", app.nextTheme], ["help", app.help]].map(([name, act]) => icon(name, act));
  const text = el("textarea", { class: "text", rows: 2, spellcheck: "false" });
  const busy = el("span", { class: "busy", role: "status" });
  const live = el("div", { class: "live", hidden: true }, text, busy);
  const run = debounce(() => text.value.trim() && app.run(text.value), 300);
  text.addEventListener("input", () => {
    busy.textContent = app.t(text.value.trim() ? "text.busy" : "text.empty");
    app.stale(text.value.trim() ? "busy" : "failed");
    run();
  });
  let filled = false;
  const element = el(
    "header",
    { class: "top" },
    el("div", { class: "top-title" }, title, note),
    el("div", { class: "top-acts" }, acts.slice(0, 3), language, acts.slice(3)),
    live,
  );
  return {
    element,
    update() {
      const { t, source } = app;
      title.textContent = source.about.title;
      note.replaceChildren();
      if (source.about.text && !source.canRun) note.append(el("span", { class: "note-label", text: t("text") }), el("bdi", { class: "note-text", text: source.about.text }));
      if (source.about.note) note.append(el("span", { class: "note-label", text: t("output") }), el("bdi", { text: source.about.note }));
      if (source.about.uncaptured) note.append(el("span", { class: "note-label", text: t("uncaptured") }), el("bdi", { text: source.about.uncaptured }));
      language.textContent = app.language === "zh" ? "EN" : "中";
      language.title = t("language");
      language.setAttribute("aria-label", t("language"));
      for (const button of acts) {
        const name = button.dataset.act;
        const label = name === "theme" ? t(`theme.${app.theme}`) : t(name);
        button.title = label;
        button.setAttribute("aria-label", label);
      }
      live.hidden = !source.canRun;
      text.placeholder = t("text.hint");
      text.setAttribute("aria-label", t("text"));
      if (!filled && source.about.text) text.value = source.about.text;
      filled = true;
    },
    busy(message) {
      busy.textContent = message;
    },
    fill(value) {
      text.value = value;
    },
  };
}

export function createTabs(app) {
  const element = el("div", { class: "tabs", role: "tablist" });
  element.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const views = available(app.source.about);
    const next = (views.indexOf(app.state.view) + step + views.length) % views.length;
    app.set({ view: views[next] });
    element.children[next].focus();
  });
  return {
    element,
    update() {
      const { t, state } = app;
      element.setAttribute("aria-label", t("views"));
      const views = available(app.source.about);
      if ([...element.children].map((tab) => tab.dataset.view).join() !== views.join()) {
        element.replaceChildren(...views.map((view) =>
          el("button", { type: "button", role: "tab", "data-view": view, on: { click: () => app.set({ view }) } }),
        ));
      }
      for (const tab of element.children) {
        const on = tab.dataset.view === state.view;
        tab.textContent = t(`view.${tab.dataset.view}`);
        tab.setAttribute("aria-selected", on);
        tab.tabIndex = on ? 0 : -1;
      }
    },
  };
}

export function createControls(app) {
  const kinds = choice("", (kind) => app.set({ kind, attention: "", token: null, rows: null, columns: null }));
  const layer = stepper((step) => app.step("layer", step), (id) => app.set({ attention: id, token: app.state.token }));
  const head = stepper((step) => app.step("head", step), (value) => app.set({ head: Number(value) }));
  const formula = el("code", { class: "formula" });
  const scaled = el("input", { type: "checkbox", "data-act": "scaled", on: { change: () => app.set({ scaled: scaled.checked }) } });
  const scaledName = el("span");
  const scaledLabel = el("label", { class: "picker" }, scaled, scaledName);
  const row = picker((value) => app.open({ record: app.source.about.record, row: Number(value) }));
  const sort = picker((value) => app.set({ sort: value, down: value !== "layer" }));
  const order = el("button", { type: "button", class: "icon", "data-act": "order", on: { click: () => app.set({ down: !app.state.down }) } });
  const named = picker((value) => app.set({ named: value }));
  const only = picker((value) => app.set({ only: value }));
  const shown = el("span", { class: "muted count" });
  const search = el("input", { type: "search", class: "search", autocomplete: "off", spellcheck: "false" });
  const count = el("span", { class: "muted count", "aria-live": "polite" });
  search.addEventListener("input", () => app.search(search.value));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") app.nextMatch(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      app.search("");
      search.blur();
    }
    event.stopPropagation();
  });
  const one = el("div", { class: "group" }, layer.element, head.element, scaledLabel, formula);
  const many = el("div", { class: "group" }, sort.element, order, named.element, only.element, shown);
  const element = el("div", { class: "controls" }, kinds.element, one, many, row.element, el("div", { class: "group search-group" }, search, count));
  return {
    element,
    searchBox: search,
    update() {
      const { t, state, source } = app;
      const all = source.about.attentions;
      const present = ["encoder", "decoder", "cross"].filter((kind) => all.some((attention) => attention.kind === kind));
      kinds.set(present.map((kind) => [kind, t(`kind.${kind}`)]), state.kind, t("kind"));
      const attention = app.attention();
      const alone = ["map", "tokens", "image", "sound", "experiment"].includes(state.view);
      const [at, rows] = source.about.batch ?? [0, 1];
      row.element.hidden = !source.about.live || rows < 2;
      if (!row.element.hidden) row.set(t("batch"), Array.from({ length: Math.min(rows, 4096) }, (_, n) => [String(n), String(n)]), String(at));
      scaledLabel.hidden = !source.about.live || !["map", "tokens", "experiment"].includes(state.view);
      scaledName.textContent = t("scaled.long");
      scaled.checked = state.scaled;
      kinds.element.hidden ||= state.view === "rollout";
      one.hidden = !alone || !attention;
      many.hidden = state.view !== "heads" && state.view !== "statistics";
      if (attention) {
        layer.set(t("layer"), app.attentions().map(({ id, layer: n }) => [id, String(n)]), attention.id, t);
        head.set(t("head"), attention.heads.map((n) => [String(n), String(n)]), String(state.head), t);
        formula.textContent = attention.formula ?? "";
        formula.title = [attention.name, attention.formula].filter(Boolean).join(": ");
      }
      sort.set(t("sort"), SORTS.map((name) => [name, ["layer", "found"].includes(name) ? t(`sort.${name}`) : t(name)]), state.sort);
      order.textContent = state.down ? "↓" : "↑";
      order.title = t(state.down ? "descending" : "ascending");
      order.setAttribute("aria-label", order.title);
      const roles = [...new Set(app.attentions().flatMap(({ found }) => (found ?? []).map(({ name }) => name)))].sort();
      named.set(t("named"), [["", t("named.all")], ...roles.map((name) => [name, role(t, { name })])], state.named);
      const layers = [...new Set(app.attentions().map(({ layer: n }) => n))];
      only.set(t("only"), [["", t("only.all")], ...layers.map((n) => [String(n), `${t("layer")} ${n}`])], state.only);
      const entries = app.heads().length;
      shown.textContent = t("shown", { count: entries, all: app.attentions().reduce((sum, { heads }) => sum + heads.length, 0) });
      search.placeholder = t("search");
      search.setAttribute("aria-label", t("search"));
      if (search.value !== state.search) search.value = state.search;
      const hits = app.hits();
      count.textContent = !state.search ? "" : hits.length ? t("search.count", { at: app.hit + 1, count: hits.length }) : t("search.none");
    },
  };
}

function picker(onPick) {
  const select = el("select");
  const name = el("span");
  select.addEventListener("change", () => onPick(select.value));
  return {
    element: el("label", { class: "picker" }, name, select),
    set(label, options, value) {
      name.textContent = label;
      setOptions(select, options, value);
    },
  };
}

function stepper(onStep, onPick) {
  const pick = picker(onPick);
  const buttons = [-1, 1].map((step) => el("button", { type: "button", class: "icon small", text: step < 0 ? "‹" : "›", on: { click: () => onStep(step) } }));
  return {
    element: el("div", { class: "stepper" }, pick.element, buttons),
    set(label, options, value, t) {
      pick.set(label, options, value);
      for (const [n, button] of buttons.entries()) button.setAttribute("aria-label", `${t(n ? "next" : "previous")}: ${label}`);
    },
  };
}
