// The parameters of a call, as a form. Their values are kept in localStorage.

import { el, showOptions } from "./dom.js";
import { recall, remember } from "./storage.js";

const STORE = "quire-settings";

const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.05, ""], ["top_p", "Top p", 0.01, 1, 0.01, ""], ["min_p", "Min p", 0, 1, 0.01, ""],
  ["max_tokens", "Max tokens", 1, 1000000, 1, "512"], ["n", "Answers (n)", 1, 16, 1, "1"], ["seed", "Seed", 0, 2 ** 31, 1, ""],
];

/** A number that the server's default stands for if it is empty. */
function numberField([name, text, min, max, step, value], saved) {
  const input = el("input", { type: "number", id: `set-${name}`, name, min: String(min), max: String(max), step: String(step),
    placeholder: "default", inputmode: "decimal" });
  input.value = saved[name] ?? value;
  return el("label", { for: `set-${name}` }, text, input);
}

export class Settings {
  constructor(onMode) {
    let saved = {};
    try { saved = JSON.parse(recall(STORE) ?? "{}"); } catch { /* unreadable */ }
    this.model = el("select", { id: "set-model", name: "model" });
    this.mode = el("select", { id: "set-mode", name: "mode", onchange: () => onMode(this.mode.value) },
      el("option", { value: "chat" }, "Chat"), el("option", { value: "completion" }, "Completion"));
    this.system = el("textarea", { id: "set-system", name: "system", rows: "2", placeholder: "none" });
    this.stop = el("textarea", { id: "set-stop", name: "stop", rows: "2", placeholder: "one in each line" });
    this.tools = el("textarea", { id: "set-tools", name: "tools", rows: "4", spellcheck: false,
      placeholder: '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]' });
    this.schema = el("textarea", { id: "set-schema", name: "schema", rows: "4", spellcheck: false,
      placeholder: '{"type": "object", "properties": {…}}' });
    this.beams = el("input", { type: "checkbox", id: "set-beams", name: "beams" });
    this.logprobs = el("input", { type: "checkbox", id: "set-logprobs", name: "logprobs" });
    for (const name of ["stop", "tools", "schema"]) this[name].value = saved[name] ?? "";
    this.beams.checked = saved.beams ?? false;
    this.logprobs.checked = saved.logprobs ?? true;
    this.onlyChat = [
      el("label", { for: "set-system" }, "System message", this.system),
      el("details", {}, el("summary", {}, "Tools and schema"), el("label", { for: "set-tools" }, "Tools (JSON)", this.tools),
        el("label", { for: "set-schema" }, "JSON schema of the answer", this.schema)),
    ];
    this.error = el("p", { class: "error", role: "alert" });
    this.node = el("form", { class: "settings", "aria-label": "Parameters", onchange: () => this.save(), onsubmit: (event) => event.preventDefault() },
      el("label", { for: "set-model" }, "Model", this.model), el("label", { for: "set-mode" }, "Kind", this.mode),
      el("div", { class: "pairs" }, NUMBERS.map((each) => numberField(each, saved))),
      el("label", { class: "check", for: "set-logprobs" }, this.logprobs, "Token probabilities"),
      el("label", { class: "check", for: "set-beams" }, this.beams, "Beam search of width n"),
      el("label", { for: "set-stop" }, "Stop at", this.stop), this.onlyChat, this.error);
  }

  setModels(models) {
    const chosen = this.model.value;
    const names = models.map((each) => [each.id, each.state ? `${each.id} (${each.state})` : each.id]);
    showOptions(this.model, names);
    if (models.some((each) => each.id === chosen)) this.model.value = chosen;
  }

  setMode(mode) {
    this.mode.value = mode;
    for (const node of this.onlyChat) node.hidden = mode !== "chat";
  }

  save() {
    const found = { stop: this.stop.value, tools: this.tools.value, schema: this.schema.value, beams: this.beams.checked,
      logprobs: this.logprobs.checked };
    for (const [name] of NUMBERS) found[name] = this.node.elements[name].value;
    remember(STORE, JSON.stringify(found));
  }

  /** The values for a call. Throws Error with a sentence if a field does not hold JSON. */
  read() {
    this.error.textContent = "";
    const found = { model: this.model.value, logprobs: this.logprobs.checked, beams: this.beams.checked, n: 1 };
    for (const [name, text] of NUMBERS) {
      const input = this.node.elements[name];
      if (input.value === "") continue;
      if (!input.checkValidity()) return this.refuse(`${text} must be from ${input.min} to ${input.max}.`);
      found[name] = Number(input.value);
    }
    found.stop = this.stop.value.split("\n").filter((line) => line);
    for (const name of ["tools", "schema"]) {
      if (!this[name].value.trim() || this.mode.value !== "chat") continue;
      try { found[name] = JSON.parse(this[name].value); } catch { return this.refuse(`The field ${name} is no JSON.`); }
    }
    if (found.beams) for (const name of ["top_p", "min_p", "seed", "tools", "schema"]) delete found[name];
    return found;
  }

  refuse(text) {
    this.error.textContent = text;
    throw new Error(text);
  }
}
