// The visible window of a map, in tokens (real numbers).
const SMALLEST = 4;

export function createWindow(Q, K) {
  const all = { top: 0, bottom: Q, left: 0, right: K };
  const view = { ...all };

  function place(top, bottom, left, right) {
    const height = Math.min(Q, Math.max(Math.min(SMALLEST, Q), bottom - top));
    const width = Math.min(K, Math.max(Math.min(SMALLEST, K), right - left));
    view.top = Math.min(Math.max(0, top), Q - height);
    view.left = Math.min(Math.max(0, left), K - width);
    view.bottom = view.top + height;
    view.right = view.left + width;
  }

  return {
    view,
    set(rows, columns) {
      place(...(rows ?? [0, Q]), ...(columns ?? [0, K]));
    },
    // A factor below 1 zooms in; the point (x, y), in fractions of the plot, stays fixed.
    zoom(factor, x = 0.5, y = 0.5) {
      const height = Math.min(Q, Math.max(Math.min(SMALLEST, Q), (view.bottom - view.top) * factor));
      const width = Math.min(K, Math.max(Math.min(SMALLEST, K), (view.right - view.left) * factor));
      const top = view.top + y * (view.bottom - view.top - height);
      const left = view.left + x * (view.right - view.left - width);
      place(top, top + height, left, left + width);
    },
    // Move by fractions of the window.
    move(across, down) {
      const [dx, dy] = [across * (view.right - view.left), down * (view.bottom - view.top)];
      place(view.top + dy, view.bottom + dy, view.left + dx, view.right + dx);
    },
    show(row, column) {
      const [height, width] = [view.bottom - view.top, view.right - view.left];
      const top = row < view.top ? row : row + 1 > view.bottom ? row + 1 - height : view.top;
      const left = column < view.left ? column : column + 1 > view.right ? column + 1 - width : view.left;
      place(top, top + height, left, left + width);
    },
    // The window in whole tokens, or null for everything, as stored in the state and in the link.
    rounded() {
      const rows = [Math.floor(view.top + 1e-6), Math.ceil(view.bottom - 1e-6)];
      const columns = [Math.floor(view.left + 1e-6), Math.ceil(view.right - 1e-6)];
      const everything = rows[0] <= 0 && rows[1] >= Q && columns[0] <= 0 && columns[1] >= K;
      return everything ? { rows: null, columns: null } : { rows, columns };
    },
  };
}
