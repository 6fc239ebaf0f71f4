// This browser's storage for the page, which the reader may have blocked or filled.

/** The text that was kept under a name; null if there is none. */
export function recall(name) {
  try { return localStorage.getItem(name); } catch { return null; } // blocked
}

/** Keep a text under a name. Returns whether there was room. */
export function remember(name, text) {
  try { localStorage.setItem(name, text); } catch { return false; } // blocked, or full
  return true;
}
