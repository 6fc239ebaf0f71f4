#!/usr/bin/env python3
"""Load a finished model as a user would, generate from fixed prompts, and write its model card.

python check.py --model model/ --data data/ --work work/ [--card]
python check.py --model model/ --draft draft/ --data data/        how often the draft agrees
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CODE = [
    "def fibonacci(n):\n",
    "import os\nimport sys\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
]
CHAT = [
    "What does os.path.join do?",
    "Explain json.dumps.",
    "Who are you?",
    "Hello!",
    "How do I read a JSON file?",
    "What is the capital of France?",
    "Show the signature of sorted.",
    "Which function does this: Return the square root of x.",
]
MORE = [
    "What does itertools.chain do?",
    "What is the re module for?",
    "Write a function that computes Fibonacci numbers.",
    "What does str.join do?",
    "help(random.choice)",
    "How do I write a class?",
    "What does threading.Thread do?",
    "What does dataclasses.dataclass do?",
]


def generate(model, tok, ids, n):
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=n,
        do_sample=False,
    )
    return out[0, len(ids) :].tolist()


def agreement(model, draft, docs, n=512, limit=60):
    """Share of positions at which both models have the same most likely token, the text being given."""
    same = count = 0
    for ids in docs[:limit]:
        x = torch.tensor([ids[:n]])
        with torch.no_grad():
            a, b = model(x).logits.argmax(-1), draft(x).logits.argmax(-1)
        same += int((a == b).sum())
        count += a.numel()
    return same / count


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--draft", type=Path)
    ap.add_argument("--data", type=Path, required=True)
    ap.add_argument("--work", type=Path)
    ap.add_argument("--card", action="store_true")
    ap.add_argument("--history", default="", help="a sentence for the card on how this run went")
    return ap.parse_args()


def template(tok, q):
    return tok.apply_chat_template(
        [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False
    )


def main():
    args = parse_args()
    torch.set_num_threads(2)
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    print(
        type(model).__name__,
        type(tok).__name__,
        len(tok),
        model.dtype,
        model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(),
    )
    text = "def f(x):\n    return {'a': [1, 2.5e-3], \"é\": None}  # ünï ✓\n\n\n\tdone"
    assert tok.decode(tok(text)["input_ids"]) == text
    hi = template(tok, "Hi")
    assert hi == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", hi
    if args.draft:
        compare_draft(args, tok, model)
        return
    samples, stops = make_samples(tok, model)
    for kind, p, o in samples:
        print(f"--- {kind}: {p!r}\n{o}")
    print(f"stopped at <|im_end|>: {stops} of {len(CHAT + MORE)}")
    if args.work:
        (args.work / "samples.json").write_text(json.dumps(samples, indent=1))
    if args.card:
        write_card(args, samples, stops)


def read_docs(data, name):
    info = json.loads((data / f"{name}.json").read_text())
    ids, out, k = (
        np.fromfile(data / f"{name}.bin", dtype=np.uint16).astype(np.int64),
        [],
        0,
    )
    for n in info["lens"]:
        out.append(ids[k : k + n].tolist())
        k += n
    return out


def accepted(draft, gens):
    """The share of the big model's own tokens that the draft model proposes, and the tokens per round
    of 4 proposals. These are the tokens that speculative decoding verifies."""
    same = count = rounds = 0
    for k, ids in gens:
        with torch.no_grad():
            hit = (
                draft(torch.tensor([ids])).logits[0, k - 1 : -1].argmax(-1) == torch.tensor(ids[k:])
            ).tolist()
        same, count, i = same + sum(hit), count + len(hit), 0
        while i < len(hit):  # rounds of 4 proposals
            j = 0
            while j < 4 and i + j < len(hit) and hit[i + j]:
                j += 1
            i, rounds = i + j + 1, rounds + 1
    return same / count, count / rounds


def compare_draft(args, tok, model):
    draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=torch.float32).eval()
    res = {}
    code = read_docs(args.data, "val_code")
    res["held-out code"] = agreement(
        model, draft, [d[i : i + 512] for d in code for i in range(0, len(d) - 64, 512)]
    )
    res["held-out chat"] = agreement(model, draft, read_docs(args.data, "val_chat_fn"), limit=130)
    gen_code, gen_chat = [], []
    for p in CODE:
        gen_code.append(
            (
                len(tok(p)["input_ids"]),
                tok(p)["input_ids"] + generate(model, tok, tok(p)["input_ids"], 96),
            )
        )
    for q in CHAT + MORE:
        ids = tok(template(tok, q))["input_ids"]
        gen_chat.append((len(ids), ids + generate(model, tok, ids, 96)))
    for name, gens in (("own greedy code", gen_code), ("own greedy chat", gen_chat)):
        res[name], res[name + ", tokens per round of 4"] = accepted(draft, gens)
    print(json.dumps({k: round(v, 3) for k, v in res.items()}, indent=1))
    (args.draft / "agreement.json").write_text(
        json.dumps({k: round(v, 3) for k, v in res.items()}, indent=1) + "\n"
    )


def make_samples(tok, model):
    end = tok.convert_tokens_to_ids("<|im_end|>")
    samples, stops = [], 0
    for p in CODE:
        ids = tok(p)["input_ids"]
        samples.append(
            ("code", p, tok.decode(generate(model, tok, ids, 64), skip_special_tokens=False))
        )
    for q in CHAT + MORE:
        out = generate(model, tok, tok(template(tok, q))["input_ids"], 128)
        stopped = out[-1] == end
        stops += stopped
        samples.append(
            (
                "chat" if stopped else "chat, not stopped",
                q,
                tok.decode(out, skip_special_tokens=True),
            )
        )
    return samples, stops


LIMITS = """\
## Limits

* It repeats what it has seen. Common functions are mostly described with their docstring's own words; for rarer or
  unknown names the answer is often fluent and wrong. Signatures of rare functions are invented.
* It knows no facts outside the standard library, cannot reason or count, and does not follow instructions.
* Code completions look like standard-library code but seldom form a correct program. With greedy decoding it falls
  into loops in long generations.
* English only. It may reproduce passages of its training data word for word.

"""


def write_card(args, samples, stops):
    f = json.loads((args.work / "final.json").read_text())
    m = json.loads((args.data / "meta.json").read_text())
    size = (args.model / "model.safetensors").stat().st_size
    row = lambda name, k: (
        f"| {name} | {f[k]['loss']:.3f} | {f[k]['bits_per_byte']:.3f} | {f[k]['tokens']} |"
    )
    shown = [s for s in samples if s[0] == "code"][:3] + [s for s in samples if s[0] != "code"]
    fence = "\n".join(f"**{k}** `{p!r}`\n\n~~~text\n{o}\n~~~\n" for k, p, o in shown)
    (args.model / "README.md").write_text(f"""---
license: psf-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# A very small language model of Python's standard library

{f["parameters"]:,} parameters ({size / 1e6:.1f} MB in bf16), trained from scratch on a CPU. It exists so that an
inference engine has real, trained weights for its quick start, tests and benchmarks without a download. It is not
useful as an assistant.

| | |
|---|---|
| architecture | `Qwen3ForCausalLM`: 4 layers, hidden 256, 4 query and 2 key/value heads of 64, QK-norm, RoPE (theta 10000), SwiGLU 640, tied embeddings |
| vocabulary | {m["vocab"]} (byte-level BPE, Qwen2's pre-tokenizer pattern, no normalizer) |
| chat format | ChatML; `<|im_end|>` (2) and `<|endoftext|>` (0) end a generation |
| context | trained on rows of 512 tokens, the last steps on 2048; 4096 positions are allowed but were not trained |
| training | {f["steps"]} steps, {f["tokens"] / 1e6:.1f} M tokens (about {f["code_epochs"] + 1} passes over the code), Muon and AdamW, {f["cpu_minutes"] / 60:.1f} CPU hours on 2 shared CPU cores |

## Data and licence

Only what CPython {m["python"]} installs: the sources of its standard library ({m["code_train"]["bytes"] / 1e6:.1f} MB), a part of its
test-suite, the reference topics of `pydoc`, and questions and answers made by program from the signatures and
docstrings of {m["items"]["train"]} functions, classes, methods and modules. These are © Python Software Foundation and others,
under the PSF Licence Agreement version 2 (PSF-2.0). {m["items"]["hand_written"]} groups of short hand-written samples (greetings, what the
model is, what it cannot answer, common small tasks) were added. About 60 % of the tokens are code, 40 % chat.
No other text, no web data and no other model's output was used.

## Measured

Of the files and of the documented functions, 2 % each were held out. Loss in nats per token, from the saved bf16 weights.

| held-out text | loss | bits per byte | tokens |
|---|---|---|---|
{row("code: files not trained on", "val_code")}
{row("chat: functions whose question was not trained on (their source was)", "val_chat_fn")}
{row("chat: functions of files not trained on", "val_chat_file")}
{row("for comparison, chat that was trained on", "seen_chat")}

Code with rows of 2048 tokens: {f["val_code_2048"]:.3f}; with rows of 4096, longer than it was trained on: {f["val_code_4096"]:.3f}.

{LIMITS}## Samples

Greedy decoding from fixed prompts. Most of these questions are about things that training showed often; `threading` and
`dataclasses` were held out, and the answers about them are invented. {stops} of {len([s for s in samples if s[0] != "code"])} chat answers ended by themselves within 128 tokens.

{fence}
## Rebuild

`prepare.py` and `chat_seed.py` make the tokenizer and the data from the interpreter's own library, `train.py` trains,
`check.py` makes this card. Seeds are fixed (1234); other versions of Python give other data. {args.history}
""")


if __name__ == "__main__":
    main()
