// Shows a model's Markdown as DOM nodes. It makes elements and text nodes only, never HTML from text,
// so no text can become a script, an attribute or a request. Links lead to http and https alone, and
// pictures become links. Searches for an end of a mark are bounded by MAX_INLINE.

import { el } from "./dom.js";

const MAX_NESTING = 6;
const MAX_INLINE = 20000; // characters of a paragraph that are searched for marks
const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]{0,30})/;
const HEADING = /^(#{1,6})[ \t]+(.*)$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,60}$/;
const SAFE_LINK = /^https?:\/\/[^\s"'<>\\]{1,2000}$/i;

/** The nodes of a text. `nesting` is how many quotes and lists are around it. */
export function markdown(text, nesting = 0) {
  const lines = text.replaceAll("\r", "").split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, nesting);
    if (node) found.push(node);
    at = next;
  }
  return found;
}

/** The block that begins at a line, and the number of the line after it. */
function block(lines, at, nesting) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [el(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2])), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (nesting < MAX_NESTING && line.startsWith(">")) return quote(lines, at, nesting);
  if (nesting < MAX_NESTING && ITEM.test(line)) return list(lines, at, nesting);
  if (isTable(lines, at)) return tableOf(lines, at);
  return paragraph(lines, at);
}

function code(lines, at, [, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !lines[end].trimStart().startsWith(mark)) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const copy = el("button", { type: "button", class: "quiet copy", onclick: () => navigator.clipboard?.writeText(text) }, "Copy");
  return [el("figure", { class: "code" }, el("figcaption", {}, language || "text", copy),
    el("pre", { tabindex: "0" }, el("code", {}, text))), end + 1];
}

function quote(lines, at, nesting) {
  let end = at;
  while (end < lines.length && lines[end].startsWith(">")) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^> ?/, "")).join("\n");
  return [el("blockquote", {}, markdown(inner, nesting + 1)), end];
}

function list(lines, at, nesting) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered) break;
    const inner = [item[3]];
    end += 1;
    // Lines that are indented further, and lines without a mark, belong to the item.
    while (end < lines.length && lines[end].trim() && (isDeeper(lines[end], indent.length) || !startsBlock(lines[end]))) {
      inner.push(lines[end].replace(/^\s{1,4}/, ""));
      end += 1;
    }
    items.push(el("li", {}, markdown(inner.join("\n"), nesting + 1)));
    if (end + 1 < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1])) end += 1;
  }
  const start = isOrdered ? { start: String(parseInt(mark, 10)) } : {};
  return [el(isOrdered ? "ol" : "ul", start, items), end];
}

const isDeeper = (line, indent) => line.length - line.trimStart().length > indent + 1;

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || RULE.test(line) || line.startsWith(">");
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].length < 500
    && lines[at + 1].includes("-") && /^[\s|:-]+$/.test(lines[at + 1]) && lines[at + 1].includes("|");
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").slice(0, 30).map((cell) => cell.trim());

function tableOf(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map((line) => el("tr", {}, cells(line).map((cell) => el("td", {}, inline(cell)))));
  const head = el("tr", {}, cells(lines[at]).map((cell) => el("th", {}, inline(cell))));
  return [el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))), end];
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]) && !isTable(lines, end)) end += 1;
  return [el("p", {}, inline(lines.slice(at, end).join("\n"))), end];
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];

/** The nodes of a paragraph's text. `depth` is the number of marks around it. */
export function inline(whole, depth = 0) {
  const text = whole.slice(0, MAX_INLINE);
  const found = [];
  let plain = "";
  let at = 0;
  const end = text.length;
  const flush = () => { if (plain) found.push(document.createTextNode(plain)); plain = ""; };
  const missing = new Set(); // marks that have no end in the rest of the text
  while (at < end) {
    const node = depth < MAX_NESTING ? marked(text, at, depth, missing) : null;
    if (node) {
      flush();
      found.push(node.node);
      at = node.next;
    } else {
      if (text[at] === "\\" && at + 1 < end && /[!-/:-@[-`{-~]/.test(text[at + 1])) at += 1;
      plain += text[at];
      at += 1;
    }
  }
  plain += whole.slice(end);
  flush();
  return found;
}

/** The element that begins at a place, and the place after it; null for plain text. */
function marked(text, at, depth, missing) {
  const first = text[at];
  if (first === "`") return span(text, at, missing);
  if (first === "[" || (first === "!" && text[at + 1] === "[")) return link(text, at, missing);
  if (first === "h" && (text.startsWith("http://", at) || text.startsWith("https://", at))) return bareLink(text, at);
  if (!"*_~".includes(first)) return null;
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || missing.has(mark)) continue;
    const begin = at + mark.length;
    if (/\s/.test(text[begin] ?? " ")) continue;
    if (first === "_" && /\w/.test(text[at - 1] ?? " ")) continue; // inside of a_name
    const end = text.indexOf(mark, begin + 1);
    if (end < 0) { missing.add(mark); continue; }
    if (/\s/.test(text[end - 1]) || end - begin > 2000) continue;
    return { node: el(tag, {}, inline(text.slice(begin, end), depth + 1)), next: end + mark.length };
  }
  return null;
}

function span(text, at, missing) {
  const mark = text.startsWith("``", at) ? "``" : "`";
  if (missing.has(mark)) return null;
  const end = text.indexOf(mark, at + mark.length);
  if (end < 0) { missing.add(mark); return null; }
  return { node: el("code", {}, text.slice(at + mark.length, end)), next: end + mark.length };
}

function link(text, at, missing) {
  if (missing.has("](")) return null;
  const begin = text.indexOf("[", at) + 1;
  const middle = text.indexOf("](", begin);
  if (middle < 0) { missing.add("]("); return null; }
  if (middle - begin > 500) return null;
  const end = text.indexOf(")", middle);
  if (end < 0 || end - middle > 2000) return null;
  const [target] = text.slice(middle + 2, end).trim().split(/\s/);
  const label = text.slice(begin, middle) || target;
  return { node: anchor(target, text[at] === "!" ? `picture: ${label}` : label), next: end + 1 };
}

function bareLink(text, at) {
  const [target] = /^[^\s<>"'`)\]]{1,2000}/.exec(text.slice(at, at + 2000)) ?? [""];
  return target.length > 8 ? { node: anchor(target, target), next: at + target.length } : null;
}

/** A link to http or https; other targets stay text. */
function anchor(target, label) {
  if (!SAFE_LINK.test(target) || !URL.canParse(target)) return document.createTextNode(`${label} (${target})`);
  return el("a", { href: target, rel: "noopener noreferrer nofollow", target: "_blank", title: target }, label);
}
