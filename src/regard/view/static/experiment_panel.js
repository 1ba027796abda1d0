// The panel of changes: heads, temperature, pairs of tokens and tokens.
import { isEmpty, NOTHING, put, toggle } from "./changes.js";
import { debounce, el, setOptions } from "./dom.js";
import { number, short, visible } from "./text.js";

export function createPanelOfChanges(app) {
  const titles = Object.fromEntries(["heads", "temperature", "pairs", "tokens"].map((name) => [name, el("h3")]));
  const grid = el("div", { class: "switches", role: "group" });
  const slider = el("input", { type: "range", class: "slider", min: -3, max: 3, step: 0.25, "data-act": "temperature" });
  const heat = el("output", { class: "degree" });
  const scope = el("select", { "data-scope": "temperature" });
  const pair = el("p", { class: "pair" });
  const where = el("select", { "data-scope": "pairs" });
  const acts = ["forbid", "force"].map((name) => el("button", { type: "button", class: "button", "data-act": name, on: { click: () => changePair(name) } }));
  const stream = el("select", { "data-scope": "tokens" });
  const position = el("input", { type: "number", min: 0, value: 0, class: "place" });
  const token = el("input", { type: "text", class: "token", spellcheck: "false", autocomplete: "off" });
  const replace = el("button", { type: "button", class: "button", "data-act": "replace", on: { click: edit } });
  const list = el("ul", { class: "chips" });
  const reset = el("button", { type: "button", class: "button", "data-act": "reset", on: { click: () => app.set({ experiment: NOTHING }) } });
  const link = el("button", { type: "button", class: "button", "data-act": "copy", on: { click: app.copyLink } });
  const tokens = el("div", { class: "panel-part" }, titles.tokens, el("div", { class: "form" }, stream, position, token, replace));
  const element = el(
    "aside",
    { class: "panel changes" },
    el("div", { class: "panel-part" }, titles.heads, grid),
    el("div", { class: "panel-part" }, titles.temperature, el("div", { class: "form" }, slider, heat, scope)),
    el("div", { class: "panel-part" }, titles.pairs, pair, el("div", { class: "form" }, where, acts)),
    tokens,
    list,
    el("div", { class: "form" }, reset, link),
  );
  const change = (experiment) => app.set({ experiment, compare: "changes" });
  const target = () => (scope.value === "layer" ? app.state.attention : "");
  slider.addEventListener("input", () => (heat.textContent = number(2 ** Number(slider.value))));
  slider.addEventListener("input", debounce(() => {
    const value = 2 ** Number(slider.value);
    change(put(app.state.experiment, "temperature", [target()], value === 1 ? null : value));
  }, 150));
  scope.addEventListener("change", () => update());
  position.addEventListener("input", () => showToken());
  stream.addEventListener("change", () => showToken());
  token.addEventListener("keydown", (event) => {
    if (event.key === "Enter") edit();
    event.stopPropagation();
  });

  function changePair(name) {
    const { cell, kind, attention, head, experiment } = app.state;
    if (!cell) return;
    const start = { head: [attention, head], layer: [attention, -1], all: [kind, -1] }[where.value];
    const entry = [...start, ...cell];
    const opposite = name === "forbid" ? "force" : "forbid";
    const key = JSON.stringify(entry);
    const without = { ...experiment, [opposite]: experiment[opposite].filter((one) => JSON.stringify(one) !== key) };
    change(toggle(without, name, entry));
  }

  function edit() {
    const place = Number(position.value);
    if (!Number.isInteger(place) || place < 0 || place >= app.tokens(stream.value).length || token.value === "") return;
    const same = token.value === app.tokens(stream.value)[place];
    change(put(app.state.experiment, "edits", [stream.value, place], same ? null : token.value));
  }

  // The text of a token: the edited one, or the original.
  function showToken() {
    const place = Number(position.value);
    const edited = app.state.experiment.edits.find(([name, at]) => name === stream.value && at === place);
    token.value = edited?.[2] ?? app.tokens(stream.value)[place] ?? "";
  }

  function switches() {
    const { state, t } = app;
    const off = new Set(state.experiment.off.map(([attention, head]) => `${attention}/${head}`));
    const all = app.attentions();
    const widest = Math.max(1, ...all.map(({ heads }) => heads.length));
    grid.style.setProperty("--across", widest);
    grid.setAttribute("aria-label", t("switches"));
    grid.replaceChildren(...all.flatMap((attention) => {
      const whole = attention.heads.every((head) => off.has(`${attention.id}/${head}`));
      const layer = el("button", {
        type: "button", class: "switch-layer", "data-layer": attention.id, "aria-pressed": String(whole), title: t("switch.layer", { layer: attention.layer }), text: attention.layer,
        on: { click: () => {
          const others = state.experiment.off.filter(([id]) => id !== attention.id);
          change({ ...state.experiment, off: whole ? others : [...others, ...attention.heads.map((head) => [attention.id, head])] });
        } },
      });
      const heads = attention.heads.map((head) => {
        const pressed = off.has(`${attention.id}/${head}`);
        const label = t(pressed ? "switch.on" : "switch.off", { layer: attention.layer, head });
        return el("button", {
          type: "button", class: "switch", "data-switch": `${attention.id}/${head}`, "aria-pressed": String(pressed), "aria-label": label, title: label,
          "data-chosen": attention.id === state.attention && head === state.head,
          on: { click: () => change(toggle(state.experiment, "off", [attention.id, head])) },
        });
      });
      return [layer, ...heads, ...Array.from({ length: widest - heads.length }, () => el("span"))];
    }));
  }

  function chips() {
    const { t, state, source } = app;
    const { off, temperature, forbid, force, edits } = state.experiment;
    // Where a change applies: an attention by its id, all of a kind, or all.
    const place = (where, head) => {
      if (where === "") return t("scope.all");
      const found = source.about.attentions.find(({ id, kind }) => id === where || kind === where);
      const kind = source.about.attentions.some((one) => one.kind !== found.kind) ? t(`kind.${found.kind}`) : "";
      if (where !== found.kind && head >= 0) return `${kind} ${found.layer}·${head}`.trim();
      return [kind, where === found.kind ? t("scope.all") : `${t("layer").toLowerCase()} ${found.layer}`].filter(Boolean).join(" · ");
    };
    const pair = ([where, head, query, key]) => {
      const { queries, keys } = source.about.attentions.find(({ id, kind }) => id === where || kind === where);
      const name = (stream, token) => `${token} ${short(app.text(stream, token), 12)}`;
      return { place: place(where, head), query: name(queries, query), key: name(keys, key) };
    };
    const chip = (name, entry, text) => el("li", { class: "chip", "data-change": name }, el("span", { text }), el("button", {
      type: "button", "aria-label": t("remove", { text }), title: t("remove", { text }), text: "✕", on: { click: () => change(toggle(state.experiment, name, entry)) },
    }));
    list.replaceChildren(
      ...off.map((entry) => chip("off", entry, t("chip.off", { place: place(...entry) }))),
      ...temperature.map((entry) => chip("temperature", entry, t("chip.temperature", { place: place(entry[0], -1), value: number(entry[1]) }))),
      ...["forbid", "force"].flatMap((name) => state.experiment[name].map((entry) => chip(name, entry, t(`chip.${name}`, pair(entry))))),
      ...edits.map((entry) => chip("edits", entry, t("chip.edit", { position: entry[1], before: short(app.text(entry[0], entry[1]), 12), after: short(entry[2], 12) }))),
    );
    list.hidden = isEmpty({ off, temperature, forbid, force, edits });
  }

  function update() {
    const { t, state, source } = app;
    const { about } = source;
    element.hidden = !about.runs;
    titles.heads.textContent = t("switches");
    titles.temperature.textContent = t("why.temperature");
    titles.pairs.textContent = t("pairs");
    titles.tokens.textContent = t("edit");
    switches();
    setOptions(scope, [["all", t("scope.all")], ["layer", t("scope.layer")]], scope.value || "all");
    setOptions(where, [["head", t("scope.head")], ["layer", t("scope.layer")], ["all", t("scope.all")]], where.value || "head");
    const value = state.experiment.temperature.find(([attention]) => attention === target())?.[1] ?? 1;
    const moved = document.activeElement === slider;
    if (!moved) slider.value = Math.log2(value);
    heat.textContent = number(moved ? 2 ** Number(slider.value) : value); // a link may hold a value between its steps
    slider.setAttribute("aria-label", t("why.temperature"));
    const attention = app.attention();
    const { cell } = state;
    const inside = cell && attention && cell[0] < attention.Q && cell[1] < attention.K;
    pair.replaceChildren(...(inside
      ? [`${t("query")} ${cell[0]} `, el("bdi", { text: visible(app.text(attention.queries, cell[0])) }), " → ", `${t("key")} ${cell[1]} `, el("bdi", { text: visible(app.text(attention.keys, cell[1])) })]
      : [t("pairs.hint")]));
    pair.classList.toggle("muted", !inside);
    for (const button of acts) {
      button.textContent = t(button.dataset.act);
      button.disabled = !inside;
    }
    tokens.hidden = !about.edits?.length;
    if (!tokens.hidden) {
      setOptions(stream, about.edits.map((name) => [name, app.streamName(name)]), about.edits.includes(stream.value) ? stream.value : about.edits[0]);
      stream.hidden = about.edits.length < 2;
      position.max = app.tokens(stream.value).length - 1;
      position.setAttribute("aria-label", t("position"));
      token.setAttribute("aria-label", t("token"));
      replace.textContent = t("replace");
      if (document.activeElement !== token) showToken();
    }
    reset.textContent = t("reset");
    link.textContent = t("link");
    reset.disabled = isEmpty(state.experiment);
    chips();
  }

  const texts = () => [...list.querySelectorAll("span")].map((one) => one.textContent);
  return { element, update, texts };
}
