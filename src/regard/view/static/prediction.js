// What the model predicts at a position, originally and after the changes, and the beams of a generation.
import { el, oncePerFrame } from "./dom.js";
import { number, short, visible } from "./text.js";

export function createPrediction(app) {
  const title = el("h3");
  const slider = el("input", { type: "range", class: "slider", min: 0, step: 1 });
  const label = el("span", { class: "slider-label" });
  const table = el("div", { class: "prediction-table" });
  const counts = { tokens: el("input", { type: "number", min: 1, max: 64, value: 16 }), beams: el("input", { type: "number", min: 1, max: 8, value: 2 }) };
  const names = { tokens: el("span"), beams: el("span") };
  const start = el("button", { type: "button", class: "button", "data-act": "generate", on: { click: generate } });
  const back = el("button", { type: "button", class: "button", "data-act": "back", on: { click: leaveBeam } });
  const beams = el("div", { class: "beams" });
  const bar = el("div", { class: "generate" }, back, start, ...["tokens", "beams"].map((name) => el("label", { class: "picker" }, names[name], counts[name])));
  const element = el("section", { class: "prediction card" }, title, el("div", { class: "bar" }, slider, label), table, bar, beams);
  let shown = null; // {left, right, titles}
  let latest = 0;
  let generated = "";
  let origin = null; // the record of the text and its experiment, while a beam is shown
  slider.addEventListener("input", oncePerFrame(() => {
    const position = Number(slider.value);
    app.set({ position: position === Number(slider.max) ? null : position });
  }));

  function cell(value, other) {
    if (value === null || value === undefined) return el("td", { text: "–" });
    const fill = el("span", { class: `bar-fill${other ? " other" : ""}` });
    fill.style.width = `${100 * value}%`;
    return el("td", { class: "chance" }, fill, el("span", { text: number(value) }));
  }

  // The tokens of a beam contain those that were replaced before; the other changes are applied to it again.
  async function openBeam(record) {
    const { experiment } = app.state;
    if (!app.source.about.prompt) origin = { record: app.source.about.record, experiment };
    if (await app.open({ record })) app.set({ experiment: { ...experiment, edits: [] } });
  }

  async function leaveBeam() {
    const { record, experiment } = origin;
    if (await app.open({ record })) app.set({ experiment: { ...app.state.experiment, edits: experiment.edits } });
  }

  async function generate() {
    const { left, right, titles } = shown;
    const now = (generated = String(Math.random()));
    beams.replaceChildren(el("p", { class: "muted", text: app.t("text.busy") }));
    beams.scrollIntoView({ block: "nearest" });
    try {
      const body = { tokens: Number(counts.tokens.value), beams: Number(counts.beams.value) };
      const parts = [];
      for (const [n, record] of [left, ...(right && right !== left ? [right] : [])].entries()) {
        const answer = await app.source.ask("generate", { record, ...body });
        if (now !== generated) return;
        parts.push(
          el("h3", {}, titles[n], el("small", { class: "muted", text: app.t("beam.score") })),
          el("ol", {}, answer.beams.map((beam) => el("li", {}, el("button", {
            type: "button", class: "beam", "data-record": beam.record, title: app.t("beam.open"), on: { click: () => openBeam(beam.record) },
          }, el("bdi", { text: visible(beam.text) }), el("span", { class: "row-value", text: number(beam.score) }))))),
        );
        beams.replaceChildren(...parts);
        beams.scrollIntoView({ block: "nearest" });
      }
    } catch (error) {
      if (now !== generated) return;
      beams.replaceChildren();
      app.showError(error);
    }
  }

  return {
    element,
    // left, right: ids of records, right may be null; titles: their names; tokenTexts: of both, (position) -> input token.
    async update(left, right, titles, about, tokenTexts) {
      const now = ++latest;
      const { t, state } = app;
      if (!shown || shown.left !== left || shown.right !== right) {
        generated = "";
        beams.replaceChildren();
      }
      shown = { left, right, titles };
      const { output, generates, prompt } = about;
      element.hidden = !output;
      if (!output) return;
      const first = Math.max(output.first, prompt ? prompt - 1 : 0);
      const position = state.position === null ? output.last : Math.min(output.last, Math.max(first, state.position));
      const answer = await app.source.ask("prediction", { record: left, ...(right ? { against: right } : {}), position: state.position === null ? null : position });
      if (now !== latest) return;
      title.textContent = t(output.kind === "vectors" ? "prediction.vectors" : output.kind === "classes" ? "prediction.classes" : generates ? "prediction.next" : "prediction.tokens");
      const many = output.kind !== "vectors" && output.last > first;
      slider.hidden = label.hidden = !many;
      slider.min = first;
      slider.max = output.last;
      slider.value = position;
      slider.setAttribute("aria-label", t("position"));
      const name = (n, texts) => ({ position: n, token: short(texts(n), 24) });
      const [ours, theirs] = [name(position, tokenTexts[0]), name(answer.against_position ?? position, tokenTexts[1])];
      const differs = Number.isInteger(answer.against_position) && (theirs.position !== ours.position || theirs.token !== ours.token);
      label.textContent = t(generates ? "position.after" : "position.at", ours) + (differs ? ` | ${theirs.position}: ${theirs.token}` : "");
      slider.setAttribute("aria-valuetext", label.textContent);
      bar.hidden = !generates;
      back.hidden = !prompt || !origin;
      back.textContent = t("beam.back");
      start.textContent = t("generate");
      for (const name of ["tokens", "beams"]) names[name].textContent = t(`generate.${name}`);
      if (answer.kind === "vectors" || answer.kind === null) {
        table.replaceChildren(el("p", { class: "muted", text: answer.similarity === null || answer.similarity === undefined ? t("prediction.none") : `${t("prediction.similarity")} ${number(answer.similarity)}` }));
        return;
      }
      const both = answer.entries.some(({ against }) => against !== null);
      table.replaceChildren(el(
        "table",
        {},
        el("thead", {}, el("tr", {}, el("th"), el("th", { text: titles[0] }), both ? el("th", { text: titles[1] }) : null)),
        el("tbody", {}, answer.entries.map(({ index, text, probability, against }) =>
          el("tr", { "data-index": index }, el("th", {}, el("bdi", { text: visible(text) })), cell(probability, false), both ? cell(against, true) : null))),
      ));
    },
  };
}
