// Requests as bars on a time axis: waiting, prompt, answer, preempted.

import { Picture, card, color, el, number, seconds } from "./dom.js";
import { short } from "./names.js";

const WINDOW_S = 30;
const MAX_ROWS = 400;
const HEIGHT = 300;
const PHASES = [["queued", "waiting"], ["prompt", "prompt"], ["decode", "answer"], ["preempted", "preempted"]];

export class RequestBars {
  constructor(live) {
    this.live = live;
    this.frozenAt = null;
    this.picture = new Picture("Requests of the last thirty seconds", HEIGHT, (...area) => this.draw(...area),
      (x, y) => this.describe(x, y));
    this.node = this.picture.canvas;
    this.legend = el("div", { class: "legend" }, PHASES.map(([name, text]) =>
      el("span", {}, el("i", { class: `swatch ${name}` }), text)));
  }

  paint() { this.picture.paint(); }

  /** The requests in the window, the newest first, and the height of a row. */
  rows() {
    const { engine } = this.live;
    const end = this.frozenAt ?? engine.time();
    const ended = engine.ended.filter((each) => each.ended_s > end - WINDOW_S && each.arrival_s < end);
    const found = [...engine.requests.filter((each) => each.arrival_s < end), ...ended]
      .sort((a, b) => b.arrival_s - a.arrival_s || a.branch - b.branch).slice(0, MAX_ROWS);
    return { end, found, tall: Math.max(0.5, Math.min(14, (HEIGHT - 18) / Math.max(1, found.length))) };
  }

  draw(context, width, height) {
    if (!this.live.engine) return;
    const { end, found, tall } = this.rows();
    const x = (time) => width * Math.max(0, 1 - (end - time) / WINDOW_S);
    found.forEach((request, at) => {
      const y = at * tall;
      for (const [name, begin, until] of phases(request, end, this.live.engine)) {
        context.fillStyle = color(name);
        context.fillRect(x(begin), y, Math.max(1, x(until) - x(begin)), Math.max(0.5, tall - (tall > 3 ? 1 : 0)));
      }
    });
    context.fillStyle = color("soft");
    for (let ago = 5; ago < WINDOW_S; ago += 5) context.fillText(`-${ago} s`, x(end - ago) - 12, height - 4);
    if (!found.length) context.fillText("No request in the last thirty seconds.", 12, height / 2);
  }

  describe(x, y) {
    if (!this.live.engine) return null;
    const { end, found, tall } = this.rows();
    const request = found[Math.floor(y / tall)];
    if (!request) return null;
    const first = request.first_token_s;
    const until = request.ended_s ?? end;
    const rate = first !== null && until > first ? (request.num_output_tokens - 1) / (until - first) : null;
    return card(short(request.request_id) + (request.branch ? ` branch ${request.branch}` : ""), {
      state: request.finish_reason ?? request.state, tenant: request.tenant || null, "prompt tokens": number(request.num_prompt_tokens),
      cached: number(request.num_cached_tokens), "tokens so far": number(request.num_output_tokens),
      waited: request.first_scheduled_s === null ? null : seconds(request.first_scheduled_s - request.arrival_s),
      "first token after": first === null ? null : seconds(first - request.arrival_s),
      speed: rate > 0 ? `${number(rate)} tokens/s` : null, preemptions: request.num_preemptions || null,
    });
  }
}

/** A request's phases as [name, begin, end], the preempted ones last so that they are drawn on top. */
function phases(request, end, engine) {
  const until = request.ended_s ?? end;
  const scheduled = request.first_scheduled_s ?? until;
  const first = request.first_token_s ?? until;
  const preempted = engine.preempted.get(`${request.request_id}/${request.branch}`) ?? [];
  return [["queued", request.arrival_s, scheduled], ["prompt", scheduled, first], ["decode", first, until],
    ...preempted.map((span) => ["preempted", span.begin, span.end ?? until])].filter(([, begin, to]) => to > begin);
}
