// Convert a level to pixels.
import { find } from "./levels.js";

export function toColours(level, palette, top) {
  return Uint32Array.from(level.data, (value) => palette.pixels[palette.index(value, top)]);
}

// Colour every pixel by the cell that contains it.
export function raster(level, view, width, height, palette, top) {
  const image = new ImageData(Math.max(1, width), Math.max(1, height));
  const pixels = new Uint32Array(image.data.buffer);
  const colours = toColours(level, palette, top);
  const across = cellOfPixel(level.columnEdges, view.left, view.right, image.width);
  const down = cellOfPixel(level.rowEdges, view.top, view.bottom, image.height);
  for (let y = 0; y < image.height; y++) {
    if (y && down[y] === down[y - 1]) {
      pixels.copyWithin(y * image.width, (y - 1) * image.width, y * image.width);
      continue;
    }
    for (let x = 0; x < image.width; x++) pixels[y * image.width + x] = colours[down[y] * level.columns + across[x]];
  }
  return image;
}

function cellOfPixel(edges, from, to, pixels) {
  return Int32Array.from({ length: pixels }, (_, n) => find(edges, Math.floor(from + ((n + 0.5) / pixels) * (to - from))));
}
