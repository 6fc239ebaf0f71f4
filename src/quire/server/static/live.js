// Follows /stats/events, and keeps what the views show: per engine its numbers, requests, steps and
// blocks. Views register with `onUpdate`.

import { stream } from "./api.js";

const MAX_STEPS = 6000;
const MAX_ENDED = 1000;
const MAX_SAMPLES = 600;
export const RECORD_BYTES = 7;

/** The known state of one engine. Times of steps and requests are the engine's own seconds. */
export class Engine {
  constructor(name) {
    this.name = name;
    this.facts = {};
    this.stats = null;
    this.memory = null;
    this.requests = [];
    this.prefixes = [];
    this.steps = [];
    this.ended = [];
    this.samples = []; // of the ledger and the shares, with their time
    this.preempted = new Map(); // request -> intervals that were seen
    this.blocks = null;
    this.now = 0;
    this.heardAt = 0;
  }

  /** The engine's time at this moment of the window. */
  time() { return this.now + (performance.now() - this.heardAt) / 1000; }

  take(change) {
    if (change.now_s !== null && change.now_s < this.now - 1) this.forget();
    Object.assign(this, { state: change.state, pid: change.pid, answers: change.answers, overview: change });
    if (change.facts) this.facts = change.facts;
    if (change.now_s !== null && change.now_s !== this.now) {
      this.now = change.now_s;
      this.heardAt = performance.now();
    }
    for (const part of ["stats", "memory", "requests", "prefixes"]) {
      if (change[part] !== undefined) this[part] = change[part];
    }
    if (change.requests) this.notePreempted();
    if (change.memory || change.stats) this.addSample();
    if (change.blocks) this.takeBlocks(change.blocks);
    for (const event of change.events ?? []) this.takeEvent(event);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    if (this.ended.length > MAX_ENDED) this.ended.splice(0, this.ended.length - MAX_ENDED);
  }

  /** Adds a step or an ended request. A new connection begins with events that may be known. */
  takeEvent(event) {
    if (event.event === "step") {
      if (event.ended_s > (this.steps.at(-1)?.ended_s ?? -1)) this.steps.push(event);
      return;
    }
    const isSame = (each) => each.request_id === event.request_id && each.branch === event.branch;
    const last = this.ended.at(-1)?.ended_s ?? -1;
    if (event.ended_s > last || (event.ended_s === last && !this.ended.some(isSame))) this.ended.push(event);
  }

  /** Drops what a former process of this engine did. Its blocks stay, since the server sends their changes. */
  forget() {
    Object.assign(this, { steps: [], ended: [], samples: [], requests: [] });
    this.preempted.clear();
  }

  notePreempted() {
    const live = new Set();
    for (const request of this.requests) {
      const id = `${request.request_id}/${request.branch}`;
      live.add(id);
      const spans = this.preempted.get(id) ?? [];
      const last = spans.at(-1);
      if (request.state === "preempted") {
        if (!last || last.end !== null) spans.push({ begin: this.now, end: null });
        this.preempted.set(id, spans);
      } else if (last && last.end === null) last.end = this.now;
    }
    if (this.preempted.size > 2 * MAX_ENDED) {
      for (const id of this.preempted.keys()) if (!live.has(id)) this.preempted.delete(id);
    }
  }

  addSample() {
    this.samples.push({ time: this.now, memory: this.memory, stats: this.stats });
    if (this.samples.length > MAX_SAMPLES) this.samples.shift();
  }

  takeBlocks(change) {
    const { records, changed, ...rest } = change;
    if (records !== undefined) this.blocks = { ...rest, records: decode(records) };
    else if (this.blocks) {
      Object.assign(this.blocks, rest);
      const parts = decode(changed);
      const view = new DataView(parts.buffer);
      for (let at = 0; at < parts.length; at += 4 + RECORD_BYTES) {
        const block = view.getUint32(at, true);
        this.blocks.records.set(parts.subarray(at + 4, at + 4 + RECORD_BYTES), block * RECORD_BYTES);
      }
    }
  }
}

function decode(text) {
  const binary = atob(text);
  const found = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at += 1) found[at] = binary.charCodeAt(at);
  return found;
}

/** The connection to the server, and all engines. */
export class Live {
  constructor() {
    this.server = null;
    this.engines = new Map();
    this.chosen = null; // name of the engine that the views show
    this.model = ""; // name of the model that the engines have
    this.state = "closed"; // closed, open, lost, refused
    this.problem = null; // the server's sentence, if it answers with an error
    this.listeners = [];
    this.stop = null;
  }

  onUpdate(listener) { this.listeners.push(listener); }

  /** The engine that the views show; null before the first answer. */
  get engine() {
    return this.engines.get(this.chosen) ?? this.engines.values().next().value ?? null;
  }

  /** Follow these parts of a model's engines from now on; null ends the connection. */
  follow(parts, model) {
    this.stop?.abort();
    this.stop = null;
    if (model !== this.model) this.engines.clear();
    this.model = model;
    if (parts === null) { this.setState("closed"); return; }
    this.stop = new AbortController();
    this.run(parts, this.stop.signal);
  }

  /** The part of a query that names the model. */
  get query() { return this.model ? `&model=${encodeURIComponent(this.model)}` : ""; }

  async run(parts, signal) {
    let pause = 500;
    while (!signal.aborted) {
      try {
        const path = `/stats/events?parts=${parts.join(",")}&interval=0.25${this.query}`;
        for await (const change of stream(path, undefined, signal)) {
          pause = 500;
          this.problem = null;
          this.take(change);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401 || error.status === 403) { this.setState("refused"); return; }
        this.problem = error.status ? error.message : null;
      }
      if (signal.aborted) return;
      this.setState("lost");
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, 5000);
    }
  }

  take(change) {
    const { engines, ...server } = change;
    this.server = server;
    const names = new Set(engines.map((each) => each.name));
    for (const name of this.engines.keys()) if (!names.has(name)) this.engines.delete(name);
    for (const each of engines) {
      if (!this.engines.has(each.name)) this.engines.set(each.name, new Engine(each.name));
      this.engines.get(each.name).take(each);
    }
    this.setState("open");
  }

  setState(state) {
    this.state = state;
    for (const listener of this.listeners) listener(this);
  }
}
