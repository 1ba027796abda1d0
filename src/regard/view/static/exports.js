// Save a view as a file. Every view returns an SVG drawing; a PNG is the same drawing at twice the size.
import { svg } from "./dom.js";

const FONT = "system-ui, sans-serif";

function widthOf(title) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = `600 14px ${FONT}`;
  return Math.ceil(context.measureText(title).width);
}

function addTitle(drawing, title, dark) {
  const height = Number(drawing.getAttribute("height"));
  const width = Math.max(Number(drawing.getAttribute("width")), 24 + widthOf(title));
  const whole = svg(
    "svg",
    { xmlns: "http://www.w3.org/2000/svg", width, height: height + 34, viewBox: `0 0 ${width} ${height + 34}`, "font-family": FONT, fill: dark ? "#e8eaf2" : "#1b2030" },
    svg("rect", { width: "100%", height: "100%", fill: dark ? "#14161f" : "#ffffff" }),
    svg("text", { x: 12, y: 22, "font-size": 14, "font-weight": 600, text: title }),
  );
  drawing.setAttribute("y", 34);
  whole.append(drawing);
  return { text: new XMLSerializer().serializeToString(whole), width, height: height + 34 };
}

async function raster({ text, width, height }) {
  const image = new Image();
  const href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  try {
    image.src = href;
    await image.decode();
    const canvas = document.createElement("canvas");
    const scale = Math.min(2, 8192 / Math.max(width, height));
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  } finally {
    URL.revokeObjectURL(href);
  }
}

export async function save(drawing, kind, name, title, dark) {
  const whole = addTitle(drawing, title, dark);
  const blob = kind === "png" ? await raster(whole) : new Blob([whole.text], { type: "image/svg+xml" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${name}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  return link.download;
}
