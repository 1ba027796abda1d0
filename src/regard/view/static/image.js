// Attention over the patches of an image.
import { colourBar, legend, scaleText } from "./axes.js";
import { el, svg } from "./dom.js";
import { roundUp } from "./levels.js";
import { overView } from "./over.js";
import { palette } from "./colours.js";

export function imageView(app) {
  const picture = el("img", { alt: "", draggable: "false" });
  const heat = el("canvas", { class: "heat" });
  const mark = el("div", { class: "patch", hidden: true });
  const stage = el("div", { class: "picture", tabindex: "0", role: "img" }, picture, heat, mark);
  const about = () => app.source.about.image;
  // 0 shows the image only, 100 the weights only.
  const opacity = el("input", { type: "range", min: 0, max: 100, value: 75, class: "slider opacity" });
  opacity.addEventListener("input", () => (heat.style.opacity = opacity.value / 100));
  heat.style.opacity = 0.75;
  const opacityName = el("span");
  const scale = el("div", { class: "legend" });
  let top = 0;
  let pooled = false;

  const view = overView(app, {
    element: stage,
    kind: "image",
    control: el("div", { class: "group" }, el("label", { class: "picker" }, opacityName, opacity), scale),
    hit(event) {
      const box = stage.getBoundingClientRect();
      const [rows, columns] = about().grid;
      const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
      const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
      return row >= 0 && row < rows && column >= 0 && column < columns ? about().first + row * columns + column : null;
    },
    inside(token) {
      const { first, grid } = about();
      return token >= first && token < first + grid[0] * grid[1];
    },
    name(token) {
      const { first, grid } = about();
      const at = token - first;
      return app.t("patch", { row: Math.floor(at / grid[1]), column: at % grid[1] });
    },
    first: () => about().first,
    steps: { ArrowRight: () => 1, ArrowLeft: () => -1, ArrowDown: () => about().grid[1], ArrowUp: () => -about().grid[1] },
    prepare() {
      if (picture.getAttribute("src") !== about().href) picture.src = about().href;
      stage.setAttribute("aria-label", app.t("view.image"));
      opacityName.textContent = app.t("opacity");
    },
    clear() {
      heat.width = heat.width;
      scale.replaceChildren();
      mark.hidden = true;
    },
    paint({ values, token, largest, pooled: means }) {
      const { first, grid } = about();
      const [rows, columns] = grid;
      top = roundUp(largest);
      pooled = means;
      heat.width = columns;
      heat.height = rows;
      const context = heat.getContext("2d");
      const image = context.createImageData(columns, rows);
      const colours = palette(true);
      for (let n = 0; n < rows * columns; n++) {
        const weight = values[first + n] ?? 0;
        image.data.set(colours.bytes(weight, top), 4 * n);
        image.data[4 * n + 3] = 255;
      }
      context.putImageData(image, 0, 0);
      legend(scale, colours, top, app.t(pooled ? "weight.pooled" : "weight"));
      const at = token === null ? -1 : token - first;
      mark.hidden = at < 0 || at >= rows * columns;
      if (mark.hidden) return;
      mark.style.left = `${(100 * (at % columns)) / columns}%`;
      mark.style.top = `${(100 * Math.floor(at / columns)) / rows}%`;
      mark.style.width = `${100 / columns}%`;
      mark.style.height = `${100 / rows}%`;
    },
    figure(caption) {
      const [width, height] = [640, Math.round((640 * (picture.naturalHeight || 1)) / (picture.naturalWidth || 1))];
      const share = (name) => parseFloat(mark.style[name]) / 100;
      return svg(
        "svg",
        { width: 2 * width + 12, height: height + 34 },
        svg("text", { x: 12, y: height + 22, "font-size": 13, text: caption }),
        svg("image", { width, height, href: about().href, preserveAspectRatio: "none" }),
        svg("image", { x: width + 12, width, height, href: about().href, preserveAspectRatio: "none" }),
        svg("image", { x: width + 12, width, height, href: heat.toDataURL(), preserveAspectRatio: "none", "image-rendering": "pixelated", opacity: opacity.value / 100 }),
        mark.hidden ? null : svg("rect", {
          x: width + 12 + share("left") * width, y: share("top") * height, width: share("width") * width, height: share("height") * height,
          fill: "none", stroke: "#ffffff", "stroke-width": 3,
        }),
        colourBar(width + 12, height + 12, palette(true), app.t(pooled ? "weight.pooled" : "weight"), ["0", scaleText(top)]),
      );
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
