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
import ast
import hashlib
import importlib
import inspect
import io
import json
import random
import re
import sys
import sysconfig
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

EOT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

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

# Modules whose public names are asked about most; their items are repeated more often.
CORE = """builtins os os.path json re math random datetime collections itertools functools pathlib
string time sys shutil subprocess csv copy heapq bisect statistics textwrap glob tempfile
urllib.parse urllib.request base64 hashlib threading logging argparse contextlib dataclasses typing
enum operator decimal fractions struct pickle io socket asyncio unittest zipfile gzip queue
configparser secrets uuid getpass platform inspect ast difflib pprint traceback warnings weakref
types calendar fnmatch html hmac http sqlite3 shlex signal stat timeit tomllib""".split()

# Importing these has side effects (opens a browser, prints, needs a display) or is not worth it.
SKIP_MODULES = {
    "antigravity",
    "this",
    "idlelib",
    "turtledemo",
    "test",
    "lib2to3",
    "turtle",
    "tkinter",
    "pydoc_data",
    "ensurepip",
    "posix",
    "nturl2path",
    "distutils",
    "nt",
    "msilib",
    "winreg",
    "winsound",
    "msvcrt",
    "__main__",
}
TEST_DIRS = {"test", "tests", "idle_test", "turtledemo"}

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


# --------------------------------------------------------------------------- source files


def wanted(rel: Path) -> bool:
    parts = rel.parts
    if parts[0] in {"site-packages", "dist-packages", "lib-dynload", "__pycache__"}:
        return False
    if parts[0].startswith(("config-", "_sysconfigdata")):  # made by the build, names local paths
        return False
    return rel.as_posix() not in {"pydoc_data/topics.py"}  # read as documents below


def read_sources(stdlib: Path):
    """Yield (relative path, text, is_test)."""
    for path in sorted(stdlib.rglob("*.py")):
        rel = path.relative_to(stdlib)
        if not wanted(rel):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        text = text.replace("\r\n", "\n")
        if len(text) < 200 or "decoding_table = (" in text or "\x00" in text:
            continue
        lines = text.count("\n") + 1
        letters = sum(c.isalpha() or c.isspace() for c in text)
        if letters / len(text) < 0.6 or len(text) / lines > 120:  # tables of numbers, not code
            continue
        yield rel.as_posix(), text, bool(TEST_DIRS & set(rel.parts[:-1]))


def read_topics(stdlib: Path) -> dict[str, str]:
    path = stdlib / "pydoc_data" / "topics.py"
    if not path.exists():
        return {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            return ast.literal_eval(node.value)
    return {}


# --------------------------------------------------------------------------- documented things

ADDRESS = re.compile(r"<[^<>]*(?: at 0x[0-9a-fA-F]+)[^<>]*>")


def signature_of(obj, name: str) -> str:
    try:
        sig = str(inspect.signature(obj))
    except Exception:  # some C signatures do not parse
        return ""
    sig = ADDRESS.sub("...", sig)
    sig = re.sub(r"<(class|enum|function|built-in function|module) '?([\w.]+)'?[^<>]*>", r"\2", sig)
    sig = re.sub(r"<[^<>]*>", "...", sig)
    sig = re.sub(r"^\(self(, /)?(, |(?=\)))", "(", sig)  # a reader calls it without self
    sig = re.sub(r"^\((type|cls), /(, |(?=\)))", "(", sig)
    return name + sig if len(sig) < 160 else ""


def first_paragraph(doc: str, name: str, limit: int = 420) -> tuple[str, str]:
    """(signature line if the docstring opens with one, first paragraph of prose)."""
    doc = inspect.cleandoc(doc).strip()
    paras = [p for p in re.split(r"\n\s*\n", doc) if p.strip()]
    sig = ""
    short = name.rsplit(".", 1)[-1]
    while paras:
        lines = paras[0].split("\n")
        if re.match(rf"^[\w.]*{re.escape(short)}\(.*", lines[0]):
            head = lines.pop(0).strip()
            sig = sig or re.sub(r"\s*--\s.*$", "", head)
            m = re.search(r"\s--\s+(.*)$", head)
            if m:
                lines.insert(0, m.group(1))
            while lines and re.match(rf"^\s*[\w.]*{re.escape(short)}\(", lines[0]):
                lines.pop(0)
            if lines:
                paras[0] = "\n".join(lines)
                break
            paras.pop(0)
        else:
            break
    if not paras:
        return sig, ""
    text = paras[0].strip("\n")
    if not re.search(r"^\s*(>>>|[-*+] )", text, re.M) and not re.search(r"^\s{4,}\S", text, re.M):
        text = re.sub(r"\s*\n\s*", " ", text).strip()
    if len(text) > limit:
        cut = max(text.rfind(". ", 0, limit), text.rfind(".\n", 0, limit))
        text = text[: cut + 1] if cut > 60 else text[:limit].rsplit(" ", 1)[0] + " ..."
    if text and text[0].islower() and not text.startswith(short):
        text = text[0].upper() + text[1:]
    if "\n" not in text:
        text = re.sub(r"  +", " ", text)
    if text and text[-1].isalnum():
        text += "."
    return sig, text


def kind_of(obj) -> str:
    if inspect.isclass(obj):
        return "exception" if issubclass(obj, BaseException) else "class"
    return "function"


def introspect(stdlib: Path) -> list[dict]:
    items: dict[str, dict] = {}

    def relpath(obj, default):
        try:
            p = inspect.getsourcefile(obj)
            return Path(p).relative_to(stdlib).as_posix() if p else default
        except (TypeError, ValueError, OSError):
            return default

    def add(name, obj, module, core, kind, rel):
        if name in items:
            return
        doc = getattr(obj, "__doc__", None)
        if not isinstance(doc, str) or len(doc.strip()) < 12:
            return
        if kind == "method" and doc.strip().startswith("Return self") and len(doc) < 30:
            return
        sig, text = first_paragraph(doc, name)
        sig = signature_of(obj, name) or (sig if len(sig) < 160 else "")
        if sig and not sig.startswith(name):
            sig = name + sig[sig.find("(") :] if "(" in sig else ""
        if len(text) < 8 or len(text.encode("ascii", "ignore")) != len(text):
            return
        item = {
            "name": name,
            "module": module,
            "kind": kind,
            "sig": sig,
            "text": text,
            "core": core,
            "file": relpath(obj, rel),
            "source": "",
        }
        try:
            src = inspect.cleandoc("\n" + inspect.getsource(obj)) if kind != "class" else ""
            if 2 <= src.count("\n") <= 24 and len(src) < 900:
                item["source"] = src.rstrip()
        except (TypeError, OSError, IndentationError, SyntaxError):
            pass
        items[name] = item

    names = sorted(
        n for n in sys.stdlib_module_names if not n.startswith("_") and n not in SKIP_MODULES
    )
    extra = []
    for n in names:
        pkg = stdlib / n
        if pkg.is_dir():
            for sub in sorted(pkg.rglob("*.py")):
                parts = sub.relative_to(stdlib).with_suffix("").parts
                if (
                    TEST_DIRS & set(parts)
                    or any(p.startswith("_") for p in parts)
                    or "msilib" in parts
                ):
                    continue
                extra.append(".".join(parts))
    order = CORE + [n for n in names + extra if n not in CORE]
    modules = []
    for name in order:
        if "windows" in name or name.startswith(
            ("distutils.msvc", "encodings.mbcs", "encodings.oem")
        ):
            continue
        try:
            with (
                warnings.catch_warnings(),
                redirect_stdout(io.StringIO()),
                redirect_stderr(io.StringIO()),
            ):
                warnings.simplefilter("ignore")
                modules.append((name, importlib.import_module(name)))
        except BaseException:  # a module this platform lacks
            continue
    for name, mod in modules:
        core = name in CORE
        rel = relpath(mod, "")
        prefix = "" if name == "builtins" else name + "."
        public = getattr(mod, "__all__", None) or [n for n in dir(mod) if not n.startswith("_")]
        doc = getattr(mod, "__doc__", None)
        if isinstance(doc, str) and name != "builtins":
            _, text = first_paragraph(doc, "\0")
            if len(text) > 15 and text.isascii() and name not in items:
                items[name] = {
                    "name": name,
                    "module": name,
                    "kind": "module",
                    "sig": "",
                    "text": text,
                    "core": core,
                    "file": rel,
                    "source": "",
                    "public": [p for p in public if isinstance(p, str) and not p.startswith("_")][
                        :12
                    ],
                }
        for attr in sorted(set(map(str, public))):
            obj = getattr(mod, attr, None)
            if obj is None or inspect.ismodule(obj):
                continue
            home = getattr(obj, "__module__", None) or name
            if (
                name != "os.path"
                and home.split(".")[0].lstrip("_") != name.split(".")[0].lstrip("_")
                and home not in {"posixpath", "genericpath", "posix"}
                and attr not in getattr(mod, "__all__", ())
            ):
                continue
            if not (inspect.isroutine(obj) or inspect.isclass(obj)):
                continue
            kind = kind_of(obj)
            add(prefix + attr, obj, name, core, kind, rel)
            if kind == "class":
                for m in sorted(vars(obj)):
                    if m.startswith("_"):
                        continue
                    raw = vars(obj)[m]
                    fn = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
                    if isinstance(raw, classmethod):
                        fn = getattr(obj, m, None)
                    if inspect.isroutine(fn):
                        add(f"{prefix}{attr}.{m}", fn, name, core, "method", rel)
    return list(items.values())


# --------------------------------------------------------------------------- questions and answers

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


def main():
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
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    from chat_seed import SEEDS

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

    items = introspect(args.stdlib)
    topic_qa = topic_items(topics)
    train_items, val_fn, val_file = [], [], []
    for it in items:
        if it["name"] in ALWAYS_TRAIN:
            train_items.append(it)
        elif it["file"] in held_files:
            val_file.append(it)
        elif sha_bucket(f"doc:{args.seed}:{it['text']}", args.holdout) == 0:
            val_fn.append(it)
        else:
            train_items.append(it)
    seeds = [(s["q"], s["a"], s.get("repeat", 1)) for s in SEEDS]
    print(
        f"files: code {len(code)} tests {len(tests)} val {len(val_code)} held {sorted(held_files)}"
    )
    print(
        f"items: train {len(train_items)} val_fn {len(val_fn)} val_file {len(val_file)} topics {len(topic_qa)} seeds {len(seeds)}"
    )

    if args.polish:
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
        return
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

    meta = {
        "seed": args.seed,
        "vocab": tok.get_vocab_size(),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    eot = lambda docs: [d + EOT for d in docs]
    meta["code_train"] = write_bin(tok, eot(code), args.out / "code_train")
    meta["test_train"] = write_bin(tok, eot(tests), args.out / "test_train")
    meta["val_code"] = write_bin(tok, eot(val_code), args.out / "val_code")
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
