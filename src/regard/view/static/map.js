// The map of one head.
import { el } from "./dom.js";
import { createPlane } from "./plane.js";

const CELLS = 192; // rows and columns of a map of scaled weights before it is zoomed

export function mapView(app) {
  const why = app.live?.createWhy(app, () => app.set({ cell: null }));
  const pick = ({ query, key }) => app.source.about.live && app.set({ cell: [query, key] });
  const plane = createPlane(app, (window) => app.set(window), { onPick: pick, aside: why?.element });
  const element = el("section", { class: "view view-map" }, plane.element);
  let latest = 0;

  return {
    element,
    async update() {
      const now = ++latest;
      const attention = app.attention();
      const { head, rows, columns, cell } = app.state;
      if (!attention) return;
      const scaled = app.scaled();
      const window = (top, left, size) => app.source.window({ attention, head, rows: top, columns: left, size, scaled });
      const { Q, K } = attention;
      const level = scaled ? await window([0, Q], [0, K], [Math.min(CELLS, Q), Math.min(CELLS, K)]) : await app.source.level(attention, head);
      if (now !== latest) return;
      plane.show(
        {
          key: `${app.version}/${attention.id}/${head}/${scaled}`,
          Q,
          K,
          level,
          value: scaled ? "scaled" : "weight",
          fetch: app.source.live && (scaled ? Q > CELLS || K > CELLS : !attention.exact) ? window : null,
          rowText: (n) => app.text(attention.queries, n),
          columnText: (n) => app.text(attention.keys, n),
          rowMarks: app.matches(attention.queries),
          columnMarks: app.matches(attention.keys),
          row: (query) => app.neighbours.row(attention, head, query),
          column: (key) => app.neighbours.column(attention, head, key),
          top: app.source.live ? null : async (query) => (await app.neighbours.row(attention, head, query)).top,
        },
        rows,
        columns,
      );
      if (!cell || !app.source.about.live) why?.hide();
      else await why.show([{ record: app.source.about.record, attention, head }], { query: cell[0], key: cell[1] }, [app.text(attention.queries, cell[0]), app.text(attention.keys, cell[1])]);
    },
    reveal(token, stream) {
      const attention = app.attention();
      plane.center(stream === attention.queries ? token : null, stream === attention.keys ? token : null);
    },
    zoom: plane.zoom,
    focus: () => plane.element.querySelector("canvas").focus(),
    figure: async () => plane.figure(),
    hint: "hint.map",
  };
}
