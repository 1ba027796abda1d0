// Why one weight is what it is: the steps from query and key to the output, each with its numbers.
import { el } from "./dom.js";
import { number, visible } from "./text.js";

// `close` is called by the button that closes the panel, if there is one.
export function createWhy(app, close = null) {
  const element = el("section", { class: "why", hidden: true });
  let latest = 0;

  function line(label, value, note = "") {
    return el("div", { class: "why-line" }, el("span", { class: "why-label", text: label }), el("span", { class: "why-value", text: value }), note ? el("span", { class: "why-note muted", text: note }) : null);
  }

  function step(name, ...children) {
    return el("div", { class: "why-step" }, el("h3", { text: app.t(name) }), ...children);
  }

  function terms(steps) {
    const { t } = app;
    const largest = Math.max(...steps.terms.map((term) => Math.abs(term[3])), 1e-30);
    const rows = steps.terms.map(([dimension, query, key, term]) => {
      const bar = el("span", { class: `term-fill${term < 0 ? " negative" : ""}` });
      bar.style.width = `${(100 * Math.abs(term)) / largest}%`;
      return el(
        "tr",
        { "data-dimension": dimension },
        el("td", { class: "muted", text: dimension }),
        el("td", { text: number(query) }),
        el("td", { text: number(key) }),
        el("td", { class: "term", text: number(term) }),
        el("td", { class: "term-bar" }, bar),
      );
    });
    const listed = steps.terms.reduce((sum, term) => sum + term[3], 0);
    const rest = steps.dimensions - steps.terms.length;
    if (rest > 0) rows.push(el("tr", { class: "rest" }, el("td", { class: "muted", colspan: 3, text: t("why.rest", { count: rest }) }), el("td", { class: "term", text: number(steps.product - listed) }), el("td")));
    const heads = ["why.dimension", "query", "key", "why.term"].map((name) => el("th", { text: t(name) }));
    return el("table", { class: "terms" }, el("thead", {}, el("tr", {}, heads, el("th"))), el("tbody", {}, rows));
  }

  function steps(found) {
    const { t } = app;
    const scaled = found.scale === null ? [] : [line(t("why.scale"), `× ${number(found.scale)}`)];
    const softmax = found.normalization === "Softmax()";
    if (found.softcap !== null) scaled.push(line(t("why.softcap"), number(found.softcap)));
    return [
      step("why.step.product", line(t("why.product"), number(found.product), found.score_name === "Dot" ? "q · k" : found.score_name), terms(found)),
      step(
        "why.step.logit",
        ...scaled,
        line(t("why.score"), number(found.score)),
        line(t("why.bias"), found.bias === null ? t("why.none") : `+ ${number(found.bias)}`),
        line(t("why.temperature"), `÷ ${number(found.temperature)}`),
        line(t("why.mask"), t(found.allowed ? "why.visible" : "why.hidden")),
        line(t("why.logit"), found.logit === null ? "−∞" : number(found.logit)),
      ),
      step(
        softmax ? "why.step.softmax" : "why.step.normalization",
        !softmax ? line(t("why.normalization"), found.normalization) : line(t("why.lse"), found.lse === null ? "−∞" : number(found.lse), found.sink === null ? "" : t("why.sink", { sink: number(found.sink) })),
        line(t("weight"), number(found.weight), found.allowed ? t("why.rank", { rank: found.rank, visible: found.visible }) : ""),
      ),
      step(
        "why.step.output",
        line(t("why.length"), number(found.value_length)),
        found.factor === 1 ? null : line(t("why.factor"), `× ${number(found.factor)}`),
        line(t("why.contribution"), number(found.contribution)),
        line(t("why.share"), found.share === null ? "–" : number(found.share)),
      ),
    ];
  }

  return {
    element,
    hide() {
      latest++;
      element.hidden = true;
    },
    // sides: [{title, record, attention, head}], one column each. spot: {query, key}; texts: [query, key].
    async show(sides, spot, texts) {
      const now = ++latest;
      const { t } = app;
      const found = await Promise.all(
        sides.map(({ record, attention, head }) => app.source.ask("why", { record, attention: attention.id, head, query: spot.query, key: spot.key })),
      );
      if (now !== latest) return;
      element.replaceChildren(
        el(
          "header",
          {},
          el("h2", { text: t("why") }),
          el("p", { class: "why-pair" }, `${t("query")} ${spot.query} `, el("bdi", { text: visible(texts[0]) }), " → ", `${t("key")} ${spot.key} `, el("bdi", { text: visible(texts[1]) })),
          close ? el("button", { type: "button", class: "icon small", "aria-label": t("close"), title: t("close"), text: "✕", on: { click: close } }) : null,
        ),
        el("div", { class: "why-sides" }, sides.map(({ title }, n) => el("div", { class: "why-side", "data-side": n }, title ? el("h3", { class: "why-title", text: title }) : null, steps(found[n])))),
      );
      element.hidden = false;
    },
  };
}
