"""Scripts that `browser.py` runs in the page."""

CONTRASTS = """
const channel = (c) => (c <= 10 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const found = rgb(getComputedStyle(node).backgroundColor);
    if (found.length < 4 || found[3] === 1) return found;
  }
  return [255, 255, 255];
};
const worst = [21, ""];
for (const node of document.querySelectorAll("main *, header *")) {
  const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
  if (!own || !node.getClientRects().length || node.disabled || node.tagName === "OPTION") continue;
  const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < worst[0]) {
    worst[0] = ratio;
    worst[1] = node.className + ": " + node.textContent.slice(0, 40);
  }
}
return worst;
"""
"""The lowest contrast of a text to what is behind it, and where."""

INERT = """
const [texts, done] = arguments;
import("/page/markdown.js").then(({ markdown }) => {
  const bad = [];
  const longest = [0, ""];
  const safe = new Set(("A BLOCKQUOTE BUTTON CODE DIV EM FIGCAPTION FIGURE H3 H4 H5 H6 HR LI OL P"
    + " PRE S STRONG TABLE TBODY TD TH THEAD TR UL").split(" "));
  const names = new Set("class href rel start tabindex target title type".split(" "));
  for (const text of texts) {
    const began = performance.now();
    const box = document.createElement("div");
    box.append(...markdown(text));
    document.body.append(box);
    const took = performance.now() - began;
    if (took > longest[0]) { longest[0] = took; longest[1] = text.slice(0, 40); }
    for (const node of box.querySelectorAll("*")) {
      if (!safe.has(node.tagName)) bad.push([node.tagName, text]);
      for (const each of node.attributes) if (!names.has(each.name)) bad.push([each.name, text]);
      if (node.tagName === "A" && !/^https?:$/.test(node.protocol)) bad.push([node.href, text]);
      if (node.tagName === "A" && !node.rel.includes("noopener")) bad.push(["rel", text]);
    }
    box.remove();
  }
  setTimeout(() => done([bad.slice(0, 5), longest, window.hacked ?? null]), 200);
}, (error) => done([[String(error)], [0, ""], null]));
"""
"""Shows texts as the page does, and looks for elements and attributes that it never makes."""

FRAMES = """
const [seconds, done] = arguments;
const gaps = [];
let last = performance.now();
const end = last + 1000 * seconds;
const tick = (now) => {
  gaps.push(now - last);
  last = now;
  if (now < end) requestAnimationFrame(tick);
  else {
    gaps.sort((a, b) => a - b);
    done([gaps.length / seconds, gaps[Math.floor(0.95 * gaps.length)], gaps.at(-1)]);
  }
};
requestAnimationFrame(tick);
"""
"""Frames per second, and the 95th percentile and the longest of the times between frames, in ms."""

PAINTED = """
const canvas = document.querySelectorAll(arguments[0])[arguments[1]];
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const seen = new Set();
for (let at = 0; at < data.length; at += 4) {
  seen.add((data[at] << 16) + (data[at + 1] << 8) + data[at + 2]);
}
return seen.size;
"""
"""The number of colours of a canvas."""

FOREIGN = """
const files = performance.getEntriesByType("resource");
return files.filter((each) => !each.name.startsWith(location.origin)).length;
"""
"""The number of files that came from another host."""

TOOLS = (
    '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",'
    ' "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],'
    ' "additionalProperties": false}}}]'
)
"""A tool that a model may call."""

REQUIRE_TOOLS = """
window.plainFetch = window.fetch;
window.fetch = (path, options) => {
  const body = JSON.parse(options?.body ?? "{}");
  if (body.tools) options.body = JSON.stringify({ ...body, tool_choice: "required" });
  return window.plainFetch(path, options);
};
"""
"""Makes the server require a call of a tool, since a small model makes none by itself."""

LEFT_OPEN = """
const [hours, done] = arguments;
import("/page/live.js").then(({ Live }) => {
  const live = new Live();
  const sizes = [];
  const perHour = 3600 * 4;
  const held = { total_bytes: 100, useful_bytes: 50, free_bytes: 50 };
  for (let at = 0; at < hours * perHour; at += 1) {
    const now_s = at / 4;
    const requests = Array.from({ length: 16 }, (_, each) => ({
      request_id: `cmpl-${Math.floor(at / 8)}-${each}`, branch: 0, slot: each + 1,
      arrival_s: now_s - 1, state: at % 5 ? "decoding" : "preempted", num_output_tokens: at,
    }));
    const events = Array.from({ length: 25 }, (_, each) => ({
      event: "step", step_id: 25 * at + each, ended_s: now_s + each / 100, elapsed_s: 0.01,
    }));
    if (at % 8 === 0) {
      events.push(...requests.map((each) => ({ ...each, event: "end", ended_s: now_s })));
    }
    const stats = { num_blocks: 512, utilization: {}, at };
    const change = { name: "", state: "ready", answers: true, now_s, stats, requests, events };
    live.take({ engines: [{ ...change, memory: { ...held } }] });
    if (at % perHour === perHour / 4) sizes.push(performance.memory.usedJSHeapSize);
  }
  globalThis.gc?.();
  sizes.push(performance.memory.usedJSHeapSize);
  const { steps, ended, samples, preempted } = live.engine;
  done([sizes, steps.length + ended.length + samples.length + preempted.size]);
}, (error) => done([[0, Infinity], String(error)]));
"""
"""Feeds the page what a server sends in hours. Gives the heap's bytes, and the kept items."""
