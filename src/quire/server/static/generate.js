// Asks the server for answers, and fills messages with their text, tokens and times.

import { ask, stream } from "./api.js";

const NUM_ALTERNATIVES = 5;
const ID = "token_id:"; // before a token's id in a chat's probabilities
const BYTES = "bytes:"; // before the bytes of a part of a character, in those of a completion

/** The body's fields that chat and completion have in common. */
function common(settings) {
  const fields = {
    model: settings.model || undefined, temperature: settings.temperature, top_p: settings.top_p, min_p: settings.min_p,
    max_tokens: settings.max_tokens, seed: settings.seed, return_token_ids: true,
    stop: settings.stop?.length ? settings.stop : undefined,
  };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined && value !== null));
}

/** The body of a chat up to a message. */
export function chatBody(chat, leaf, settings) {
  const body = { ...common(settings), messages: chat.asMessages(leaf), n: settings.n };
  if (settings.tools) body.tools = settings.tools;
  if (settings.schema) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: settings.schema, strict: true } };
  }
  if (settings.logprobs && !settings.beams) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES, return_tokens_as_token_ids: true });
  return body;
}

/** The body of a completion of a text, or of token ids. */
export function completionBody(prompt, settings) {
  const body = { ...common(settings), prompt, n: settings.n };
  if (settings.logprobs && !settings.beams) Object.assign(body, { logprobs: NUM_ALTERNATIVES, return_tokens_as_token_ids: false });
  return body;
}

/** Stream the answers of one call into these messages, one for each choice. */
export async function generate(path, body, messages, signal, onChange) {
  const began = performance.now();
  for (const message of messages) message.stats = { sent: began, tokens: 0, first: null, last: null };
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  try {
    for await (const chunk of stream(path, request, signal)) {
      if (chunk.usage) noteUsage(chunk.usage, messages);
      for (const choice of chunk.choices) {
        const message = messages[choice.index];
        if (chunk.prompt_token_ids) message.promptIds ??= chunk.prompt_token_ids;
        if (choice.prompt_token_ids) message.promptIds ??= choice.prompt_token_ids;
        takeChoice(choice, message);
      }
      onChange();
    }
  } catch (error) {
    for (const message of messages) {
      if (signal.aborted) message.finish ??= "stopped";
      else if (!message.finish) message.error = error.message;
    }
  }
  for (const message of messages) {
    delete message.running;
    message.finish ??= "ended";
  }
  onChange();
}

/** A beam search's answers, which come at its end. */
export async function searchBeams(path, body, messages, signal, onChange) {
  const began = performance.now();
  try {
    const answer = await ask(path, { ...body, use_beam_search: true }, signal);
    for (const choice of answer.choices) {
      const message = messages[choice.index];
      message.text = choice.text ?? choice.message.content ?? "";
      message.promptIds = answer.prompt_token_ids ?? choice.prompt_token_ids;
      message.tokens = (choice.token_ids ?? []).map((id) => ({ id }));
      message.finish = choice.finish_reason;
      message.stats = { sent: began, tokens: message.tokens.length, first: performance.now(), last: performance.now() };
    }
    noteUsage(answer.usage, messages);
  } catch (error) {
    for (const message of messages) message.error = signal.aborted ? "stopped" : error.message;
  }
  for (const message of messages) delete message.running;
  onChange();
}

function noteUsage(usage, messages) {
  for (const message of messages) {
    message.stats.prompt = usage.prompt_tokens;
    message.stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
}

function takeChoice(choice, message) {
  const delta = choice.delta ?? { content: choice.text };
  message.text += delta.content ?? "";
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  for (const part of delta.tool_calls ?? []) takeCall(message, part);
  const ids = choice.token_ids ?? [];
  if (ids.length) {
    const now = performance.now();
    message.stats.first ??= now;
    message.stats.last = now;
    message.stats.tokens += ids.length;
    addTokens(message, ids, choice.logprobs, delta.content ?? "");
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function takeCall(message, part) {
  message.calls ??= [];
  const known = message.calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } };
  if (part.id) known.id = part.id;
  known.function.name += part.function?.name ?? "";
  known.function.arguments += part.function?.arguments ?? "";
}

/** Add tokens with their texts and, where they were asked for, their probabilities. */
function addTokens(message, ids, logprobs, text) {
  message.tokens ??= [];
  const chat = logprobs?.content;
  ids.forEach((id, at) => {
    const token = { id };
    if (chat?.[at]) {
      token.text = decoded(chat[at].bytes);
      token.p = probability(chat[at].logprob);
      token.top = chat[at].top_logprobs.map((each) => [decoded(each.bytes), probability(each.logprob), Number(each.token.slice(ID.length))]);
    } else if (logprobs?.tokens) {
      token.text = logprobs.tokens[at];
      token.p = probability(logprobs.token_logprobs[at]);
      token.top = Object.entries(logprobs.top_logprobs?.[at] ?? {}).map(([name, value]) => [name, probability(value)])
        .sort((a, b) => b[1] - a[1]).slice(0, NUM_ALTERNATIVES);
    } else if (ids.length === 1) token.text = text;
    message.tokens.push(token);
  });
}

/** A token's text; parts of characters become signs for unknown ones. */
const decoded = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));

const isWhole = (text) => text !== undefined && !text.startsWith(BYTES) && !text.includes("\ufffd");

const probability = (logprob) => Math.round(1e4 * Math.exp(logprob)) / 1e4;

/** The ids of an alternative [text, probability, id], of which completions give no id; none if its text has none. */
export async function idsOf([text, , id], model) {
  if (Number.isInteger(id)) return [id];
  if (!isWhole(text)) return [];
  return (await ask("/tokenize", { model: model || undefined, prompt: text, add_special_tokens: false })).tokens;
}

/** The text of an answer's tokens, which the server knows where single tokens are parts of characters. */
export async function textOfTokens(tokens, model) {
  if (tokens.every((token) => isWhole(token.text))) return tokens.map((token) => token.text).join("");
  return textOf(tokens.map((token) => token.id), model);
}

export async function textOf(ids, model) {
  return (await ask("/detokenize", { model: model || undefined, tokens: ids })).prompt;
}
