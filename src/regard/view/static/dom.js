// Create elements from data. Text is inserted as text nodes only, never as markup.
const SVG = "http://www.w3.org/2000/svg";

export function el(name, props, ...children) {
  return fill(document.createElement(name), props, children);
}

export function svg(name, props, ...children) {
  return fill(document.createElementNS(SVG, name), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) node.style.setProperty(key, entry);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Replace options only if they changed, so that an open list stays open.
export function setOptions(select, options, value) {
  const known = options.map(([key, text]) => `${key}\n${text}`).join("\n\n");
  if (select.regardOptions !== known) {
    select.regardOptions = known;
    select.replaceChildren(...options.map(([key, text]) => el("option", { value: key, text })));
  }
  select.value = value;
}

// A row of buttons that works like a group of radio buttons, including arrow keys.
export function choice(label, onChoose) {
  const element = el("div", { class: "choice", role: "radiogroup", "aria-label": label });
  let keys = [];
  element.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !keys.length) return;
    event.preventDefault();
    event.stopPropagation();
    const at = [...element.children].findIndex((button) => button.getAttribute("aria-checked") === "true");
    const next = (at + step + keys.length) % keys.length;
    onChoose(keys[next]);
    element.children[next].focus();
  });
  return {
    element,
    set(options, chosen, name) {
      keys = options.map(([key]) => key);
      element.hidden = options.length < 2;
      if (name) element.setAttribute("aria-label", name);
      const texts = options.map(([, text]) => text).join("\n");
      if (element.regardTexts !== texts) {
        element.regardTexts = texts;
        element.replaceChildren(
          ...options.map(([key, text]) =>
            el("button", { type: "button", role: "radio", "data-key": key, text, on: { click: () => onChoose(key) } }),
          ),
        );
      }
      for (const button of element.children) {
        const on = button.dataset.key === String(chosen);
        button.setAttribute("aria-checked", on);
        button.tabIndex = on ? 0 : -1;
      }
    },
  };
}

// Call `work` at most once per animation frame, with the latest arguments.
export function oncePerFrame(work) {
  let waiting = false;
  let last;
  return (...args) => {
    last = args;
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work(...last);
    });
  };
}

export function debounce(work, milliseconds) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...args), milliseconds);
  };
}
