// The view Steps: a waterfall of steps, requests as bars, latencies, shares, replicas, tenants and models.

import { Picture, bytes, card, color, el, fill, number, panel, percent, seconds, table } from "./dom.js";
import { RequestBars } from "./requests.js";

const WINDOW_S = 10;
const LANE = 22;

export class StepsView {
  constructor(root, live) {
    this.live = live;
    this.frozenAt = null;
    this.waterfall = new Picture("The steps of the last ten seconds", 260,
      (...area) => this.drawSteps(...area), (x) => this.describeStep(x));
    this.bars = new RequestBars(live);
    this.tiles = el("div", { class: "tiles" });
    this.first = new Picture("Times to the first token", 130, (...area) => this.drawHistogram("time_to_first_token_s", ...area));
    this.between = new Picture("Times between tokens", 130, (...area) => this.drawHistogram("inter_token_s", ...area));
    this.firstNote = el("p", { class: "note" });
    this.betweenNote = el("p", { class: "note" });
    this.replicas = el("div");
    this.tenants = el("div");
    this.models = el("div");
    this.modelsPanel = panel("Models", null, this.models);
    this.modelsPanel.classList.add("models");
    this.pause = el("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.freeze() }, "Pause");
    const legend = el("div", { class: "legend" }, [
      ["prompt", "prompt tokens"], ["decode", "decoded tokens"], ["draft", "drafts: accepted"], ["rejected", "rejected"],
      ["duration", "duration"], ["floor", "floor: the machine's limit"], ["preempted", "preemption"], ["evicted", "eviction"],
    ].map(([name, text]) => el("span", {}, el("i", { class: `swatch ${name}` }), text)), this.pause);
    fill(root, this.tiles, el("div", { class: "grid steps" },
      panel("Steps", "Above: the tokens of each step. Below: how long it took, with the time that the machine needs at least.",
        legend, this.waterfall.canvas),
      panel("Requests", "Waiting, computing their prompt, answering, preempted. The newest are on top.", this.bars.legend, this.bars.node),
      panel("Time to first token", null, this.first.canvas, this.firstNote),
      panel("Time between tokens", null, this.between.canvas, this.betweenNote),
      panel("Engines", null, this.replicas), panel("Tenants", null, this.tenants), this.modelsPanel));
  }

  freeze() {
    this.frozenAt = this.frozenAt === null ? this.live.engine?.time() ?? null : null;
    this.bars.frozenAt = this.frozenAt;
    this.pause.setAttribute("aria-pressed", String(this.frozenAt !== null));
    this.pause.textContent = this.frozenAt === null ? "Pause" : "Go on";
    this.update();
  }

  update() {
    const { engine, server } = this.live;
    if (server) this.showModels(server);
    if (!engine || !server) return;
    this.waterfall.paint();
    this.bars.paint();
    this.first.paint();
    this.between.paint();
    this.firstNote.textContent = quantileText(server.time_to_first_token_s);
    this.betweenNote.textContent = quantileText(server.inter_token_s);
    this.showTiles(engine, server);
    this.showReplicas();
    this.showTenants(server.tenants);
  }

  shown() {
    const { engine } = this.live;
    const end = this.frozenAt ?? engine.time();
    return { end, steps: engine.steps.filter((step) => step.ended_s > end - WINDOW_S && step.ended_s - step.elapsed_s < end) };
  }

  drawSteps(context, width, height) {
    if (!this.live.engine) return;
    const { end, steps } = this.shown();
    const x = (time) => width * (1 - (end - time) / WINDOW_S);
    const [top, middle, bottom] = [LANE, Math.round(0.62 * height), height - 16];
    const tokens = Math.max(8, ...steps.map((step) => step.num_prompt_tokens + step.num_decode_tokens));
    const longest = Math.max(0.001, ...steps.map((step) => step.elapsed_s));
    drawFrame(context, width, middle, bottom, tokens, longest);
    for (const step of steps) {
      const left = x(step.ended_s - step.elapsed_s);
      const wide = Math.max(1, x(step.ended_s) - left - (x(step.ended_s) - left > 4 ? 1 : 0));
      const rejected = step.num_drafts - step.num_accepted_drafts;
      const stack = [["prompt", step.num_prompt_tokens], ["decode", step.num_decode_tokens - step.num_drafts],
        ["draft", step.num_accepted_drafts], ["rejected", rejected]];
      let y = middle - 2;
      for (const [name, count] of stack) {
        if (count <= 0) continue;
        const tall = Math.max(1, (middle - top) * count / tokens);
        context.fillStyle = color(name);
        context.fillRect(left, y - tall, wide, tall);
        y -= tall;
      }
      const long = (bottom - middle - 8) * step.elapsed_s / longest;
      context.fillStyle = color("duration");
      context.fillRect(left, bottom - long, wide, long);
      if (step.floor_s > 0) {
        context.fillStyle = color("floor");
        context.fillRect(left, bottom - (bottom - middle - 8) * step.floor_s / longest - 1, Math.max(2, wide), 2);
      }
      drawMarks(context, step, left + wide / 2);
    }
    context.fillStyle = color("soft");
    for (let ago = 2; ago < WINDOW_S; ago += 2) context.fillText(`-${ago} s`, x(end - ago) - 10, height - 3);
    if (!steps.length) context.fillText("No step in the last ten seconds: send a call.", 12, middle / 2);
  }

  describeStep(x) {
    if (!this.live.engine) return null;
    const { end, steps } = this.shown();
    const time = end - WINDOW_S * (1 - x / this.waterfall.canvas.clientWidth);
    const step = steps.find((each) => each.ended_s >= time && each.ended_s - each.elapsed_s <= time + 0.01);
    if (!step) return null;
    return card(`Step ${step.step_id}`, {
      took: seconds(step.elapsed_s), "of it busy": seconds(step.busy_s), floor: step.floor_s ? seconds(step.floor_s) : null,
      rows: step.num_rows, "prompt tokens": step.num_prompt_tokens, "decoded tokens": step.num_decode_tokens,
      drafts: step.num_drafts ? `${step.num_accepted_drafts} of ${step.num_drafts} accepted` : null, waiting: step.num_waiting,
      preemptions: step.num_preemptions || null, evictions: step.num_evictions || null, "held blocks": step.num_held_blocks,
    });
  }

  drawHistogram(name, context, width, height) {
    const histogram = this.live.server?.[name];
    if (!histogram) return;
    const [first, last] = [histogram.counts.findIndex((count) => count), histogram.counts.findLastIndex((count) => count)];
    context.fillStyle = color("soft");
    if (first < 0) { context.fillText("No token yet.", 12, height / 2); return; }
    const [from, to] = [Math.max(0, first - 1), Math.min(histogram.counts.length - 1, last + 1)];
    const most = Math.max(...histogram.counts);
    const wide = width / (to - from + 1);
    for (let at = from; at <= to; at += 1) {
      const tall = (height - 34) * histogram.counts[at] / most;
      context.fillStyle = color("decode");
      context.fillRect((at - from) * wide + 1, height - 18 - tall, wide - 2, Math.max(histogram.counts[at] ? 1.5 : 0, tall));
      context.fillStyle = color("soft");
      const label = seconds(histogram.bounds[at] ?? Infinity).replace("–", "more");
      if (wide > 44 || (at - from) % Math.ceil(44 / wide) === 0) context.fillText(label, (at - from) * wide + 2, height - 5);
    }
  }

  showTiles(engine, server) {
    const { stats } = engine;
    const samples = engine.samples.filter((each) => each.stats);
    if (!samples.length) return;
    const before = samples.find((each) => engine.now - each.time <= 5) ?? samples[0];
    const passed = Math.max(0.001, engine.now - before.time);
    const rate = (name) => (stats[name] - before.stats[name]) / passed;
    const share = stats.num_query_tokens ? stats.num_hit_tokens / stats.num_query_tokens : 0;
    const use = stats.utilization;
    const tiles = [
      ["Generated", `${number(rate("num_generated_tokens"))}/s`, "tokens"],
      ["Computed", `${number(rate("num_computed_tokens"))}/s`, "tokens, with prompts"],
      ["Running", number(stats.num_running), `${number(stats.num_waiting)} waiting`],
      ["KV in use", percent(stats.num_held_blocks / stats.num_blocks), `${number(stats.num_held_blocks)} of ${number(stats.num_blocks)} blocks`],
      ["Prefix hits", percent(share), `${number(stats.num_hit_tokens)} tokens saved`],
      ["Busy", percent(use.busy_share), use.floor_share === undefined ? "of the last seconds" : `at ${percent(use.floor_share)} of the machine's rates`],
      ["Preemptions", number(stats.num_preemptions), `${number(stats.num_recomputed_tokens)} tokens again`],
      ["Drafts", stats.num_drafts ? percent(stats.num_accepted_drafts / stats.num_drafts) : "–", stats.num_drafts ? "accepted" : "none"],
      ["Open calls", number(server.num_open_calls), `${number(server.num_open_generations)} generations`],
    ];
    fill(this.tiles, tiles.map(([title, value, note]) =>
      el("div", { class: "tile" }, el("span", {}, title), el("b", {}, value), el("small", {}, note))));
  }

  showReplicas() {
    const rows = [...this.live.engines.values()].map((each) => [
      each.name || "only engine", el("span", { class: `state ${each.state}` }, each.overview.is_silent ? "silent" : each.state),
      number(each.requests.length), each.overview.num_open === undefined ? "–" : number(each.overview.num_open),
      number(each.overview.num_restarts), number(each.overview.num_requested_restarts ?? 0), String(each.pid ?? "–")]);
    fill(this.replicas, table(["Engine", "State", "#Requests", "#Open", "#Crashes", "#Restarts", "#Process"], rows, "No engine."),
      el("p", { class: "note" }, machineText(this.live.engine.facts)));
  }

  /** All models of a server that has several, in memory or not. */
  showModels({ models = [], models_memory_bytes: budget }) {
    this.modelsPanel.hidden = models.length < 2;
    const rows = models.map((each) => [each.name,
      el("span", { class: `state ${each.state === "loaded" ? "ready" : each.state}` }, each.state),
      bytes(each.memory_bytes), each.needed_bytes === null ? "–" : bytes(each.needed_bytes), number(each.num_calls),
      number(each.num_waiting), number(each.num_loads), each.num_calls ? "now" : seconds(each.unused_s),
      each.error ?? (each.is_pinned ? "pinned" : "")]);
    const used = models.reduce((sum, each) => sum + each.memory_bytes, 0);
    fill(this.models, table(["Model", "State", "#Has", "#Needs", "#Calls", "#Waiting", "#Loads", "#Last use", "Note"], rows, ""),
      el("p", { class: "note" }, `Together they have ${bytes(used)} of ${bytes(budget ?? 0)}.`));
  }

  showTenants(tenants) {
    fill(this.tenants, table(["Tenant", "#Open", "#Answers", "#Prompt tokens", "#Cached", "#Generated"], tenants.map((each) => [
      each.name || "(no keys)", number(each.num_open), number(each.num_generations), number(each.num_prompt_tokens),
      each.num_prompt_tokens ? percent(each.num_cached_tokens / each.num_prompt_tokens) : "–",
      number(each.num_generated_tokens)]), "No call yet."));
  }
}

function machineText(facts) {
  const parts = [facts.architecture, facts.num_parameters ? `${number(facts.num_parameters)} parameters` : null, facts.dtype,
    facts.quantization, facts.kernels ? `kernels ${facts.kernels}` : null, facts.device_name,
    facts.num_threads ? `${facts.num_threads} threads` : null, facts.weight_bytes ? `weights ${bytes(facts.weight_bytes)}` : null];
  return parts.filter(Boolean).join(" · ");
}

function drawFrame(context, width, middle, bottom, tokens, longest) {
  context.fillStyle = color("soft");
  context.fillText(`${number(tokens)} tokens`, 4, LANE + 10);
  context.fillText(seconds(longest), 4, middle + 14);
  context.fillStyle = color("line");
  context.fillRect(0, middle, width, 1);
  context.fillRect(0, bottom, width, 1);
}

function drawMarks(context, step, x) {
  if (step.num_preemptions) {
    context.fillStyle = color("preempted");
    context.beginPath();
    context.moveTo(x - 5, 2); context.lineTo(x + 5, 2); context.lineTo(x, 10);
    context.fill();
  }
  if (step.num_evictions) {
    context.fillStyle = color("evicted");
    context.fillRect(x - 0.75, 12, 1.5, 7);
  }
}

/** The duration below which this share of a histogram's values lies, at a bucket's precision. */
export function quantile(histogram, share) {
  const total = histogram.counts.reduce((sum, count) => sum + count, 0);
  let left = share * total;
  for (let at = 0; at < histogram.counts.length; at += 1) {
    left -= histogram.counts[at];
    if (left <= 0) return histogram.bounds[at] ?? Infinity;
  }
  return Infinity;
}

function quantileText(histogram) {
  const total = histogram.counts.reduce((sum, count) => sum + count, 0);
  if (!total) return "";
  const shares = [[0.5, "half"], [0.9, "90%"], [0.99, "99%"]];
  return `${number(total)} values since the start: ${shares.map(([share, text]) =>
    `${text} within ${seconds(quantile(histogram, share))}`).join(", ")}.`;
}
