"""Conversations made by program from documented things, topics and hand-written samples."""

from __future__ import annotations

import re

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

DESCRIBE = [
    "What does {n} do?",
    "What does {n} do?",
    "What does `{n}` do?",
    "What does {n}() do?",
    "what does {n} do",
    "Explain {n}.",
    "Explain {n}.",
    "Explain {n}",
    "Explain `{n}`.",
    "Describe {n}.",
    "What is {n} for?",
    "What is {n}?",
    "Tell me about {n}.",
    "Can you explain {n}?",
    "How does {n} work?",
    "help({n})",
    "How do I use {n}?",
    "In Python, what does {n} do?",
    "What does Python's {n} do?",
    "What is the purpose of {n}?",
]
DESCRIBE_CLASS = [
    "What is {n}?",
    "What is {n}?",
    "What is the class {n}?",
    "Explain {n}.",
    "Explain the {n} class.",
    "Describe {n}.",
    "What is {n} for?",
    "Tell me about {n}.",
    "What does {n} do?",
    "help({n})",
]
DESCRIBE_MODULE = [
    "What is the {n} module?",
    "What is {n}?",
    "What is the {n} module for?",
    "What does the {n} module do?",
    "Explain the {n} module.",
    "Describe the {n} module.",
    "Tell me about {n}.",
    "Tell me about the {n} module.",
    "What is the module {n} for?",
    "What does {n} do?",
]
LIST_MODULE = [
    "What is in the {n} module?",
    "List some names from {n}.",
    "Which names does {n} export?",
    "What functions are in {n}?",
    "Name some things in the {n} module.",
]
SIGNATURE = [
    "Show the signature of {n}.",
    "What is the signature of {n}?",
    "What arguments does {n} take?",
    "Signature of {n}?",
    "Which parameters does {n} have?",
    "How do I call {n}?",
]
DOCSTRING = [
    "Write the docstring of {n}.",
    "Show the docstring of {n}.",
    "What is the docstring of {n}?",
]
WHICH = [
    "Which {k} does this: {t}",
    "Which Python {k} does the following? {t}",
    "Name the {k}: {t}",
    "Which {k} would you use? {t}",
]
WHERE = [
    "Which module is {s} in?",
    "Where is {s} defined?",
    "How do I import {s}?",
    "Show how to import {s}.",
]
SOURCE = [
    "Show the source of {n}.",
    "Show me the code of {n}.",
    "How is {n} implemented?",
    "Write the code of {n}.",
]
WRITE = [
    "Write a Python function {s}: {t}",
    "Write a function named {s}. {t}",
    "Implement {s}: {t}",
]
TOPIC = [
    "Explain {h}.",
    "What is {h}?",
    "Tell me about {h}.",
    "Describe {h} in Python.",
    "Explain {h} in Python.",
]
SYSTEM = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You answer questions about Python.",
    "You are a concise assistant.",
    "Answer briefly.",
]


def describe(it, rng):
    table = {"class": DESCRIBE_CLASS, "exception": DESCRIBE_CLASS, "module": DESCRIBE_MODULE}.get(
        it["kind"], DESCRIBE
    )
    q = rng.choice(table).format(n=it["name"])
    a = it["text"]
    if it["sig"]:
        a = f"`{it['sig']}`\n\n{a}"
    return q, a


def questions(it, rng):
    """One pass over one item: a list of (question, answer)."""
    out = [describe(it, rng)]
    n, s = it["name"], it["name"].rsplit(".", 1)[-1]
    if it["kind"] == "module":
        if it.get("public") and rng.random() < 0.3:
            names = ", ".join(it["public"])
            out.append((rng.choice(LIST_MODULE).format(n=n), f"The {n} module has: {names}."))
        return out
    if it["sig"] and rng.random() < 0.22:
        out.append((rng.choice(SIGNATURE).format(n=n), f"`{it['sig']}`"))
    if rng.random() < 0.12:
        out.append((rng.choice(DOCSTRING).format(n=n), f'"""{it["text"]}"""'))
    if 25 < len(it["text"]) < 260 and s.lower() not in it["text"].lower() and rng.random() < 0.15:
        k = {"class": "class", "exception": "exception"}.get(it["kind"], "function")
        out.append((rng.choice(WHICH).format(k=k, t=it["text"]), f"That is `{n}`."))
    if it["kind"] != "method" and it["module"] != "builtins" and rng.random() < 0.10:
        q = rng.choice(WHERE).format(s=s)
        code = f"from {it['module']} import {s}"
        out.append((q, f"`{s}` is in the `{it['module']}` module:\n\n```python\n{code}\n```"))
    if it["source"] and rng.random() < 0.15:
        if it["kind"] == "function" and len(it["text"]) < 160 and rng.random() < 0.5:
            q = rng.choice(WRITE).format(s=s, t=it["text"])
        else:
            q = rng.choice(SOURCE).format(n=n)
        out.append((q, f"```python\n{it['source']}\n```"))
    return out


def topic_items(topics: dict[str, str]) -> list[tuple[str, str]]:
    out = []
    for text in topics.values():
        lines = text.strip("\n").split("\n")
        head = lines[0].replace('"', "`").strip()
        if len(lines) < 4 or not lines[1].startswith(("*", "=")) or len(head) > 60:
            continue
        paras = re.split(r"\n\s*\n", "\n".join(lines[2:]))
        prose = [
            re.sub(r"\s*\n\s*", " ", p).strip()
            for p in paras
            if p.strip() and not p.startswith((" ", "*", "=", "-"))
        ]
        if not prose:
            continue
        a = prose[0]
        if len(a) < 120 and len(prose) > 1 and len(prose[1]) < 300:
            a += "\n\n" + prose[1]
        if len(a) > 500:
            cut = a.rfind(". ", 0, 500)
            a = a[: cut + 1] if cut > 60 else ""
        if a and a.isascii():
            a = a.rstrip(":") + ("." if a.endswith(":") else "")
            out.append(
                (
                    head[0].lower() + head[1:] if head.startswith(("The ", "A ")) else head,
                    a.replace('"', "`"),
                )
            )
    return out


def chatml(turns, system=None) -> str:
    text = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    for q, a in turns:
        text += f"{IM_START}user\n{q}{IM_END}\n{IM_START}assistant\n{a}{IM_END}\n"
    return text


def chat_pass(items, topics, seeds, rng, core_repeat: float) -> list[str]:
    """One pass: every item at least with its weight, in random order; some conversations have several turns."""
    pairs = []
    for it in items:
        if it["kind"] == "method":
            weight = (
                1.2 if it["core"] and it["module"] == "builtins" else (0.7 if it["core"] else 0.25)
            )
        else:
            weight = core_repeat if it["core"] else 0.7
        count = int(weight) + (rng.random() < weight - int(weight))
        for _ in range(count):
            pairs += questions(it, rng)
    for head, a in topics:
        pairs.append((rng.choice(TOPIC).format(h=head), a))
    for qs, answers, repeat in seeds:
        for _ in range(repeat):
            pairs.append((rng.choice(qs), rng.choice(answers)))
    rng.shuffle(pairs)
    out, i = [], 0
    while i < len(pairs):
        n = rng.choices([1, 2, 3], [0.8, 0.13, 0.07])[0]
        out.append(chatml(pairs[i : i + n], rng.choice(SYSTEM) if rng.random() < 0.15 else None))
        i += n
    return out


# --------------------------------------------------------------------------- tokenizer and files
