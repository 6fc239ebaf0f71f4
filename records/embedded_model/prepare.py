#!/usr/bin/env python3
"""Build the tokenizer and the training data from CPython's own standard library.

    python prepare.py --out data/ --model-out model/ [--stdlib DIR] [--seed 1234]

Reads nothing but the standard library of the interpreter that runs it (sources and, by
introspection, docstrings of C-implemented modules) and the short hand-written chat samples of
chat_seed.py next to this file. Writes to --out:

    code_train.bin / code_train.json    token ids (uint16) and per-document lengths
    test_train.bin / test_train.json    the same for the standard library's own test-suites
    chat_train.bin / chat_train.json    ChatML conversations, ready ordered
    val_code.* val_chat_fn.* val_chat_file.*   held-out 2 %
    meta.json                           counts, byte sizes

and to --model-out the tokenizer (tokenizer.json, tokenizer_config.json, special_tokens_map.json).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
from chat_pairs import IM_END, IM_START, chat_pass, chatml, describe, topic_items
from stdlib_items import introspect, read_sources, read_topics

EOT = "<|endoftext|>"

# The Qwen2/Qwen3 pre-tokenizer pattern: any engine that reads Qwen tokenizers reads this one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


# These are always in the training part, because quick-start texts ask about them.
ALWAYS_TRAIN = {
    "os.path.join",
    "json.dumps",
    "json.loads",
    "math.sqrt",
    "len",
    "print",
    "sorted",
    "str.join",
    "list.append",
    "dict.get",
    "re.match",
    "random.choice",
    "open",
    "range",
}

# Shown more often in the short last phase (--polish), for the same reason.
POPULAR = set(
    """os.path.join os.path.exists os.path.basename os.path.dirname os.path.split os.path.splitext os.path.abspath
os.path.isfile os.path.isdir os.listdir os.makedirs os.mkdir os.remove os.rename os.getcwd os.walk os.getenv os.chdir json.dumps
json.loads json.dump json.load math.sqrt math.floor math.ceil math.sin math.cos math.log math.exp math.gcd math.factorial math.pow
len print sorted open range sum min max abs round map filter zip enumerate isinstance input iter next any all repr id hash
str.join str.split str.strip str.replace str.lower str.upper str.format str.startswith str.endswith str.find list.append
list.extend list.sort list.pop list.insert list.remove list.reverse dict.get dict.items dict.keys dict.values dict.update dict.pop
set.add re.match re.search re.sub re.findall re.compile re.split re.fullmatch random.choice random.randint random.shuffle
random.random random.sample random.seed itertools.chain itertools.product itertools.permutations itertools.combinations
itertools.islice itertools.count itertools.repeat functools.reduce functools.partial functools.lru_cache functools.wraps
collections.Counter collections.deque collections.OrderedDict collections.defaultdict collections.namedtuple copy.copy
copy.deepcopy shutil.copy shutil.rmtree shutil.move shutil.copytree time.sleep time.time time.perf_counter subprocess.run
subprocess.Popen glob.glob tempfile.mkdtemp textwrap.wrap textwrap.dedent textwrap.indent heapq.heappush heapq.heappop
bisect.bisect statistics.mean statistics.median datetime.datetime datetime.date datetime.timedelta pathlib.Path argparse
argparse.ArgumentParser csv.reader csv.writer base64.b64encode base64.b64decode hashlib.sha256 logging.getLogger sys.exit
urllib.parse.urlparse urllib.parse.quote urllib.request.urlopen pickle.dumps pickle.loads struct.pack struct.unpack operator.itemgetter
contextlib.contextmanager enum.Enum decimal.Decimal fractions.Fraction json re os math random itertools functools collections
shutil subprocess time datetime pathlib string textwrap heapq statistics logging csv copy""".split()
)


def sha_bucket(text: str, mod: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "big") % mod


def train_tokenizer(texts, vocab: int):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOT, IM_START, IM_END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def save_tokenizer(tok, out: Path):
    out.mkdir(parents=True, exist_ok=True)
    tok.save(str(out / "tokenizer.json"))
    special = {t: tok.token_to_id(t) for t in (EOT, IM_START, IM_END)}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": EOT,
        "unk_token": None,
        "additional_special_tokens": [IM_START, IM_END],
        "added_tokens_decoder": {
            str(i): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for t, i in special.items()
        },
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "special_tokens_map.json").write_text(
        json.dumps(
            {
                "additional_special_tokens": [IM_START, IM_END],
                "eos_token": IM_END,
                "pad_token": EOT,
            },
            indent=2,
        )
        + "\n"
    )


def write_bin(tok, docs: list[str], path: Path) -> dict:
    lens, chunks = [], []
    for i in range(0, len(docs), 512):
        for enc in tok.encode_batch(docs[i : i + 512]):
            lens.append(len(enc.ids))
            chunks.append(np.asarray(enc.ids, dtype=np.uint16))
    data = np.concatenate(chunks) if chunks else np.zeros(0, np.uint16)
    data.tofile(path.with_suffix(".bin"))
    # bytes as a reader of the text would count them: special tokens are not text
    nbytes = sum(len(re.sub(r"<\|\w+\|>", "", d).encode()) for d in docs)
    info = {"docs": len(docs), "tokens": int(data.size), "bytes": nbytes}
    path.with_suffix(".json").write_text(json.dumps({**info, "lens": lens}))
    return info


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--model-out", type=Path, required=True)
    ap.add_argument("--vocab", type=int, default=4096)
    ap.add_argument("--seed", type=int, default=1234)
    ap.add_argument(
        "--holdout", type=int, default=50, help="1 in this many files and functions is held out"
    )
    ap.add_argument("--chat-tokens", type=int, default=12_000_000)
    ap.add_argument(
        "--polish",
        action="store_true",
        help="only write chat_polish: one ordinary pass and more of the most used functions; the tokenizer is there already",
    )
    ap.add_argument("--core-repeat", type=float, default=3.0)
    return ap.parse_args()


def read_code(args):
    """Code, tests, held-out code, and the names of the held-out files."""
    # <|...|> inside a source would be read as a special token
    defuse = lambda t: re.sub(r"<\|(endoftext|im_start|im_end)\|>", r"<| \1 |>", t)
    code, tests, val_code, held_files = [], [], [], set()
    for rel, text, is_test in read_sources(args.stdlib):
        if sha_bucket(f"file:{args.seed}:{rel}", args.holdout) == 0:
            held_files.add(rel)
            if not is_test:
                val_code.append(defuse(text))
            continue
        (tests if is_test else code).append(defuse(text))
    topics = read_topics(args.stdlib)
    code += [defuse(t.strip("\n") + "\n") for t in topics.values()]
    return code, tests, val_code, held_files, topics


def split_items(args, held_files):
    """The items to train on, the held-out functions, and the functions of held-out files."""
    train_items, val_fn, val_file = [], [], []
    for it in introspect(args.stdlib):
        if it["name"] in ALWAYS_TRAIN:
            train_items.append(it)
        elif it["file"] in held_files:
            val_file.append(it)
        elif sha_bucket(f"doc:{args.seed}:{it['text']}", args.holdout) == 0:
            val_fn.append(it)
        else:
            train_items.append(it)
    return train_items, val_fn, val_file


def write_polish(args, train_items, topic_qa, seeds):
    from tokenizers import Tokenizer

    pr = random.Random(args.seed + 3)
    popular = [
        {**it, "core": True, "kind": "function" if it["kind"] == "method" else it["kind"]}
        for it in train_items
        if it["name"] in POPULAR
    ]
    convs = [c for _ in range(5) for c in chat_pass(popular, [], seeds, pr, 4.0)]
    convs += chat_pass(train_items, topic_qa, seeds, pr, args.core_repeat)
    pr.shuffle(convs)
    info = write_bin(
        Tokenizer.from_file(str(args.model_out / "tokenizer.json")),
        convs,
        args.out / "chat_polish",
    )
    print(len(popular), sorted(POPULAR - {it["name"] for it in popular}), info)


def make_tokenizer(args, code, tests, train_items, topic_qa, seeds):
    sample_chat = [
        c
        for _ in range(2)
        for c in chat_pass(train_items, topic_qa, seeds, random.Random(args.seed), args.core_repeat)
    ]
    strip = lambda t: re.sub(r"<\|\w+\|>", "\n", t)
    tok = train_tokenizer(
        code + [t for i, t in enumerate(tests) if i % 6 == 0] + [strip(c) for c in sample_chat],
        args.vocab,
    )
    save_tokenizer(tok, args.model_out)
    return tok


def write_held_out(args, tok, meta, train_items, val_fn, val_file):
    """One question for each item."""
    vr = random.Random(args.seed + 1)
    for name, its in (("val_chat_fn", val_fn), ("val_chat_file", val_file)):
        meta[name] = write_bin(tok, [chatml([describe(it, vr)]) for it in its], args.out / name)
    vr = random.Random(args.seed + 2)
    seen = [it for it in train_items if it["core"] and it["kind"] != "method"]
    meta["seen_chat"] = write_bin(
        tok,
        [chatml([describe(it, vr)]) for it in vr.sample(seen, min(200, len(seen)))],
        args.out / "seen_chat",
    )


def write_chat(args, tok, meta, train_items, topic_qa, seeds):
    """As many passes as --chat-tokens takes; returns the conversations."""
    rng = random.Random(args.seed)
    convs, total, per_pass = [], 0, 0
    while total < args.chat_tokens:
        part = chat_pass(train_items, topic_qa, seeds, rng, args.core_repeat)
        n = sum(len(e.ids) for e in tok.encode_batch(part)) if not per_pass else per_pass
        per_pass = per_pass or n
        total += n
        convs += part
    meta["chat_train"] = {
        **write_bin(tok, convs, args.out / "chat_train"),
        "tokens_per_pass": per_pass,
    }
    return convs


def main():
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    from chat_seed import SEEDS

    code, tests, val_code, held_files, topics = read_code(args)
    train_items, val_fn, val_file = split_items(args, held_files)
    topic_qa = topic_items(topics)
    seeds = [(s["q"], s["a"], s.get("repeat", 1)) for s in SEEDS]
    print(
        f"files: code {len(code)} tests {len(tests)} val {len(val_code)} held {sorted(held_files)}"
    )
    print(
        f"items: train {len(train_items)} val_fn {len(val_fn)} val_file {len(val_file)} topics {len(topic_qa)} seeds {len(seeds)}"
    )
    if args.polish:
        write_polish(args, train_items, topic_qa, seeds)
        return
    tok = make_tokenizer(args, code, tests, train_items, topic_qa, seeds)
    meta = {
        "seed": args.seed,
        "vocab": tok.get_vocab_size(),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    eot = lambda docs: [d + EOT for d in docs]
    meta["code_train"] = write_bin(tok, eot(code), args.out / "code_train")
    meta["test_train"] = write_bin(tok, eot(tests), args.out / "test_train")
    meta["val_code"] = write_bin(tok, eot(val_code), args.out / "val_code")
    write_held_out(args, tok, meta, train_items, val_fn, val_file)
    convs = write_chat(args, tok, meta, train_items, topic_qa, seeds)
    meta["items"] = {
        "train": len(train_items),
        "val_fn": len(val_fn),
        "val_file": len(val_file),
        "topics": len(topic_qa),
        "hand_written": len(seeds),
    }
    (args.out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    (args.out / "chat_sample.txt").write_text("\n=====\n".join(convs[:200]))
    print(json.dumps(meta, indent=2))


if __name__ == "__main__":
    main()
