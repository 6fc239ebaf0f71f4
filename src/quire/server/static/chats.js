// Conversations as trees of messages, kept in this browser's localStorage and nowhere else.

import { recall, remember } from "./storage.js";

const STORE = "quire-chats";
const MAX_CHATS = 40;
const MAX_CHARACTERS = 4_000_000;

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

/** One conversation. A message's `parent` is the message before it; `leaf` is the last shown one. */
export class Chat {
  constructor(saved = {}) {
    this.id = saved.id ?? newId();
    this.mode = saved.mode ?? "chat";
    this.system = saved.system ?? "";
    this.messages = saved.messages ?? {};
    this.leaf = saved.leaf ?? null;
    this.at = saved.at ?? Date.now();
  }

  get title() {
    const first = Object.values(this.messages).find((each) => each.role === "user");
    const text = first?.text.trim().split("\n")[0] ?? "";
    return text ? text.slice(0, 60) : this.mode === "chat" ? "New chat" : "New completion";
  }

  /** Add a message behind `parent` and show it. */
  add(role, parent, fields = {}) {
    const message = { id: newId(), parent, role, text: "", ...fields };
    this.messages[message.id] = message;
    this.leaf = message.id;
    this.at = Date.now();
    return message;
  }

  /** The messages from the first to the shown leaf, or to the given one. */
  path(leaf = this.leaf) {
    const found = [];
    for (let each = this.messages[leaf]; each; each = this.messages[each.parent]) found.push(each);
    return found.reverse();
  }

  children(parent) { return Object.values(this.messages).filter((each) => each.parent === parent); }

  siblings(message) { return this.children(message.parent).filter((each) => each.role === message.role); }

  /** Show the branch of a message, down to the last message of its newest continuation. */
  select(message) {
    let last = message;
    for (let next = this.children(last.id).at(-1); next; next = this.children(last.id).at(-1)) last = next;
    this.leaf = last.id;
  }

  /** The messages for the chat endpoint up to a message. */
  asMessages(leaf) {
    const found = this.system.trim() ? [{ role: "system", content: this.system }] : [];
    for (const each of this.path(leaf)) {
      if (each.role === "tool") found.push({ role: "tool", tool_call_id: each.call, content: each.text });
      else if (each.role === "assistant") {
        const calls = each.calls?.length ? { tool_calls: each.calls } : {};
        found.push({ role: "assistant", content: each.text || (each.calls?.length ? null : ""), ...calls });
      } else if (each.images) {
        const images = each.images.map((url) => ({ type: "image_url", image_url: { url } }));
        found.push({ role: "user", content: [...images, { type: "text", text: each.text }] });
      } else found.push({ role: "user", content: each.text });
    }
    return found;
  }
}

/** All conversations, the newest first. */
export class Chats {
  constructor() {
    this.all = [];
    try { this.all = JSON.parse(recall(STORE) ?? "[]").map((each) => new Chat(each)); } catch { /* unreadable */ }
    this.timer = null;
  }

  add(mode) {
    const chat = new Chat({ mode });
    this.all.unshift(chat);
    this.save();
    return chat;
  }

  remove(chat) {
    this.all = this.all.filter((each) => each !== chat);
    this.save();
  }

  /** Write all conversations soon. Those without a message for longest are dropped if there is no room. */
  save() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.all = this.all.sort((a, b) => b.at - a.at).slice(0, MAX_CHATS);
      const used = this.all.filter((each) => Object.keys(each.messages).length);
      let room = MAX_CHARACTERS; // the browser's own bound may be lower
      while (room > 1000 && !remember(STORE, packed(used, room))) room /= 2;
    }, 300);
  }
}

/**
 * Conversations as JSON of at most `room` characters. One that is too long loses its pictures, then its tokens, and at
 * last its place.
 */
function packed(chats, room) {
  const found = [];
  let left = room - 2;
  for (const chat of chats) {
    const text = [[], ["images"], ["images", "top"], ["images", "top", "tokens", "promptIds"]]
      .map((lists) => JSON.stringify(chat, (name, value) =>
        (name === "running" || (lists.includes(name) && Array.isArray(value)) ? undefined : value)))
      .find((each) => each.length < left);
    if (text === undefined) continue;
    found.push(text);
    left -= text.length + 1;
  }
  return `[${found.join(",")}]`;
}
