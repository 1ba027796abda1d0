// Side panel with exact weights: the keys that a query attends to and the queries that attend to a key.
import { el } from "./dom.js";
import { number, visible } from "./text.js";

export function createPanel(app, jump, shown = 14) {
  const element = el("aside", { class: "panel" });

  function table(title, answer, text, side, note) {
    const top = answer.top.slice(0, shown);
    const largest = top[0]?.[1] ?? 1;
    return el(
      "section",
      { class: `panel-part panel-${side}` },
      el("h3", {}, title, note ? el("small", { text: note }) : null),
      top.length
        ? el("ol", {}, top.map(([token, weight]) => {
            const bar = el("span", { class: "bar-fill" });
            bar.style.width = `${Math.max(1, (100 * weight) / largest)}%`;
            return el(
              "li",
              {},
              el(
                "button",
                { type: "button", class: "panel-row", on: { click: () => jump(token, side) } },
                bar,
                el("span", { class: "row-number", text: token }),
                el("bdi", { class: "row-text", text: visible(text(token)) }),
                el("span", { class: "row-value", text: number(weight) }),
              ),
            );
          }))
        : el("p", { class: "muted", text: app.t("nothing") }),
    );
  }

  function heading(label, token, text) {
    return el(
      "header",
      {},
      label ? el("span", { class: "muted", text: label }) : null,
      el("span", { class: "row-number", text: token }),
      el("bdi", { class: "panel-token", text: visible(text(token)) }),
    );
  }

  const note = (answer) => (answer.all ? "" : app.t("top"));

  return {
    element,
    clear(text) {
      element.replaceChildren(el("p", { class: "muted", text }));
    },
    // For a cell of a map: the keys of its query and the queries of its key.
    pair({ query, key }, { rowText, columnText, words = ["looks", "looked"] }, looks, looked) {
      const { t } = app;
      element.replaceChildren(
        heading(t("query"), query, rowText),
        looks ? table(t(words[0]), looks, columnText, "key", note(looks)) : "",
        el("hr"),
        heading(t("key"), key, columnText),
        looked ? table(t(words[1]), looked, rowText, "query", note(looked)) : "",
      );
    },
    // For a token: `looks` and `looked` are answers of neighbours.row and .column, or null if it is not a query or a key.
    show(spot, attention, looks, looked) {
      const { t } = app;
      const [rowText, columnText] = [attention.queries, attention.keys].map((stream) => (token) => app.text(stream, token));
      element.replaceChildren(
        heading("", spot.token, spot.side === "key" ? columnText : rowText),
        looks ? table(t("looks"), looks, columnText, "key", note(looks)) : "",
        looked ? table(t("looked"), looked, rowText, "query", note(looked)) : "",
      );
    },
  };
}
