// Attention rollout: the share of each input token in each position after some or all layers.
import { el } from "./dom.js";
import { bands, level } from "./levels.js";
import { rank } from "./neighbours.js";
import { createPlane } from "./plane.js";

export function rolloutView(app) {
  const plane = createPlane(app, (window) => app.set(window));
  const slider = el("input", { type: "range", min: 0, step: 1, class: "slider" });
  const label = el("span", { class: "slider-label" });
  const element = el("section", { class: "view view-map" }, el("div", { class: "bar" }, slider, label), plane.element);
  let latest = 0;
  slider.addEventListener("input", () => {
    const chosen = Number(slider.value);
    app.set({ step: chosen === Number(slider.max) ? -1 : chosen }); // the last layer is the whole stack
  });

  return {
    element,
    async update() {
      const now = ++latest;
      const { rollout } = app.source.about;
      const { step, rows, columns } = app.state;
      const [whole, layers] = await Promise.all([app.source.weights(rollout.map), rollout.layers ? app.source.weights(rollout.layers) : null]);
      if (now !== latest) return;
      const count = layers?.shape[0] ?? 0;
      const at = step >= 0 && step < count ? step : -1;
      slider.max = Math.max(1, count - 1);
      slider.value = at < 0 ? slider.max : at;
      slider.hidden = count < 2;
      slider.setAttribute("aria-label", app.t("steps"));
      label.textContent = `${app.t(`kind.${rollout.kind}.long`)}: ${at < 0 ? app.t("step.all") : app.t("step", { layer: at })}`;
      slider.setAttribute("aria-valuetext", label.textContent);
      const [height, width] = whole.shape;
      const data = at < 0 ? whole.data : layers.data.subarray(at * height * width, (at + 1) * height * width);
      const tokens = app.tokens(rollout.stream);
      const text = (n) => app.text(rollout.stream, n);
      const N = tokens.length;
      const exact = height === N && width === N;
      const rowOf = (n) => data.subarray(n * N, (n + 1) * N);
      const columnOf = (n) => Float32Array.from({ length: N }, (_, i) => data[i * N + n]);
      const answer = (all) => ({ all, top: rank(all) });
      plane.show(
        {
          key: `${app.version}/rollout/${at}`, Q: N, K: N, level: level(data, bands(N, height), bands(N, width)), estimate: rollout.exact === false, fetch: null, top: null, words: ["from", "into"], value: "share",
          row: exact ? async (n) => answer(rowOf(n)) : null, column: exact ? async (n) => answer(columnOf(n)) : null,
          rowText: text, columnText: text, rowMarks: app.matches(rollout.stream), columnMarks: app.matches(rollout.stream),
        },
        rows && rows[1] <= N ? rows : null,
        columns && columns[1] <= N ? columns : null,
      );
    },
    reveal: (token) => plane.center(token, token),
    zoom: plane.zoom,
    focus: () => plane.element.querySelector("canvas").focus(),
    figure: async () => plane.figure(),
    hint: "hint.rollout",
  };
}
