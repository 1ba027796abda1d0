// Attention of up to eight tokens, computed in the browser. Text is inserted as text nodes only.
const MOST = 8, LARGEST = 1e6, COLDEST = 1e-6;
const KINDS = ["q1", "q2", "k1", "k2", "v1", "v2"];
const EXAMPLES = {
  first: [[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1], [1, 1, -1, 0, -1, 0.5], [-1, 0.5, 0.5, -1, 0, -1]],
  equal: [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1], [1, 1, 1, 1, -1, 0], [1, 1, 1, 1, 0, -1]],
  saturated: [[30, 0, 30, 0, 1, 0], [0, 30, 0, 30, 0, 1], [-30, 0, -30, 0, -1, 0]],
  textbook: [[3, 0, 1, 0, 1, 0], [1, 0, -1, 0, 0, 1]],
};
const state = { lang: "en", tokens: [], mask: [], temperature: 1, chosen: 0, component: 0, example: "first", wrong: new Map() };
const $ = (id) => document.getElementById(id);

function say(key, values = {}) {
  return WORDS[state.lang][key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

// Numbers

// Four decimals, or powers of ten where they would say little. Below 1e-300 double precision has no digits left.
function show(x) {
  if (x === -Infinity) return "−∞";
  const size = Math.abs(x);
  const text = size < 1e-300 ? "0.0000" : size >= 1e5 || size < 5e-5 ? size.toExponential(3) : size.toFixed(4);
  return (x < 0 && size >= 1e-300 ? "−" : "") + text;
}

// A finite number between two limits, or NaN; a comma counts as a decimal point, a minus sign may be typographic.
function parse(text, lowest, highest) {
  const clean = text.trim().replace("−", "-").replace(",", ".");
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(clean)) return NaN;
  const number = Number(clean);
  return number >= lowest && number <= highest ? number : NaN;
}

// A sum of terms; 0 if they cancel up to rounding, since none of its digits would be right.
function add(terms) {
  const total = terms.reduce((a, b) => a + b, 0);
  return Math.abs(total) < 1e-11 * terms.reduce((a, b) => a + Math.abs(b), 0) ? 0 : total;
}

// One query: the logits of its keys, -Infinity where hidden, and all that follows from them.
function attend(logits, values) {
  const largest = Math.max(...logits);
  if (largest === -Infinity) return { weights: logits.map(() => 0), output: [0, 0] };
  const raised = logits.map((logit) => Math.exp(logit - largest));
  const sum = raised.reduce((a, b) => a + b, 0);
  const weights = raised.map((each) => each / sum);
  return { weights, output: [0, 1].map((e) => add(weights.map((w, j) => w * values[j][e]))) };
}

// 1 - w as the sum of the other weights: exact also where w rounds to 1.
function jacobian(weights) {
  return weights.map((w, j) =>
    weights.map((other, m) => (j === m ? w * weights.reduce((sum, each, n) => (n === j ? sum : sum + each), 0) : -w * other)),
  );
}

// Gradients of one component of the output of one query. A difference of values is taken before it is weighted, so
// that nothing cancels.
function gradients(weights, tokens, chosen, component, scale) {
  const values = tokens.map((token) => token[4 + component]);
  const logits = weights.map((w, j) => w * add(weights.map((other, m) => other * (values[j] - values[m]))));
  const query = [0, 1].map((d) => scale * add(logits.map((g, j) => g * tokens[j][2 + d])));
  const keys = logits.map((g) => [0, 1].map((d) => scale * g * tokens[chosen][d]));
  return { logits, query, keys, values: weights };
}

// The corners of the convex hull of points, in order.
function hull(points) {
  const sorted = [...points].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const half = (list) => {
    const chain = [];
    for (const point of list) {
      const turns = () => {
        const [a, b] = chain.slice(-2);
        return (b[0] - a[0]) * (point[1] - a[1]) - (b[1] - a[1]) * (point[0] - a[0]);
      };
      while (chain.length > 1 && turns() <= 0) chain.pop();
      chain.push(point);
    }
    return chain.slice(0, -1);
  };
  return sorted.length < 3 ? sorted : [...half(sorted), ...half(sorted.reverse())];
}

function compute() {
  const { tokens, mask, temperature } = state;
  const scale = 1 / Math.SQRT2 / temperature;
  const scores = tokens.map((a) => tokens.map((b) => a[0] * b[2] + a[1] * b[3]));
  const logits = scores.map((row, i) => row.map((s, j) => (mask[i][j] ? s / Math.SQRT2 / temperature : -Infinity)));
  const rows = logits.map((row) => attend(row, tokens.map((token) => token.slice(4))));
  const weights = rows[state.chosen].weights;
  return {
    scores, logits, weights: rows.map((row) => row.weights), outputs: rows.map((row) => row.output),
    jacobian: jacobian(weights), gradient: gradients(weights, tokens, state.chosen, state.component, scale),
  };
}

// Elements

function el(name, props = {}, ...children) {
  const svg = ["svg", "circle", "line", "polygon", "text", "title"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (key === "heat") node.style.backgroundColor = `rgb(var(--${value < 0 ? "cold" : "heat"}) / ${Math.abs(value)})`;
    else node.setAttribute(key, value);
  }
  node.append(...children.flat());
  return node;
}

const indices = () => state.tokens.map((_, n) => n);

function matrix(id, rows, heads, names, options = {}) {
  const largest = options.largest ?? Math.max(...rows.flat().map(Math.abs).filter(Number.isFinite), 1e-300);
  $(id).replaceChildren(
    el("table", {}, el("tr", {}, el("th"), heads.map((head) => el("th", { scope: "col" }, head))),
      rows.map((row, i) => el("tr", { class: options.chosen === i ? "chosen" : "" }, el("th", { scope: "row" }, names[i]),
        row.map((x) => el("td", { class: x === -Infinity ? "hidden" : "", heat: Number.isFinite(x) ? (0.6 * x) / largest : 0 }, show(x)))))),
  );
}

function chooser(i) {
  return el("button", { type: "button", "aria-label": say("choose", { n: i + 1 }), "aria-pressed": i === state.chosen, "data-query": i, on: { click: () => { state.chosen = i; renderAt(`[data-query="${i}"]`); } } }, `${say("query")} ${i + 1}`);
}

function drawInputs() {
  const field = (i, d) => {
    const key = `${i},${d}`, wrong = state.wrong.has(key);
    return el("input", {
      value: wrong ? state.wrong.get(key) : String(state.tokens[i][d]), inputmode: "decimal", autocomplete: "off", "aria-invalid": wrong,
      "aria-label": say("field", { name: KINDS[d], n: i + 1 }), "data-field": key,
      on: { input: (event) => { enter(key, event.target, -LARGEST, LARGEST, (number) => { state.tokens[i][d] = number; }); } },
    });
  };
  $("inputs").replaceChildren(
    el("table", {}, el("tr", {}, el("th"), KINDS.map((kind) => el("th", { scope: "col" }, kind))),
      indices().map((i) => el("tr", {}, el("th", { scope: "row" }, `${say("token")} ${i + 1}`), KINDS.map((_, d) => el("td", {}, field(i, d)))))),
  );
}

function drawMask() {
  $("mask").replaceChildren(
    el("table", {}, el("tr", {}, el("th"), indices().map((j) => el("th", { scope: "col" }, `${say("key")} ${j + 1}`))),
      indices().map((i) => el("tr", { class: i === state.chosen ? "chosen" : "" }, el("th", { scope: "row" }, chooser(i)),
        indices().map((j) => el("td", { class: "cell" }, el("button", {
          type: "button", "aria-pressed": state.mask[i][j], "data-cell": `${i},${j}`, "aria-label": say("cell", { i: i + 1, j: j + 1 }),
          on: { click: () => { state.mask[i][j] = !state.mask[i][j]; leaveExample(); renderAt(`[data-cell="${i},${j}"]`); } },
        }, state.mask[i][j] ? "█" : "·")))))),
  );
}

function drawHull(results) {
  const values = state.tokens.map((token) => token.slice(4)), all = [...values, ...results.outputs];
  const sides = [0, 1].map((d) => [Math.min(...all.map((p) => p[d])), Math.max(...all.map((p) => p[d]))]);
  const span = Math.max(...sides.map(([low, high]) => high - low)) || 1;
  const at = (p) => p.map((x, d) => { const middle = (sides[d][0] + sides[d][1]) / 2; return 200 + (d ? -1 : 1) * ((x - middle) / span) * 300; });
  const weights = results.weights[state.chosen], seen = values.filter((_, j) => state.mask[state.chosen][j]);
  const text = (p, words, below = -7) => { const [x, y] = at(p); return el("text", { x: x + 9, y: y + below }, words); };
  const point = (p, radius, kind, words) => { const [x, y] = at(p); return el("circle", { cx: x, cy: y, r: radius, class: kind }, el("title", {}, words)); };
  $("hull").replaceChildren(
    el("svg", { viewBox: "0 0 400 400", role: "img", "aria-label": say("hull") },
      seen.length ? el("polygon", { class: "area", points: hull(seen).map((p) => at(p).join(",")).join(" ") }) : [],
      values.map((p, j) => point(p, 3 + 14 * Math.sqrt(weights[j]), state.mask[state.chosen][j] ? "value" : "unseen", `v${j + 1} (${p.map(show).join(", ")})`)),
      values.map((p, j) => text(p, `v${j + 1}`)),
      results.outputs.map((p, i) => point(p, i === state.chosen ? 6 : 3, i === state.chosen ? "out chosen" : "out", `o${i + 1} (${p.map(show).join(", ")})`)),
      text(results.outputs[state.chosen], `o${state.chosen + 1}`, 16)),
  );
}

function drawResults() {
  const results = compute(), names = indices().map((i) => `${say("query")} ${i + 1}`), keys = indices().map((j) => `${say("key")} ${j + 1}`);
  const chosen = { chosen: state.chosen }, n = state.chosen + 1, gradient = results.gradient;
  matrix("scores", results.scores, keys, names, chosen);
  matrix("logits", results.logits, keys, names, chosen);
  matrix("weights", results.weights.map((row) => [...row, row.reduce((a, b) => a + b, 0)]), [...keys, say("sum")], names, chosen);
  matrix("outputs", results.outputs, ["o1", "o2"], names, chosen);
  matrix("jacobian", results.jacobian, keys.map((key) => `∂ ${key}`), indices().map((j) => `w${n},${j + 1}`), { largest: 0.25 }); // no entry is larger
  matrix("gradient", indices().map((j) => [gradient.logits[j], ...gradient.keys[j], ...[0, 1].map((e) => (e === state.component ? gradient.values[j] : 0)), ...(j === state.chosen ? gradient.query : [0, 0])]),
    [`∂ l${n},j`, "∂ k1", "∂ k2", "∂ v1", "∂ v2", "∂ q1", "∂ q2"], indices().map((j) => `${say("token")} ${j + 1}`));
  drawHull(results);
}

// Input

function enter(key, input, lowest, highest, accept) {
  const number = parse(input.value, lowest, highest), wrong = Number.isNaN(number);
  if (wrong) state.wrong.set(key, input.value);
  else { state.wrong.delete(key); accept(number); }
  leaveExample();
  input.setAttribute("aria-invalid", wrong);
  drawMessage();
  drawResults();
}

function drawMessage() {
  const parts = [...state.wrong].map(([key, text]) => {
    if (key === "temperature") return say("wrong.temperature", { text, used: state.temperature });
    const [i, d] = key.split(",").map(Number);
    return say("wrong", { text, name: KINDS[d], n: i + 1, used: state.tokens[i][d] });
  });
  if (!state.mask[state.chosen].includes(true)) parts.push(say("empty", { n: state.chosen + 1 }));
  $("message").textContent = parts.join(" ");
}

// The numbers are no longer those of an example, which can therefore be chosen again.
function leaveExample() {
  state.example = "";
  drawExamples();
}

function drawExamples() {
  const names = [...Object.keys(EXAMPLES), ...(state.example ? [] : [""])];
  $("example").replaceChildren(...names.map((name) => el("option", { value: name }, say(`example.${name || "own"}`))));
  $("example").value = state.example;
}

function resize(count) {
  while (state.tokens.length < count) state.tokens.push([0, 0, 0, 0, 0, 0]);
  state.tokens.length = count;
  state.mask = indices().map((i) => indices().map((j) => state.mask[i]?.[j] ?? true));
  state.chosen = Math.min(state.chosen, count - 1);
  for (const key of [...state.wrong.keys()]) if (key !== "temperature" && Number(key.split(",")[0]) >= count) state.wrong.delete(key);
  state.example = "";
  render();
}

function render() {
  document.documentElement.lang = state.lang === "zh" ? "zh-CN" : "en";
  document.title = say("title");
  for (const node of document.querySelectorAll("[data-text]")) node.textContent = say(node.dataset.text);
  $("lang").textContent = state.lang === "en" ? "中文 (Chinese)" : "English";
  $("count").replaceChildren(...Array.from({ length: MOST }, (_, n) => el("option", { value: n + 1 }, String(n + 1))));
  $("count").value = state.tokens.length;
  drawExamples();
  $("temperature").value = state.wrong.get("temperature") ?? String(state.temperature);
  $("temperature").setAttribute("aria-invalid", state.wrong.has("temperature"));
  $("component").value = state.component;
  drawInputs();
  drawMask();
  drawMessage();
  drawResults();
}

// Draw all again, and keep the focus on a control that is drawn anew.
function renderAt(selector) {
  render();
  document.querySelector(selector).focus();
}

function load(name) {
  state.example = name;
  state.tokens = EXAMPLES[name].map((token) => [...token]);
  state.mask = indices().map(() => indices().map(() => true));
  state.temperature = 1;
  state.chosen = 0;
  state.wrong.clear();
  render();
}

const MASKS = { none: () => true, causal: (i, j) => j <= i, window: (i, j) => Math.abs(i - j) <= 1, hidden: (i) => i !== state.chosen };

function start() {
  state.lang = location.hash === "#zh" ? "zh" : "en";
  $("lang").addEventListener("click", () => { state.lang = state.lang === "en" ? "zh" : "en"; history.replaceState(null, "", `#${state.lang}`); render(); });
  $("count").addEventListener("change", (event) => resize(Number(event.target.value)));
  $("example").addEventListener("change", (event) => { if (event.target.value) load(event.target.value); });
  $("component").addEventListener("change", (event) => { state.component = Number(event.target.value); drawResults(); });
  $("temperature").addEventListener("input", (event) => {
    enter("temperature", event.target, COLDEST, LARGEST, (number) => { state.temperature = number; });
  });
  for (const button of document.querySelectorAll("[data-mask]")) {
    button.addEventListener("click", () => { state.mask = indices().map((i) => indices().map((j) => MASKS[button.dataset.mask](i, j))); state.example = ""; render(); });
  }
  load("first");
}

start();
