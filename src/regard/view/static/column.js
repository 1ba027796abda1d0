// A virtual list of tokens: only those on the screen have elements.
import { el } from "./dom.js";
import { visible } from "./text.js";

export const ROW = 24;
let lists = 0;

// `on` has hover(token or null, event), pick(token) and key(event).
export function createColumn(side, on) {
  const name = `regard-list-${++lists}`;
  const element = el("div", { class: `column column-${side}`, role: "listbox", tabindex: "0", "data-side": side });
  let rows = [];
  let first = 0;
  let shown = { count: 0 };

  function tokenAt(event) {
    const token = Math.floor((event.clientY - element.getBoundingClientRect().top + (shown.scroll ?? 0)) / ROW);
    return token >= 0 && token < shown.count ? token : null;
  }

  element.addEventListener("pointermove", (event) => on.hover(tokenAt(event), event));
  element.addEventListener("pointerleave", (event) => on.hover(null, event));
  element.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (token !== null) on.pick(token);
  });
  element.addEventListener("keydown", (event) => on.key?.(event));

  return {
    element,
    // {count, text(n), number(n), shade(n), value(n), marks, special, active, label, scroll, height}
    render(next) {
      shown = next;
      first = Math.max(0, Math.floor(next.scroll / ROW));
      const last = Math.min(next.count, Math.ceil((next.scroll + next.height) / ROW));
      while (rows.length < last - first) {
        const row = el(
          "div",
          { class: "row", role: "option" },
          el("span", { class: "row-number" }),
          el("bdi", { class: "row-text" }),
          el("span", { class: "row-value" }),
        );
        rows.push(row);
        element.append(row);
      }
      element.setAttribute("aria-label", next.label);
      const active = next.active !== null && next.active >= first && next.active < last ? `${name}-${next.active}` : "";
      if (active) element.setAttribute("aria-activedescendant", active);
      else element.removeAttribute("aria-activedescendant");
      for (const [slot, row] of rows.entries()) {
        const token = first + slot;
        row.hidden = token >= last;
        if (row.hidden) continue;
        const [number, text, value] = row.children;
        row.id = `${name}-${token}`;
        row.style.transform = `translateY(${token * ROW - next.scroll}px)`;
        number.textContent = next.number ? next.number(token) : token;
        text.textContent = visible(next.text(token));
        value.textContent = next.value?.(token) ?? "";
        row.style.setProperty("--shade", next.shade?.(token) ?? 0);
        row.setAttribute("aria-setsize", next.count);
        row.setAttribute("aria-posinset", token + 1);
        row.setAttribute("aria-selected", token === next.active);
        row.classList.toggle("found", next.marks.has(token));
        row.classList.toggle("special", next.special?.has(token) ?? false);
      }
    },
  };
}

// A column that scrolls independently.
export function createList(on) {
  const column = createColumn("query", {
    ...on,
    key(event) {
      const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
      if (!step || !shown) return;
      event.preventDefault();
      event.stopPropagation();
      const to = Math.max(0, Math.min(shown.count - 1, (shown.active ?? -1) + step));
      on.pick(to);
      list.reveal(to);
    },
  });
  const space = el("div", { class: "list-space" }, column.element);
  const element = el("div", { class: "list", tabindex: "-1" }, space);
  let shown = null;
  const draw = () => {
    if (!shown) return;
    column.element.style.height = `${element.clientHeight}px`;
    column.render({ ...shown, scroll: element.scrollTop, height: element.clientHeight });
  };
  element.addEventListener("scroll", draw);
  new ResizeObserver(draw).observe(element);
  const list = {
    element,
    set(next) {
      shown = next;
      space.style.height = `${next.count * ROW}px`;
      element.style.height = `min(100%, ${next.count * ROW}px)`;
      draw();
    },
    reveal(token) {
      const top = token * ROW;
      if (top < element.scrollTop || top + ROW > element.scrollTop + element.clientHeight) {
        element.scrollTop = top - element.clientHeight / 2;
      }
    },
  };
  return list;
}
