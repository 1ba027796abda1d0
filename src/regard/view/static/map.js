// The map of one head.
import { el } from "./dom.js";
import { createPlane } from "./plane.js";

export function mapView(app) {
  const plane = createPlane(app, (window) => app.set(window));
  const element = el("section", { class: "view view-map" }, plane.element);
  let latest = 0;

  return {
    element,
    async update() {
      const now = ++latest;
      const attention = app.attention();
      const { head, rows, columns } = app.state;
      if (!attention) return;
      const level = await app.source.level(attention, head);
      if (now !== latest) return;
      plane.show(
        {
          key: `${app.version}/${attention.id}/${head}`,
          Q: attention.Q,
          K: attention.K,
          level,
          fetch: app.source.live && !attention.exact
            ? (top, left, size) => app.source.window({ attention, head, rows: top, columns: left, size })
            : null,
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
