// The viewer: one state, one data source, and one visible view.
import { createControls, createHeader, createTabs } from "./bars.js";
import { diverging, palette } from "./colours.js";
import { debounce, el } from "./dom.js";
import { save } from "./exports.js";
import { headsView } from "./heads.js";
import { createHelp } from "./help.js";
import { imageView } from "./image.js";
import { createNeighbours } from "./neighbours.js";
import { mapView } from "./map.js";
import { rolloutView } from "./rollout.js";
import { soundView } from "./sound.js";
import { available, fitState, fromHash, toHash } from "./state.js";
import { statisticsView } from "./statistics.js";
import { createTip } from "./tip.js";
import { tokensView } from "./tokens.js";
import { LANGUAGES, translator } from "./words.js";

const VIEW_FACTORIES = { heads: headsView, map: mapView, tokens: tokensView, image: imageView, sound: soundView, rollout: rolloutView, statistics: statisticsView };
const THEMES = ["auto", "light", "dark"];
const NONE = new Set();

// address: whether the viewer may change the URL. keys: the element whose key presses it handles. live: what only a live
// source can show: {experimentView, createWhy, words}.
export function start(root, source, { language = "en", address = false, keys = root, live = null } = {}) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const views = {};
  const matches = new Map(); // tokens that match the search, by stream
  const app = {
    source, live, language, theme: "auto", t: translator(language, live?.words), version: 0, hit: 0, tip: createTip(),
    neighbours: createNeighbours(source, () => app.scaled()), state: {},

    set(patch) {
      const before = app.state;
      app.state = fitState({ ...before, ...patch }, app.source.about);
      if (before.view !== app.state.view || before.attention !== app.state.attention || before.head !== app.state.head) app.tip.hide();
      update();
    },
    palette: () => palette(dark()),
    diverging: () => diverging(dark()),
    attention: () => app.source.about.attentions.find(({ id }) => id === app.state.attention),
    attentions: () => app.source.about.attentions.filter(({ kind }) => kind === app.state.kind),
    tokens: (stream) => app.source.about.streams[stream]?.tokens ?? [],
    // Whether numbers are weights times the lengths of the values, which only a live source has.
    scaled: () => app.state.scaled && Boolean(app.source.about.live) && ["map", "tokens", "experiment"].includes(app.state.view),
    text: (stream, token) => app.tokens(stream)[token] ?? String(token),
    streamName: (stream) => (app.t(`stream.${stream}`) === `stream.${stream}` ? stream : app.t(`stream.${stream}`)),
    special: (stream) => new Set(app.source.about.streams[stream]?.special ?? []),

    // The heads of the chosen kind, sorted and filtered by the state.
    heads() {
      const { sort, down, named, only } = app.state;
      const entries = app.attentions().flatMap((attention) =>
        attention.heads.map((head, n) => ({
          attention, head,
          ...Object.fromEntries(["entropy", "distance", "max_logit", "sink"].map((name) => [name, attention.means?.[name]?.[n] ?? null])),
          found: (attention.found ?? []).filter((one) => one.head === head).sort((a, b) => b.score - a.score),
        })),
      ).filter((entry) => (!named || entry.found.some(({ name }) => name === named)) && (!only || String(entry.attention.layer) === only));
      const value = (entry) =>
        sort === "found" ? (named ? entry.found.find(({ name }) => name === named)?.score : entry.found[0]?.score) ?? -1 : entry[sort] ?? -Infinity;
      if (sort !== "layer") entries.sort((a, b) => (down ? value(b) - value(a) : value(a) - value(b)));
      else if (down) entries.sort((a, b) => b.attention.layer - a.attention.layer);
      return entries;
    },

    step(what, by) {
      const attention = app.attention();
      if (!attention) return;
      const all = what === "layer" ? app.attentions().map(({ id }) => id) : attention.heads;
      const at = all.indexOf(what === "layer" ? attention.id : app.state.head);
      const next = all[(at + by + all.length) % all.length];
      app.set(what === "layer" ? { attention: next } : { head: next });
    },

    search(text) {
      app.hit = 0;
      matches.clear();
      app.set({ search: text });
      if (text && app.hits().length) reveal();
    },
    // The distinct streams of the current view.
    streams() {
      const attention = app.attention();
      if (app.state.view === "rollout") return [app.source.about.rollout.stream];
      return attention ? [...new Set([attention.queries, attention.keys])] : [];
    },
    matches(stream) {
      const wanted = app.state.search.trim().toLowerCase();
      if (!wanted) return NONE;
      if (!matches.has(stream)) {
        const hits = new Set();
        app.tokens(stream).forEach((token, n) => token.toLowerCase().includes(wanted) && hits.add(n));
        matches.set(stream, hits);
      }
      return matches.get(stream);
    },
    hits: () => app.streams().flatMap((stream) => [...app.matches(stream)].map((token) => ({ stream, token }))),
    nextMatch(by) {
      const count = app.hits().length;
      if (!count) return;
      app.hit = (app.hit + by + count) % count;
      controls.update();
      reveal();
    },

    // Results of an earlier text are paler while computing and hidden after a failure.
    stale(how) {
      if (how) {
        root.dataset.stale = how;
        app.tip.hide();
      } else delete root.dataset.stale;
    },

    run: (text) => app.load((wanted) => app.source.run(text, wanted)),
    // Show another record that the host holds: {record, row}.
    async open(request) {
      const opened = await app.load((wanted) => app.source.open(request, wanted));
      if (opened) header.fill(app.source.about.text ?? "");
      return opened;
    },

    // Whether the answer is shown.
    async load(answer) {
      const now = ++running;
      app.stale("busy");
      header.busy(app.t("text.busy"));
      try {
        await answer(() => now === running);
        if (now !== running) return false;
        header.busy("");
        app.stale("");
        app.version++;
        app.neighbours.forget();
        matches.clear();
        for (const view of Object.values(views)) view.forget?.();
        markLive();
        app.set({ text: app.source.about.text ?? "", position: null });
        return true;
      } catch (error) {
        if (now === running && !app.recover(error)) {
          app.stale("failed");
          header.busy(app.t("text.failed", { reason: error.message }));
        }
        return false;
      }
    },

    async save(kind) {
      try {
        const attention = app.attention();
        const shown = app.state.view === "rollout" ? app.source.about.rollout.kind : app.state.kind;
        const title = [app.source.about.title, app.t(`view.${app.state.view}`), shown && app.t(`kind.${shown}.long`), attention && app.t("heads.one", { layer: attention.layer, head: app.state.head })];
        const drawing = await views[app.state.view].figure();
        const all = ["heads", "statistics", "rollout"].includes(app.state.view); // views of all heads
        const { step, statistic, view } = app.state;
        const which = view === "statistics" ? [statistic] : view === "rollout" && step >= 0 ? [step] : all ? [] : [attention?.layer ?? 0, app.state.head];
        const name = ["regard", view, shown, ...which].filter((part) => part !== undefined && part !== "").join("-");
        const whole = all ? title.slice(0, 3) : title;
        if (view === "rollout") whole.push(step >= 0 ? app.t("step", { layer: step }) : app.t("step.all"));
        notify(app.t("saved", { name: await save(drawing, kind, name, whole.filter(Boolean).join(" · "), dark()) }));
      } catch (error) {
        app.showError(error);
      }
    },
    async copyLink() {
      updateAddress(true);
      try {
        await navigator.clipboard.writeText(location.href);
        notify(app.t("link.copied"));
      } catch {
        notify(app.t("link.shown")); // a page in a file may not write to the clipboard
      }
    },
    nextTheme() {
      app.theme = THEMES[(THEMES.indexOf(app.theme) + 1) % THEMES.length];
      remember("theme", app.theme);
      update();
    },
    nextLanguage() {
      app.language = LANGUAGES[(LANGUAGES.indexOf(app.language) + 1) % LANGUAGES.length];
      app.t = translator(app.language, live?.words);
      if (address) document.documentElement.lang = app.language === "zh" ? "zh-CN" : "en";
      update();
    },
    help: () => help.open(app.t),
    // Send the text again to a server that no longer has it, since it was started again or holds newer ones; once.
    recover(error) {
      const { canRun, about } = app.source;
      if (error?.status !== 410 || !canRun || !about.text || lost === about.record) return false;
      lost = about.record;
      app.run(about.text);
      return true;
    },
    showError(error) {
      if (app.recover(error)) return;
      console.error(error);
      notify(app.t("error", { reason: error?.message ?? String(error) }));
    },
  };
  let running = 0;
  let lost = null; // the record that the server did not have
  const markLive = () => (app.source.about.live = Boolean(live) && app.source.live && Boolean(app.source.about.record && app.source.about.batch));

  const dark = () => (app.theme === "auto" ? system.matches : app.theme === "dark");
  const header = createHeader(app);
  const tabs = createTabs(app);
  const controls = createControls(app);
  const help = createHelp();
  const main = el("main", { class: "main", role: "tabpanel" });
  const hint = el("p", { class: "hint muted" });
  const toast = el("div", { class: "toast", role: "status", hidden: true });
  root.replaceChildren(header.element, tabs.element, controls.element, main, el("footer", { class: "foot" }, hint), app.tip.element, toast, help.element);

  const hideToastSoon = debounce(() => (toast.hidden = true), 2500);
  function notify(text) {
    toast.textContent = text;
    toast.hidden = false;
    hideToastSoon();
  }

  function reveal() {
    const { stream, token } = app.hits()[app.hit] ?? {};
    if (token !== undefined) views[app.state.view].reveal?.(token, stream);
  }

  // Read the state of the link. A live page first computes the text of the link, and then what the rest refers to.
  function restore() {
    markLive();
    const { about } = app.source;
    const given = address ? fromHash(location.hash) : {};
    const text = given.text ?? "";
    app.state = fitState({ ...given, text: about.text ?? "" }, about);
    if (!app.source.canRun || !text.trim() || text === about.text) return;
    app.run(text).then(() => {
      if (app.source.about.text !== text) return;
      header.fill(text);
      app.set({ ...given, text });
    });
  }

  // complete: with the text of a live page, which the address otherwise names only for experiments.
  const updateAddress = (complete = false) => {
    if (!address) return;
    const { text, ...rest } = app.state;
    const hash = toHash(app.source.canRun && (complete || app.state.view === "experiment") ? { ...rest, text } : rest);
    try {
      if (location.hash.slice(1) !== hash) history.replaceState(null, "", `#${hash}`);
    } catch {
      // a frame without a URL
    }
  };
  const updateAddressSoon = debounce(() => updateAddress(), 150);

  function update() {
    const { view } = app.state;
    root.dataset.theme = dark() ? "dark" : "light";
    root.lang = app.language === "zh" ? "zh-CN" : "en";
    header.update();
    tabs.update();
    controls.update();
    main.setAttribute("aria-label", app.t(`view.${view}`));
    if (!app.source.about.attentions.length) {
      main.replaceChildren(el("p", { class: "muted", text: app.t("empty") }));
      return;
    }
    views[view] ??= (view === "experiment" ? live.experimentView : VIEW_FACTORIES[view])(app);
    if (main.firstChild !== views[view].element) main.replaceChildren(views[view].element);
    hint.textContent = views[view].hint ? app.t(views[view].hint) : "";
    Promise.resolve(views[view].update()).catch(app.showError);
    updateAddressSoon();
  }

  const acts = {
    "[": () => app.step("head", -1), "]": () => app.step("head", 1),
    ",": () => app.step("layer", -1), ".": () => app.step("layer", 1),
    "+": () => views[app.state.view].zoom?.(0.5), "=": () => views[app.state.view].zoom?.(0.5),
    "-": () => views[app.state.view].zoom?.(2), "0": () => views[app.state.view].zoom?.(0),
    "/": () => controls.searchBox.focus(), "?": app.help, t: app.nextTheme, l: app.nextLanguage, c: app.copyLink,
    n: () => app.nextMatch(1), N: () => app.nextMatch(-1), p: () => app.save("png"), s: () => app.save("svg"),
    k() {
      const kinds = [...new Set(app.source.about.attentions.map(({ kind }) => kind))];
      app.set({ kind: kinds[(kinds.indexOf(app.state.kind) + 1) % kinds.length], attention: "", token: null, rows: null, columns: null });
    },
    Escape: () => app.set({ token: null, cell: null }),
  };
  keys.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || help.element.open) return;
    if (/^(input|textarea|select)$/i.test(event.target.tagName) && event.key !== "Escape") return;
    const view = available(app.source.about)[Number(event.key) - 1];
    const act = event.key >= "1" && event.key <= "8" ? view && (() => app.set({ view })) : Object.hasOwn(acts, event.key) && acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
    if (view) views[view].focus?.();
  });

  app.theme = THEMES.includes(recall("theme")) ? recall("theme") : "auto";
  system.addEventListener("change", update);
  if (address) {
    addEventListener("hashchange", () => {
      restore();
      matches.clear();
      update();
    });
  }
  restore();
  update();
  return app;
}

function remember(name, value) {
  try {
    localStorage.setItem(`regard.${name}`, value);
  } catch {
    // no storage
  }
}

function recall(name) {
  try {
    return localStorage.getItem(`regard.${name}`);
  } catch {
    return null;
  }
}
