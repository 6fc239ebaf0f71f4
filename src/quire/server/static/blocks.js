// The block map: a canvas with a square for each block of the pool.

import { ownerColor, mixed, parts } from "./colors.js";
import { Picture, card, color, el, fill, percent } from "./dom.js";
import { RECORD_BYTES } from "./live.js";
import { short } from "./names.js";

const HAS_CONTENT = 1;
const HELD = 2;
const MAX_CELL = 28;
const MIN_CELL = 3;
const SHAPE = 0.62; // height of the map by its width
const MAX_HEIGHT = 560;

export class BlockMap {
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.engine = null;
    this.lit = null;
    this.cursor = null;
    this.picture = new Picture("Map of the KV cache's blocks", 120, (...area) => this.draw(...area), (x, y) => this.describe(x, y));
    this.node = this.picture.canvas;
    this.node.addEventListener("click", (event) => this.click(event.offsetX, event.offsetY));
    this.node.addEventListener("keydown", (event) => this.move(event));
    this.status = el("span", { class: "note", role: "status" });
    this.legend = el("div", { class: "legend" });
  }

  show(engine) {
    this.engine = engine;
    this.showLegend();
    this.picture.paint();
  }

  highlight(blocks) {
    this.lit = blocks;
    this.picture.paint();
  }

  colorOf(slot) {
    return slot ? mixed(ownerColor(slot), parts(color("panel")), 1) : color("flight");
  }

  showLegend() {
    const blocks = this.engine?.blocks;
    if (!blocks) { fill(this.legend, el("span", { class: "empty" }, "Waiting for the engine's answer.")); return; }
    const counts = { held: 0, cached: 0, free: 0, shared: 0 };
    const { records } = blocks;
    for (let at = 0; at < records.length; at += RECORD_BYTES) {
      if (records[at] & HELD) counts.held += 1;
      else if (records[at] & HAS_CONTENT) counts.cached += 1;
      else counts.free += 1;
      if (records[at + 1] > 1) counts.shared += 1;
    }
    const entries = [["held", "held"], ["cached", "cached"], ["free", "free"], ["shared", "shared"]];
    fill(this.legend, entries.map(([name, text]) =>
      el("span", {}, el("i", { class: `swatch ${name}` }), `${text} `, el("b", {}, counts[name].toLocaleString("en")))),
    el("span", { class: "note" }, `${blocks.num_blocks.toLocaleString("en")} blocks of ${blocks.block_size} tokens`), this.status);
  }

  /** The size of a cell and the number of columns for a width. */
  layout(width) {
    const count = this.engine.blocks.num_blocks;
    const fitting = Math.floor(Math.sqrt(width * Math.min(MAX_HEIGHT, SHAPE * width) / count));
    const cell = Math.max(MIN_CELL, Math.min(MAX_CELL, fitting));
    const columns = Math.max(1, Math.floor(width / cell));
    return { cell, columns, rows: Math.ceil(count / columns), count };
  }

  draw(context, width) {
    if (!this.engine?.blocks) return;
    const { cell, columns, rows, count } = this.layout(width);
    if (rows * cell !== this.picture.height) {
      this.picture.setHeight(rows * cell);
      this.picture.paint();
      return;
    }
    const { records } = this.engine.blocks;
    const gap = cell >= 6 ? 1 : cell >= 4 ? 0.5 : 0;
    const theme = { panel: parts(color("panel")), cached: parts(color("cached")), free: color("free"), flight: color("flight"),
      text: color("text") };
    for (let block = 0; block < count; block += 1) {
      const at = block * RECORD_BYTES;
      const [x, y] = [(block % columns) * cell, Math.floor(block / columns) * cell];
      const dim = this.lit !== null && !this.lit.has(block);
      context.globalAlpha = dim ? 0.22 : 1;
      context.fillStyle = fillOf(records, at, theme);
      context.fillRect(x, y, cell - gap, cell - gap);
      if (cell >= 8 && records[at] & HELD && records[at + 3] < 255) {
        context.fillStyle = theme.free; // the slots without a token yet
        const empty = (cell - gap) * (1 - records[at + 3] / 255);
        context.globalAlpha *= 0.55;
        context.fillRect(x, y, cell - gap, empty);
      }
      if (records[at + 1] > 1) {
        context.globalAlpha = dim ? 0.22 : 1;
        context.strokeStyle = theme.text;
        context.lineWidth = cell >= 8 ? 1.5 : 1;
        context.strokeRect(x + 0.75, y + 0.75, cell - gap - 1.5, cell - gap - 1.5);
      }
    }
    context.globalAlpha = 1;
    if (this.cursor !== null) {
      context.strokeStyle = color("accent");
      context.lineWidth = 2;
      context.strokeRect((this.cursor % columns) * cell - 1, Math.floor(this.cursor / columns) * cell - 1, cell + 1, cell + 1);
    }
  }

  blockAt(x, y) {
    if (!this.engine?.blocks) return null;
    const { cell, columns, count } = this.layout(this.node.clientWidth);
    const column = Math.floor(x / cell);
    const block = Math.floor(y / cell) * columns + column;
    return column < columns && block >= 0 && block < count ? block : null;
  }

  describe(x, y) {
    const block = this.blockAt(x, y);
    return block === null ? null : card(`Block ${block}`, this.facts(block));
  }

  facts(block) {
    const { blocks, requests, now } = this.engine;
    const { records } = blocks;
    const at = block * RECORD_BYTES;
    const slot = records[at + 4] + 256 * records[at + 5];
    const owner = requests.find((each) => each.slot === slot);
    const kind = records[at + 6] ? blocks.kinds[records[at + 6] - 1] : null;
    const state = records[at] & HELD ? "held" : records[at] & HAS_CONTENT ? "cached" : "free";
    return {
      state, request: slot ? short(blocks.owners[slot] ?? "?") : null, tenant: owner?.tenant || null,
      doing: owner?.state, "request's age": owner ? `${(now - owner.arrival_s).toFixed(1)} s` : null,
      holders: records[at + 1] || null, "used again": records[at] & HAS_CONTENT ? `${records[at + 2]} times` : null,
      filled: state === "free" ? null : percent(records[at + 3] / 255), kind: blocks.kinds.length > 1 ? kind : null,
    };
  }

  click(x, y) {
    const block = this.blockAt(x, y);
    if (block !== null) this.choose(block);
  }

  choose(block) {
    const at = block * RECORD_BYTES;
    const slot = this.engine.blocks.records[at + 4] + 256 * this.engine.blocks.records[at + 5];
    const request = this.engine.blocks.owners[slot];
    if (request) this.onSelect(request);
  }

  /** Arrow keys walk over the blocks, Enter lights up a block's request. */
  move(event) {
    if (!this.engine?.blocks) return;
    const { columns, count } = this.layout(this.node.clientWidth);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    if (event.key === "Enter" && this.cursor !== null) this.choose(this.cursor);
    else if (event.key in steps) {
      this.cursor = Math.max(0, Math.min(count - 1, (this.cursor ?? -1) + (this.cursor === null ? 1 : steps[event.key])));
      const facts = Object.entries(this.facts(this.cursor)).filter(([, value]) => value !== null && value !== undefined);
      this.status.textContent = `Block ${this.cursor}: ${facts.map(([name, value]) => `${name} ${value}`).join(", ")}`;
      this.picture.paint();
    } else return;
    event.preventDefault();
  }
}

function fillOf(records, at, theme) {
  const heat = Math.min(1, Math.log2(1 + records[at + 2]) / 5);
  if (records[at] & HELD) {
    const slot = records[at + 4] + 256 * records[at + 5];
    if (!slot) return theme.flight;
    return mixed(ownerColor(slot), theme.panel, 0.72 + 0.28 * heat);
  }
  return records[at] & HAS_CONTENT ? mixed(theme.cached, theme.panel, 0.3 + 0.7 * heat) : theme.free;
}
