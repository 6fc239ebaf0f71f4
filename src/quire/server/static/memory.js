// The view Memory: the block map, the ledger over time, tiers, the prefix tree and missed prefixes.

import { ask } from "./api.js";
import { BlockMap } from "./blocks.js";
import { short } from "./names.js";
import { Picture, bytes, card, color, el, fill, number, panel, percent, seconds, showTip, table } from "./dom.js";

const LEDGER_S = 120;
const USES = ["useful", "unfilled", "unused", "reserved", "in_flight", "moving", "cached", "free"];
const MEANING = {
  useful: "keys and values of tokens", unfilled: "slots in started blocks without a token yet",
  unused: "parts of blocks that the model does not need", reserved: "taken for tokens that will come",
  in_flight: "read by steps that run", moving: "on the way to or from a tier",
  cached: "free, but a prompt may find its content", free: "without content",
};
const REASONS = {
  none: "All of it was cached but the last token.", not_asked: "The call wanted its prompt computed.",
  passed: "It was cached without the state or window that the next token needs.",
  not_loaded: "It lies in another tier, from which loading does not pay.",
  evicted: "It was cached until another request needed the block.",
  differs: "Other tokens follow the found part.", below_block: "The rest is shorter than a block.",
  never_seen: "It was never cached, or so long ago that it is forgotten.",
};

export class MemoryView {
  constructor(root, live) {
    this.live = live;
    this.selected = null;
    this.tables = null;
    this.blocks = new BlockMap((request) => this.select(request));
    this.ledger = new Picture("The memory's uses in the last two minutes", 150,
      (...area) => this.drawLedger(...area), (x) => this.describeLedger(x));
    this.parts = el("ul", { class: "legend wide" });
    this.owners = el("div", { class: "owners", role: "group", "aria-label": "Requests that hold blocks" });
    this.buttons = new Map(); // request -> its button
    this.more = el("span", { class: "note" });
    fill(this.owners, this.more);
    this.note = el("p", { class: "note selected", role: "status" });
    this.tree = el("div", { class: "icicle", role: "list", "aria-label": "Cached prefixes" });
    this.treeNote = el("p", { class: "note" });
    this.tiers = el("div");
    this.misses = el("div");
    fill(root, el("div", { class: "grid memory" },
      el("div", { class: "column" },
        panel("Blocks", "Each square is a block. Its colour is the request that holds it, its brightness how often its "
          + "content was used again. Outlined blocks are shared.", this.blocks.legend, this.blocks.node, this.note, this.owners),
        panel("Missed prefixes", "Why the cache did not have more of a prompt.", this.misses)),
      el("div", { class: "column" },
        panel("Ledger", "Every byte of the KV cache, over two minutes.", this.ledger.canvas, this.parts),
        panel("Cached prefixes", "Runs of cached blocks, from the beginning of prompts downwards. The wider, the more prompt "
          + "tokens it has saved.", this.tree, this.treeNote),
        panel("Tiers", "Copies of cached blocks outside the KV cache.", this.tiers))));
  }

  /** Light up the table of a request; null for none. */
  select(request) {
    this.selected = request === this.selected ? null : request;
    this.tables = null;
    this.blocks.highlight(null);
    this.fetchTable();
    this.update();
  }

  async fetchTable() {
    const { engine } = this.live;
    const request = this.selected;
    if (request === null) this.describeSelected();
    if (request === null || !engine) return;
    const replica = engine.name ? `&replica=${encodeURIComponent(engine.name)}` : "";
    try {
      const found = await ask(`/stats/table?request_id=${encodeURIComponent(request)}${replica}${this.live.query}`);
      if (request !== this.selected) return;
      this.tables = found.branches;
      this.blocks.highlight(found.branches.length ? new Set(found.branches.flatMap((branch) => branch.groups.flat())) : null);
    } catch { return; } // the engine does not answer; the next update asks again
    this.describeSelected();
  }

  update() {
    const { engine } = this.live;
    if (!engine) return;
    this.blocks.show(engine);
    this.ledger.paint();
    this.showParts(engine);
    this.showOwners(engine);
    this.showTree(engine.prefixes);
    this.showMisses(engine);
    this.showTiers(engine.stats?.tiers ?? {});
    if (this.selected !== null && performance.now() - (this.fetchedAt ?? 0) > 500) {
      this.fetchedAt = performance.now();
      this.fetchTable();
    }
  }

  describeSelected() {
    const branches = this.tables;
    if (this.selected === null) { this.note.textContent = ""; return; }
    if (!branches?.length) {
      this.note.textContent = `${this.selected} has ended and holds no block.`;
      this.selected = null;
      return;
    }
    const count = new Set(branches.flatMap((branch) => branch.groups.flat()).filter((block) => block >= 0)).size;
    const entries = branches.flatMap((branch) => branch.groups.flat()).filter((block) => block >= 0).length;
    const shared = entries > count ? ` ${entries - count} of ${entries} table entries share a block with another branch.` : "";
    this.note.textContent = `${this.selected}: ${count} blocks, ${branches.length} `
      + `${branches.length === 1 ? "branch" : "branches"}, ${branches[0].num_tokens} tokens in the first.${shared}`;
  }

  showOwners(engine) {
    const byRequest = new Map();
    for (const request of engine.requests) {
      const known = byRequest.get(request.request_id) ?? { ...request, blocks: 0, count: 0 };
      known.blocks += request.num_blocks;
      known.count += 1;
      byRequest.set(request.request_id, known);
    }
    const holding = [...byRequest.values()].filter((each) => each.blocks).slice(0, 60);
    const wanted = new Set(holding.map((each) => each.request_id));
    for (const [id, button] of this.buttons) {
      if (!wanted.has(id)) { button.remove(); this.buttons.delete(id); }
    }
    // Buttons stay in their places: a button that is replaced or moved while it is pressed gets no click.
    for (const each of holding) {
      const id = each.request_id;
      if (!this.buttons.has(id)) {
        const button = el("button", { type: "button", class: "owner", title: id, onclick: () => this.select(id) },
          el("i", { class: "swatch" }), short(id), el("small"));
        this.buttons.set(id, button);
        this.more.before(button);
      }
      const button = this.buttons.get(id);
      button.setAttribute("aria-pressed", String(id === this.selected));
      button.querySelector("i").style.background = this.blocks.colorOf(each.slot);
      button.querySelector("small").textContent = String(each.blocks);
    }
    this.more.textContent = byRequest.size > holding.length && holding.length === 60 ? `and ${byRequest.size - 60} more` : "";
  }

  showParts(engine) {
    const { memory } = engine;
    if (!memory) return;
    fill(this.parts, USES.filter((name) => memory[`${name}_bytes`]).map((name) => {
      const swatch = el("i", { class: "swatch" });
      swatch.style.background = color(`use-${name}`);
      return el("li", { title: MEANING[name] }, swatch, name.replace("_", " "), el("b", {}, bytes(memory[`${name}_bytes`])));
    }), el("li", {}, "saved by sharing", el("b", {}, bytes(memory.saved_bytes))));
  }

  samples() {
    const { engine } = this.live;
    const end = engine.time();
    return { end, found: engine.samples.filter((each) => each.memory && end - each.time <= LEDGER_S) };
  }

  drawLedger(context, width, height) {
    if (!this.live.engine) return;
    const { end, found } = this.samples();
    const x = (time) => width * (1 - (end - time) / LEDGER_S);
    let below = found.map(() => 0);
    for (const name of USES) {
      const upper = found.map((each, at) => below[at] + each.memory[`${name}_bytes`] / each.memory.total_bytes);
      context.fillStyle = color(`use-${name}`);
      context.beginPath();
      found.forEach((each, at) => context.lineTo(x(each.time), height * (1 - upper[at])));
      if (found.length) context.lineTo(width, height * (1 - upper.at(-1)));
      if (found.length) context.lineTo(width, height * (1 - below.at(-1)));
      for (let at = found.length - 1; at >= 0; at -= 1) context.lineTo(x(found[at].time), height * (1 - below[at]));
      context.fill();
      below = upper;
    }
    context.fillStyle = color("soft");
    for (let ago = 30; ago < LEDGER_S; ago += 30) context.fillText(`-${ago} s`, x(end - ago) - 12, height - 4);
  }

  describeLedger(x) {
    if (!this.live.engine) return null;
    const { end, found } = this.samples();
    const time = end - LEDGER_S * (1 - x / this.ledger.canvas.clientWidth);
    const at = found.reduce((best, each) =>
      (best === null || Math.abs(each.time - time) < Math.abs(best.time - time) ? each : best), null);
    if (!at) return null;
    return card(`${Math.max(0, end - at.time).toFixed(0)} s ago`, Object.fromEntries(
      USES.filter((name) => at.memory[`${name}_bytes`]).map((name) => [name.replace("_", " "),
        `${bytes(at.memory[`${name}_bytes`])} (${percent(at.memory[`${name}_bytes`] / at.memory.total_bytes)})`])));
  }

  showTree(nodes) {
    const total = nodes.filter((node) => node.parent < 0).reduce((sum, node) => sum + node.num_saved_below, 0);
    const drawn = JSON.stringify(nodes);
    if (drawn === this.drawnTree) return;
    this.drawnTree = drawn;
    this.tree.hidden = !total;
    this.treeNote.textContent = total ? `${number(total)} prompt tokens saved by what is cached now.`
      : nodes.length ? `${nodes.length} cached prefixes; none has been used again yet.` : "Nothing is cached yet.";
    if (!total) return;
    const places = [];
    const used = new Map([[-1, 0]]);
    fill(this.tree, nodes.map((node, at) => {
      const parent = places[node.parent];
      const left = used.get(node.parent) ?? parent?.left ?? 0;
      const width = node.num_saved_below / total;
      used.set(node.parent, left + width);
      places[at] = { left, depth: parent ? parent.depth + 1 : 0 };
      if (!width) return null;
      return this.treeNode(node, places[at], width);
    }));
    const depth = Math.max(...places.map((place) => place.depth)) + 1;
    this.tree.style.height = `${Math.min(depth, 12) * 24}px`;
  }

  treeNode(node, place, width) {
    const text = `${number(node.num_tokens)} tokens`;
    const fits = width * this.tree.parentElement.clientWidth > 68;
    const item = el("div", { class: place.depth % 2 ? "run odd" : "run", role: "listitem", tabindex: "0" }, fits ? text : "");
    item.style.left = `${100 * place.left}%`;
    item.style.width = `calc(${100 * width}% - 1px)`;
    item.style.top = `${place.depth * 24}px`;
    const values = {
      tokens: number(node.num_tokens), blocks: node.num_blocks, "saved by it": number(node.num_saved_tokens),
      "with what follows": number(node.num_saved_below),
    };
    item.setAttribute("aria-label", `${text}, ${number(node.num_saved_below)} saved`);
    item.addEventListener("pointermove", (event) => showTip(card(`Prefix ${node.name}`, values), event.clientX, event.clientY));
    item.addEventListener("pointerleave", () => showTip(null));
    return item;
  }

  showMisses(engine) {
    const counts = Object.entries(engine.stats?.prefix_misses ?? {}).sort((a, b) => b[1] - a[1]);
    const most = Math.max(1, ...counts.map(([, count]) => count));
    const recent = [...engine.ended.filter((each) => each.branch === 0).slice(-400), ...engine.requests.filter((each) => each.branch === 0)]
      .filter((each) => each.miss).slice(-8).reverse();
    const mark = JSON.stringify([counts, recent.map((each) => each.request_id + each.state)]);
    if (mark === this.drawnMisses) return;
    this.drawnMisses = mark;
    fill(this.misses, counts.length ? el("ul", { class: "bars" }, counts.map(([reason, count]) => {
      const bar = el("i", {});
      bar.style.width = `${100 * count / most}%`;
      return el("li", { title: REASONS[reason] }, el("span", {}, reason.replaceAll("_", " ")), bar, el("b", {}, number(count)));
    })) : null,
    table(["Request", "#Prompt", "#Cached", "Why no more"], recent.map((each) => [
      el("code", { title: each.request_id }, short(each.request_id)), number(each.num_prompt_tokens),
      number(each.miss.num_found_tokens), missText(each.miss, engine.now)]), "No request has looked for a prefix yet."));
  }

  showTiers(tiers) {
    const names = Object.entries(tiers.by_tier ?? {});
    const mark = JSON.stringify(tiers);
    if (mark === this.drawnTiers) return;
    this.drawnTiers = mark;
    if (!names.length) { fill(this.tiers, el("p", { class: "empty" }, "This server has no tiers (--cache-dir adds one).")); return; }
    const totals = Object.entries(tiers).filter(([, value]) => typeof value === "number");
    fill(this.tiers, el("dl", { class: "facts" }, totals.flatMap(([name, value]) => [
      el("dt", {}, words(name)), el("dd", {}, shown(name, value))])),
    names.map(([name, values]) => el("div", {}, el("h3", {}, name), el("dl", { class: "facts" },
      Object.entries(values).filter(([, value]) => typeof value === "number").flatMap(([each, value]) => [
        el("dt", {}, words(each)), el("dd", {}, shown(each, value))])))));
  }
}

const words = (name) => name === "bytes_per_s" ? "speed" : name.replace(/^num_/, "").replace(/_(bytes|s)$/, "").replaceAll("_", " ");

function shown(name, value) {
  if (name === "bytes_per_s") return `${bytes(value)}/s`;
  if (name.endsWith("_bytes")) return bytes(value);
  return name.endsWith("_s") ? seconds(value) : number(value);
}

function missText(miss, now) {
  const text = REASONS[miss.reason] ?? miss.reason;
  if (!miss.evicted_by) return text;
  return `${text} (${short(miss.evicted_by)}, ${Math.max(0, now - miss.evicted_s).toFixed(0)} s ago)`;
}
