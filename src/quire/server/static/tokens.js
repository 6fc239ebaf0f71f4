// An answer as single tokens: coloured by probability, with the alternatives of each, and forks.

import { el, fill, percent } from "./dom.js";

/** The tokens of an answer. `onFork(at, other)` forks before token `at`, to go on with an alternative if given. */
export class TokenView {
  constructor(message, onFork) {
    this.message = message;
    this.onFork = onFork;
    this.at = 0;
    this.count = 0;
    this.node = el("div", { class: "tokens", role: "group", "aria-label": "Tokens of the answer; Enter forks at one",
      onkeydown: (event) => this.move(event), onclick: (event) => this.click(event),
      onpointerover: (event) => this.hover(event), onpointerleave: () => this.describe(null) });
    this.info = el("div", { class: "token-info", "aria-live": "polite" });
    this.hint = el("span", { class: "note" }, "Point at a token for its probability; choose one to fork the answer there.");
    fill(this.info, this.hint);
    this.update();
  }

  update() {
    const tokens = this.message.tokens ?? [];
    for (; this.count < tokens.length; this.count += 1) {
      const token = tokens[this.count];
      const text = token.text ?? "";
      const level = token.p === undefined ? "none" : String(Math.min(4, Math.floor(token.p * 5)));
      this.node.append(el("span", { class: text.trim() ? "token" : "token blank", role: "button", tabindex: this.count ? "-1" : "0",
        dataset: { at: String(this.count), level } }, visible(text)));
    }
  }

  hover(event) {
    const at = event.target.dataset?.at;
    if (at !== undefined && !this.chosen) this.describe(Number(at));
  }

  click(event) {
    const at = event.target.dataset?.at;
    if (at !== undefined) this.choose(Number(at));
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) this.focus(this.at + step);
    else if (event.key === "Enter" || event.key === " ") this.choose(this.at);
    else if (event.key === "Escape") { this.chosen = false; this.describe(null); }
    else return;
    event.preventDefault();
  }

  focus(at) {
    const next = this.node.children[at];
    if (!next) return;
    this.node.children[this.at].tabIndex = -1;
    this.at = at;
    next.tabIndex = 0;
    next.focus();
    if (!this.chosen) this.describe(at);
  }

  choose(at) {
    this.at = at;
    this.chosen = true;
    this.describe(at, true);
    this.info.querySelector("button")?.focus();
  }

  describe(at, withForks = false) {
    for (const node of this.node.querySelectorAll(".chosen")) node.classList.remove("chosen");
    if (at === null) {
      if (!this.chosen) fill(this.info, this.hint);
      return;
    }
    const token = this.message.tokens[at];
    this.node.children[at]?.classList.add("chosen");
    const title = el("span", {}, el("code", {}, visible(token.text ?? `#${token.id}`)),
      ` token ${at + 1}${token.p === undefined ? "" : `, probability ${percent(token.p)}`}`);
    const others = (token.top ?? []).map((each) => withForks && this.onFork
      ? el("button", { type: "button", class: "quiet", onclick: () => this.onFork(at, isSame(each, token) ? null : each) },
        el("code", {}, visible(each[0])), ` ${percent(each[1])}`)
      : el("span", { class: "other" }, el("code", {}, visible(each[0])), ` ${percent(each[1])}`));
    const fork = withForks && this.onFork
      ? el("button", { type: "button", class: "primary", onclick: () => this.onFork(at, null) }, "Fork before it") : null;
    const close = withForks ? el("button", { type: "button", class: "quiet", "aria-label": "Close",
      onclick: () => { this.chosen = false; this.describe(null); this.node.children[at]?.focus(); } }, "×") : null;
    fill(this.info, title, fork, others, close);
  }
}

/** Whether an alternative [text, probability, id] is the token itself. */
const isSame = ([text, , id], token) => (id === undefined ? text === token.text : id === token.id);

/** A token's text with signs for white space. */
function visible(text) {
  return text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥") || "·";
}
