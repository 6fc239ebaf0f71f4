"""Reads CPython's standard library: its sources, and its documented things with their docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

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


def relpath(obj, default, stdlib):
    try:
        p = inspect.getsourcefile(obj)
        return Path(p).relative_to(stdlib).as_posix() if p else default
    except (TypeError, ValueError, OSError):
        return default


def add(items, name, obj, kind, home):
    """Add a class, function or method with a usable docstring. home: what its module's things share."""
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
        "module": home["module"],
        "kind": kind,
        "sig": sig,
        "text": text,
        "core": home["core"],
        "file": relpath(obj, home["file"], home["stdlib"]),
        "source": "",
    }
    try:
        src = inspect.cleandoc("\n" + inspect.getsource(obj)) if kind != "class" else ""
        if 2 <= src.count("\n") <= 24 and len(src) < 900:
            item["source"] = src.rstrip()
    except (TypeError, OSError, IndentationError, SyntaxError):
        pass
    items[name] = item


def module_names(stdlib: Path) -> list[str]:
    """The names of the modules, those of CORE first."""
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
    return CORE + [n for n in names + extra if n not in CORE]


def import_modules(order: list[str]) -> list[tuple]:
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
    return modules


def add_module(items, mod, public, home):
    name = home["module"]
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
                "core": home["core"],
                "file": home["file"],
                "source": "",
                "public": [p for p in public if isinstance(p, str) and not p.startswith("_")][:12],
            }


def add_public(items, mod, attr, home):
    """A public name of a module, and the methods of a class."""
    name = home["module"]
    prefix = "" if name == "builtins" else name + "."
    obj = getattr(mod, attr, None)
    if obj is None or inspect.ismodule(obj):
        return
    defined_in = getattr(obj, "__module__", None) or name
    if (
        name != "os.path"
        and defined_in.split(".")[0].lstrip("_") != name.split(".")[0].lstrip("_")
        and defined_in not in {"posixpath", "genericpath", "posix"}
        and attr not in getattr(mod, "__all__", ())
    ):
        return
    if not (inspect.isroutine(obj) or inspect.isclass(obj)):
        return
    kind = kind_of(obj)
    add(items, prefix + attr, obj, kind, home)
    if kind == "class":
        for m in sorted(vars(obj)):
            if m.startswith("_"):
                continue
            raw = vars(obj)[m]
            fn = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
            if isinstance(raw, classmethod):
                fn = getattr(obj, m, None)
            if inspect.isroutine(fn):
                add(items, f"{prefix}{attr}.{m}", fn, "method", home)


def introspect(stdlib: Path) -> list[dict]:
    items: dict[str, dict] = {}
    for name, mod in import_modules(module_names(stdlib)):
        home = {
            "module": name,
            "core": name in CORE,
            "file": relpath(mod, "", stdlib),
            "stdlib": stdlib,
        }
        public = getattr(mod, "__all__", None) or [n for n in dir(mod) if not n.startswith("_")]
        add_module(items, mod, public, home)
        for attr in sorted(set(map(str, public))):
            add_public(items, mod, attr, home)
    return list(items.values())
