// The view Playground: conversations, answers side by side, forks and beams.

import { Chats } from "./chats.js";
import { byId, el, fill, number, seconds } from "./dom.js";
import { chatBody, completionBody, generate, idsOf, searchBeams, textOfTokens } from "./generate.js";
import { markdown } from "./markdown.js";
import { Pictures, sentPictures } from "./pictures.js";
import { Settings } from "./settings.js";
import { TokenView } from "./tokens.js";
import { treeNode } from "./tree.js";

const CHAT = "/v1/chat/completions";
const COMPLETION = "/v1/completions";
const PAINT_MS = 80;
const EXAMPLES = ["What does os.path.join do?", "Write a function that reverses a list.", "def fibonacci(n):"];

export class Playground {
  constructor(root) {
    this.chats = new Chats();
    this.chat = this.chats.all[0] ?? this.chats.add("chat");
    this.stopper = null;
    this.open = new Map(); // message -> "tokens" or "tree"
    this.shown = new Map(); // message -> {node, paint} of its last drawing
    this.settings = new Settings((mode) => this.setMode(mode));
    this.list = el("ul", { class: "chats" });
    this.log = el("div", { class: "log", role: "log", "aria-label": "Conversation", "aria-live": "off" });
    this.input = el("textarea", { id: "prompt", rows: "2", "aria-label": "Message", placeholder: "Write a message. Enter sends it, Shift+Enter makes a line.",
      onkeydown: (event) => this.onKey(event), oninput: () => this.fitInput() });
    this.send = el("button", { type: "submit", class: "primary" }, "Send");
    this.stop = el("button", { type: "button", class: "stop", hidden: true, onclick: () => this.stopper?.abort() }, "Stop");
    this.status = el("p", { class: "note status", role: "status" });
    const form = el("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.submit(); } });
    this.pictures = new Pictures(form, this.input, (sentence) => { this.status.textContent = sentence; });
    fill(form, this.pictures.strip, this.input, this.pictures.chooser,
      el("div", { class: "row" }, this.pictures.button, this.status, this.stop, this.send));
    const side = el("aside", { class: "side", id: "chat-list", "aria-label": "Conversations" },
      el("button", { type: "button", class: "primary", onclick: () => this.start() }, "New"), this.list,
      el("p", { class: "note" }, "Kept in this browser only."));
    const toggles = el("div", { class: "toggles" }, toggle("Conversations", root, "with-list"), toggle("Parameters", root, "with-settings"));
    fill(root, el("div", { class: "play" }, toggles, side, el("div", { class: "middle" }, this.log, form),
      el("aside", { class: "side", id: "parameters", "aria-label": "Parameters" }, this.settings.node)));
    this.settings.system.addEventListener("input", () => { this.chat.system = this.settings.system.value; this.chats.save(); });
    this.show(this.chat);
  }

  /** The name of the chosen model; "" before the server has told any. */
  get model() { return this.settings.model.value; }

  setModels(models) { this.settings.setModels(models); }

  start(mode = this.chat.mode) {
    const empty = this.chats.all.find((each) => each.mode === mode && !each.leaf);
    this.show(empty ?? this.chats.add(mode));
    this.input.focus();
  }

  setMode(mode) {
    if (!this.chat.leaf) { this.chat.mode = mode; this.show(this.chat); } else this.start(mode);
  }

  show(chat) {
    this.chat = chat;
    this.settings.setMode(chat.mode);
    this.pictures.setMode(chat.mode);
    this.settings.system.value = chat.system;
    this.input.placeholder = chat.mode === "chat" ? "Write a message. Enter sends it, Shift+Enter makes a line."
      : "Write a text that the model continues.";
    this.render();
    this.log.scrollTop = this.log.scrollHeight;
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    }
  }

  fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 260)}px`;
  }

  submit() {
    const text = this.input.value;
    if (!text.trim() || this.stopper) return;
    const settings = this.read();
    if (!settings) return;
    this.input.value = "";
    this.fitInput();
    const question = this.chat.add("user", this.chat.mode === "chat" ? this.chat.leaf : null, { text, ...withImages(this.pictures.take()) });
    this.answer(question, settings);
  }

  read() {
    try { return this.settings.read(); } catch { byId("parameters").scrollIntoView({ block: "nearest" }); return null; }
  }

  /** Ask for the answers to a message. */
  answer(question, settings = this.read()) {
    if (!settings || this.stopper) return;
    const group = `${question.id}/${Date.now()}`;
    const answers = Array.from({ length: settings.n }, () =>
      this.chat.add("assistant", question.id, { group, tokens: [], running: true, kind: settings.beams ? "beam" : "answer" }));
    this.chat.leaf = answers[0].id;
    const isChat = this.chat.mode === "chat";
    const body = isChat ? chatBody(this.chat, question.id, settings) : completionBody(question.text, settings);
    if (settings.beams) for (const each of answers) this.open.set(each.id, "tree");
    this.run((settings.beams ? searchBeams : generate), isChat ? CHAT : COMPLETION, body, answers);
  }

  /** Continue an answer's first `at` tokens in a new branch, with an alternative as the next token if given. */
  async fork(message, at, other) {
    const settings = this.read();
    const { chat } = this;
    if (!settings || this.stopper) return;
    const kept = message.tokens.slice(0, at);
    let start;
    try {
      const ids = other === null ? [] : await idsOf(other, settings.model);
      if (other !== null && !ids.length) { this.status.textContent = "The server has no token for this text."; return; }
      ids.forEach((id, index) => kept.push({ id, text: index ? "" : other[0] }));
      start = await textOfTokens(kept, settings.model);
    } catch (error) { this.status.textContent = error.message; return; }
    if (this.stopper || chat !== this.chat) return; // another answer began meanwhile
    const branch = chat.add("assistant", message.parent, { text: start, tokens: kept.map((token) => ({ ...token })), running: true,
      kind: "fork", from: message.id, at, promptIds: message.promptIds, group: `fork/${Date.now()}` });
    this.open.set(branch.id, this.open.get(message.id) === "tokens" ? "tokens" : "tree");
    const prompt = [...message.promptIds, ...kept.map((token) => token.id)];
    const body = completionBody(prompt, { ...settings, n: 1 });
    await this.run(generate, COMPLETION, body, [branch]);
  }

  async run(work, path, body, answers) {
    this.stopper = new AbortController();
    this.send.hidden = true;
    this.stop.hidden = false;
    this.status.textContent = "The model answers.";
    this.chats.save(); // so that a reload keeps the question
    this.render();
    let last = 0;
    let timer = null;
    const paint = () => {
      last = performance.now();
      timer = null;
      for (const each of answers) this.shown.get(each.id)?.paint();
      this.follow();
    };
    await work(path, body, answers, this.stopper.signal, () => {
      timer ??= setTimeout(paint, Math.max(0, PAINT_MS - (performance.now() - last)));
    });
    clearTimeout(timer);
    this.stopper = null;
    this.send.hidden = false;
    this.stop.hidden = true;
    this.status.textContent = answers.some((each) => each.error) ? "The call failed." : "";
    this.chats.save();
    this.render();
  }

  /** Keep the newest text in sight if the reader is at the end. */
  follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 140) this.log.scrollTop = scrollHeight;
  }

  render() {
    this.shown.clear();
    this.renderList();
    const path = this.chat.path();
    const drawn = [];
    for (const message of path) {
      const group = message.role === "assistant" ? this.chat.siblings(message).filter((each) => each.group === message.group) : [];
      const isTree = this.open.get(message.id) === "tree"; // which has all answers by itself
      drawn.push(group.length > 1 && !isTree ? this.sideBySide(group, message) : this.article(message));
    }
    if (!path.length) drawn.push(this.welcome());
    const last = path.at(-1);
    if (last?.calls?.length && !last.running) drawn.push(this.toolForm(last));
    const top = this.log.scrollTop;
    const isAtEnd = this.log.scrollHeight - top - this.log.clientHeight < 140;
    fill(this.log, drawn);
    this.log.scrollTop = isAtEnd ? this.log.scrollHeight : top;
  }

  renderList() {
    fill(this.list, this.chats.all.map((chat) => el("li", {},
      el("button", { type: "button", class: "chat", "aria-current": chat === this.chat ? "true" : null, onclick: () => this.show(chat) }, chat.title),
      el("button", { type: "button", class: "quiet remove", "aria-label": `Delete ${chat.title}`, onclick: () => this.remove(chat) }, "×"))));
  }

  remove(chat) {
    if (this.stopper && chat === this.chat) this.stopper.abort();
    this.chats.remove(chat);
    this.show(this.chats.all[0] ?? this.chats.add("chat"));
  }

  welcome() {
    return el("div", { class: "welcome" }, el("h1", {}, this.chat.mode === "chat" ? "Ask the model" : "Let the model continue"),
      el("p", {}, "Answers stream in with their speed. Choose any token of an answer to fork it there: the branches share their memory."),
      el("div", { class: "row" }, EXAMPLES.map((text) => el("button", { type: "button", class: "quiet", onclick: () => {
        this.input.value = text;
        this.fitInput();
        this.input.focus();
      } }, text))));
  }

  sideBySide(group, current) {
    return el("div", { class: "beside" }, group.map((each) => {
      const node = this.article(each);
      node.classList.toggle("current", each === current);
      return node;
    }));
  }

  article(message) {
    if (message.role === "user") return this.question(message);
    if (message.role === "tool") return el("article", { class: "message tool" }, el("header", {}, "Result of the tool"), el("pre", {}, message.text));
    const body = el("div", { class: "body" });
    const foot = el("footer", {});
    const node = el("article", { class: "message assistant", "aria-busy": String(!!message.running) }, this.head(message), body, foot);
    const state = { node, view: null };
    state.paint = () => { this.paintAnswer(message, body, state); fill(foot, this.numbers(message)); };
    state.paint();
    this.shown.set(message.id, state);
    return node;
  }

  question(message) {
    return el("article", { class: "message user" }, el("header", {}, this.chat.mode === "chat" ? "You" : "Text", this.branches(message)),
      sentPictures(message), el("div", { class: "text" }, message.text), el("footer", {},
        el("button", { type: "button", class: "quiet", onclick: (event) => this.edit(message, event.target.closest("article")) }, "Edit"),
        el("button", { type: "button", class: "quiet", onclick: () => this.answer(message) }, "Answer again")));
  }

  edit(message, article) {
    const input = el("textarea", { rows: "3", "aria-label": "Edited message" });
    input.value = message.text;
    fill(article, input, el("div", { class: "row" },
      el("button", { type: "button", class: "quiet", onclick: () => this.render() }, "Cancel"),
      el("button", { type: "button", class: "primary", onclick: () => {
        if (!input.value.trim() || this.stopper) return;
        this.answer(this.chat.add("user", message.parent, { text: input.value, ...withImages(message.images ?? []) }));
      } }, "Send")));
    input.focus();
  }

  /** The name of an answer, its place among others, and how it is shown. */
  head(message) {
    const kinds = { answer: "Answer", fork: `Fork at token ${(message.at ?? 0) + 1}`, beam: "Beam" };
    const siblings = this.chat.siblings(message).filter((each) => each.tokens?.length || each === message);
    const hasTexts = message.running || message.tokens?.some((token) => token.text !== undefined); // beams have ids alone
    const views = [["text", "Text"], ...(hasTexts ? [["tokens", "Tokens"]] : []), ...(siblings.length > 1 ? [["tree", "Tree"]] : [])];
    const shown = this.open.get(message.id) ?? "text";
    return el("header", {}, el("span", {}, `${kinds[message.kind] ?? "Answer"}`), this.branches(message),
      el("span", { class: "views", role: "group", "aria-label": "Shown as" }, views.map(([name, text]) =>
        el("button", { type: "button", class: "quiet", "aria-pressed": String(name === shown), onclick: () => {
          this.open.set(message.id, name);
          this.render();
        } }, text))));
  }

  /** Steps through the messages that stand in one place. */
  branches(message) {
    const all = this.chat.siblings(message);
    if (all.length < 2) return null;
    const at = all.indexOf(message);
    const step = (by, text, sign) => el("button", { type: "button", class: "quiet", "aria-label": text, disabled: !all[at + by],
      onclick: () => { this.chat.select(all[at + by]); this.chats.save(); this.render(); } }, sign);
    return el("span", { class: "branches" }, step(-1, "The one before", "‹"), `${at + 1} of ${all.length}`, step(1, "The next one", "›"));
  }

  paintAnswer(message, body, state) {
    const shown = this.open.get(message.id) ?? "text";
    if (message.error) { fill(body, this.texts(message), el("p", { class: "error" }, message.error)); return; }
    if (shown === "tokens") {
      if (!state.view) {
        const isForkable = (message.promptIds || message.running) && !this.chat.path(message.id).some((each) => each.pictures);
        const onFork = isForkable ? (at, text) => this.fork(message, at, text) : null;
        state.view = new TokenView(message, onFork);
        fill(body, state.view.node, state.view.info);
      }
      state.view.update();
    } else if (shown === "tree") {
      const answers = this.chat.siblings(message);
      fill(body, treeNode(answers, message.id, (each) => answers.indexOf(each) + 1, (each) => {
        this.open.set(each.id, "tree");
        this.chat.select(each);
        this.render();
      }, this.settings.model.value));
    } else fill(body, this.texts(message));
  }

  texts(message) {
    const parts = [];
    if (message.reasoning) {
      parts.push(el("details", { class: "reasoning", open: !message.text }, el("summary", {}, "Reasoning"), markdown(message.reasoning)));
    }
    if (this.chat.mode === "completion") parts.push(el("pre", { class: "raw" }, message.text));
    else parts.push(...markdown(message.text));
    for (const call of message.calls ?? []) {
      parts.push(el("figure", { class: "code" }, el("figcaption", {}, `calls ${call.function.name}`), el("pre", {}, el("code", {}, call.function.arguments))));
    }
    if (message.running) parts.push(el("span", { class: "caret", "aria-hidden": "true" }));
    return parts;
  }

  numbers(message) {
    const { stats } = message;
    if (!stats || stats.first === null) return [el("span", {}, message.running ? "waiting" : message.finish ?? "")];
    const rate = stats.last > stats.first ? 1000 * (stats.tokens - 1) / (stats.last - stats.first) : null;
    const cached = stats.prompt === undefined ? null : `${number(stats.cached)} of ${number(stats.prompt)} prompt tokens cached`;
    return [`${number(stats.tokens)} tokens`, rate ? `${number(rate)} tokens/s` : null,
      `first after ${seconds((stats.first - stats.sent) / 1000)}`, cached, message.running ? null : finishText(message.finish)]
      .filter(Boolean).map((text) => el("span", {}, text));
  }

  /** Fields for the results of an answer's tool calls. */
  toolForm(message) {
    const inputs = message.calls.map((call) => [call, el("textarea", { rows: "2", "aria-label": `Result of ${call.function.name}` })]);
    return el("form", { class: "message tool", onsubmit: (event) => {
      event.preventDefault();
      let last = message;
      for (const [call, input] of inputs) last = this.chat.add("tool", last.id, { text: input.value, call: call.id });
      this.answer(last);
    } }, inputs.map(([call, input]) => el("label", {}, `Result of ${call.function.name}`, input)),
    el("button", { class: "primary" }, "Send results"));
  }
}

/** The fields of a message that has these pictures. */
function withImages(urls) {
  return urls.length ? { images: urls, pictures: urls.length } : {};
}

function finishText(reason) {
  return { stop: "ended by itself", length: "cut at max tokens", stopped: "stopped", tool_calls: "calls tools" }[reason] ?? reason;
}

function toggle(text, root, name) {
  return el("button", { type: "button", class: "quiet", "aria-expanded": "false", onclick: (event) => {
    event.target.setAttribute("aria-expanded", String(root.classList.toggle(name)));
  } }, text);
}
