// Makes DOM nodes and formats numbers. Texts become text nodes, so no text can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `attributes` may have listeners (`onclick`), `class`, `dataset` and properties. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

/** Gives a select these options, pairs of values and texts, and touches only what has changed. */
export function showOptions(select, options) {
  const isSame = select.options.length === options.length && options.every(([value], at) => select.options[at].value === value);
  if (!isSame) fill(select, options.map(([value, text]) => el("option", { value }, text)));
  else options.forEach(([, text], at) => { if (select.options[at].text !== text) select.options[at].text = text; });
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${at && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
}

export function number(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} B`;
  if (count >= 1e6) return `${(count / 1e6).toFixed(1)} M`;
  if (count >= 1e4) return `${(count / 1e3).toFixed(count < 1e5 ? 1 : 0)} k`;
  return count.toLocaleString("en", { maximumFractionDigits: 1 });
}

export function seconds(time) {
  if (time === null || time === undefined || !Number.isFinite(time)) return "–";
  if (time < 0.001) return `${Math.round(time * 1e6)} µs`;
  if (time < 1) return `${(time * 1e3).toFixed(time < 0.1 ? 1 : 0)} ms`;
  if (time < 100) return `${time.toFixed(time < 10 ? 2 : 1)} s`;
  return time < 5400 ? `${Math.round(time / 60)} min` : `${(time / 3600).toFixed(1)} h`;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;

/** The colour that a CSS variable has now. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A canvas that is drawn with `draw(context, width, height)` in CSS pixels, after each `paint()`. */
export class Picture {
  constructor(label, height, draw, onHover = null) {
    this.canvas = el("canvas", { class: "picture", role: "img", "aria-label": label, tabindex: "0" });
    this.canvas.style.height = `${height}px`;
    this.height = height;
    this.draw = draw;
    this.waits = false;
    new ResizeObserver(() => this.paint()).observe(this.canvas);
    if (onHover) connectHover(this.canvas, onHover);
  }

  setHeight(height) {
    if (height === this.height) return;
    this.height = height;
    this.canvas.style.height = `${height}px`;
  }

  paint() {
    if (this.waits || document.hidden) return;
    this.waits = true;
    requestAnimationFrame(() => {
      this.waits = false;
      const width = this.canvas.clientWidth;
      if (!width) return; // in a hidden view
      const ratio = Math.min(devicePixelRatio || 1, 2);
      const [full, tall] = [Math.round(width * ratio), Math.round(this.height * ratio)];
      if (this.canvas.width !== full || this.canvas.height !== tall) {
        this.canvas.width = full;
        this.canvas.height = tall;
      }
      const context = this.canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, this.height);
      context.font = "11px system-ui, sans-serif";
      this.draw(context, width, this.height);
    });
  }
}

/** Shows what `describe(x, y)` returns beside the pointer; null hides it. */
function connectHover(canvas, describe) {
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    showTip(describe(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => showTip(null));
}

/** Shows nodes near a point of the window, as a card; null hides the card. */
export function showTip(content, x = 0, y = 0) {
  const tip = byId("tip");
  tip.hidden = content === null;
  if (content === null) return;
  fill(tip, content);
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
  const top = y + 14 + height > innerHeight ? y - 14 - height : y + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

/** A card's content: a title, and names with values. Values that are null are left out. */
export function card(title, values) {
  const rows = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  return [
    el("strong", {}, title),
    el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])),
  ].flat();
}

/** A panel with a heading, an explanation and content. */
export function panel(title, note, ...content) {
  const heading = el("h2", {}, title);
  return el("section", { class: "panel", "aria-label": title },
    el("header", {}, heading, note ? el("p", { class: "note" }, note) : null), ...content);
}

/** A table. `columns` are headings, of which those that begin with # are numbers. */
export function table(columns, rows, empty) {
  if (!rows.length) return el("p", { class: "empty" }, empty);
  const isNumber = columns.map((name) => name.startsWith("#"));
  const names = columns.map((name) => name.replace("#", ""));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, names.map((name, at) => el("th", { class: isNumber[at] ? "num" : "" }, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, at) =>
      el("td", { class: isNumber[at] ? "num" : "" }, cell)))))));
}
