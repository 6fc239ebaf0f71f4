// The answers to one message as a tree: what they have in common is shown once, as it is stored once.

import { el } from "./dom.js";
import { textOf } from "./generate.js";

/** The runs of tokens that answers share: {tokens, children, answers that end here}. */
export function trie(answers) {
  const root = { tokens: [], children: [], ends: [] };
  for (const answer of answers) insert(root, answer, answer.tokens ?? []);
  return root;
}

function insert(node, answer, tokens) {
  if (!tokens.length) { node.ends.push(answer); return; }
  const child = node.children.find((each) => each.tokens[0].id === tokens[0].id);
  if (!child) { node.children.push({ tokens, children: [], ends: [answer] }); return; }
  let common = 0;
  while (common < child.tokens.length && common < tokens.length && child.tokens[common].id === tokens[common].id) common += 1;
  if (common < child.tokens.length) {
    const rest = { tokens: child.tokens.slice(common), children: child.children, ends: child.ends };
    Object.assign(child, { tokens: child.tokens.slice(0, common), children: [rest], ends: [] });
  }
  insert(child, answer, tokens.slice(common));
}

/** The tree as nested lists. `number` names an answer, `onSelect` shows it. */
export function treeNode(answers, current, number, onSelect, model) {
  const root = trie(answers.filter((each) => each.tokens?.length));
  const all = answers.reduce((sum, each) => sum + (each.tokens?.length ?? 0), 0);
  const kept = countTokens(root);
  const note = kept < all ? `${answers.length} answers of ${all} tokens together, ${all - kept} of which are in common with another answer.`
    : `${answers.length} answers of ${all} tokens together, which have none in common.`;
  return el("div", { class: "tree" }, el("p", { class: "note" }, note), branchList(root, current, number, onSelect, model));
}

const countTokens = (node) => node.tokens.length + node.children.reduce((sum, each) => sum + countTokens(each), 0);

function branchList(node, current, number, onSelect, model) {
  return el("ul", {}, node.children.map((child) => {
    const text = el("span", { class: "run-text" }, textIn(child.tokens));
    if (child.tokens.some((token) => token.text === undefined)) {
      textOf(child.tokens.map((token) => token.id), model).then((found) => { text.textContent = cut(found); }, () => {});
    }
    const ends = child.ends.map((answer) => el("button", {
      type: "button", class: "end", "aria-current": answer.id === current ? "true" : null, onclick: () => onSelect(answer),
    }, `answer ${number(answer)}`));
    return el("li", {}, el("div", { class: "branch" }, text, el("small", {}, `${child.tokens.length} token${child.tokens.length === 1 ? "" : "s"}`), ends),
      child.children.length ? branchList(child, current, number, onSelect, model) : null);
  }));
}

const textIn = (tokens) => cut(tokens.map((token) => token.text ?? "").join(""));

function cut(text) {
  return text.length > 240 ? `${text.slice(0, 150)} … ${text.slice(-80)}` : text;
}
