// Attention over time: a curve of the weights below the spectrogram, which is darkened where weights are small.
import { el, svg } from "./dom.js";
import { overView } from "./over.js";
import { brief, number } from "./text.js";

const HEIGHT = 120;

export function soundView(app) {
  const picture = el("img", { alt: "", draggable: "false" });
  const veil = el("canvas", { class: "heat" });
  const mark = el("div", { class: "moment", hidden: true });
  const curve = svg("svg", { class: "curve", viewBox: `0 0 1000 ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const ticks = el("div", { class: "ticks" });
  const peak = el("span", { class: "peak" });
  const stage = el(
    "div",
    { class: "sound", tabindex: "0", role: "img" },
    el("div", { class: "sound-picture" }, picture, veil, mark),
    el("div", { class: "curve-box" }, curve, peak),
    ticks,
  );
  const about = () => app.source.about.spectrogram;
  let shown = null;

  function shape(values, largest) {
    const { frames } = about();
    const y = (value) => HEIGHT - 4 - (HEIGHT - 10) * (largest > 0 ? value / largest : 0);
    let path = `M0 ${HEIGHT}`;
    for (let slot = 0; slot < frames; slot++) {
      const at = y(values[slot] ?? 0).toFixed(1);
      path += `L${((1000 * slot) / frames).toFixed(1)} ${at}L${((1000 * (slot + 1)) / frames).toFixed(1)} ${at}`;
    }
    return `${path}L1000 ${HEIGHT}Z`;
  }

  const view = overView(app, {
    element: stage,
    kind: "spectrogram",
    hit(event) {
      const box = stage.getBoundingClientRect();
      const slot = Math.floor(((event.clientX - box.left) / box.width) * about().frames);
      return slot >= 0 && slot < about().frames ? slot : null;
    },
    inside: (token) => token < about().frames,
    name(token) {
      const { frames, seconds } = about();
      return app.t("moment", { from: brief((seconds * token) / frames), to: brief((seconds * (token + 1)) / frames) });
    },
    first: () => 0,
    steps: { ArrowRight: () => 1, ArrowLeft: () => -1 },
    prepare() {
      if (picture.getAttribute("src") !== about().href) picture.src = about().href;
      stage.setAttribute("aria-label", app.t("view.sound"));
      const { seconds } = about();
      ticks.replaceChildren(...Array.from({ length: 6 }, (_, n) => el("span", { text: `${brief((seconds * n) / 5)}${n === 5 ? ` ${app.t("seconds")}` : ""}` })));
    },
    clear() {
      shown = null;
      curve.replaceChildren();
      veil.width = veil.width;
      peak.textContent = "";
      mark.hidden = true;
    },
    paint({ values, token, largest, pooled }) {
      shown = { values, largest, name: app.t(pooled ? "weight.pooled" : "weight") };
      curve.replaceChildren(svg("path", { class: "area", d: shape(values, largest) }));
      peak.textContent = `${shown.name} 0 – ${number(largest)}`;
      const { frames } = about();
      veil.width = frames;
      veil.height = 1;
      const context = veil.getContext("2d");
      const image = context.createImageData(frames, 1);
      for (let slot = 0; slot < frames; slot++) {
        image.data.set([12, 14, 24, 190 * (1 - Math.sqrt(largest > 0 ? Math.max(0, values[slot] ?? 0) / largest : 0))], 4 * slot);
      }
      context.putImageData(image, 0, 0);
      mark.hidden = token === null;
      mark.style.left = `${(100 * (token ?? 0)) / frames}%`;
      mark.style.width = `${100 / frames}%`;
    },
    figure(caption) {
      const drawing = svg(
        "svg",
        { width: 1000, height: 382 },
        svg("image", { width: 1000, height: 200, href: about().href, preserveAspectRatio: "none" }),
        svg("image", { width: 1000, height: 200, href: veil.toDataURL(), preserveAspectRatio: "none", "image-rendering": "pixelated" }),
      );
      const { seconds } = about();
      for (let n = 0; n <= 5; n++) {
        const anchor = n === 0 ? "start" : n === 5 ? "end" : "middle";
        drawing.append(svg("text", { x: n === 0 ? 4 : n === 5 ? 996 : 200 * n, y: 348, "font-size": 12, "text-anchor": anchor, text: `${brief((seconds * n) / 5)} s` }));
      }
      drawing.append(svg("text", { x: 12, y: 372, "font-size": 13, text: caption }));
      if (shown) {
        drawing.append(
          svg("path", { transform: "translate(0 210)", fill: "#4553d6", d: shape(shown.values, shown.largest) }),
          svg("text", { x: 4, y: 224, "font-size": 12, text: `${shown.name} 0 – ${number(shown.largest)}` }),
        );
      }
      return drawing;
    },
  });
  stage.addEventListener("keydown", (event) => {
    if (view.key(event)) {
      event.preventDefault();
      event.stopPropagation();
    }
  });
  return view;
}
