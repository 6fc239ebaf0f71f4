"""Write docs/python.md: what `from quire import ...` brings, from signatures and docstrings.

    .venv/bin/python tools/python_reference.py

It starts from the exported names, and adds the classes that these take and return, wherever in the
package they are. tests/test_python_reference.py fails if the file is outdated.
"""

import dataclasses
import enum
import importlib
import inspect
import re
import typing
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "python.md"

INTRODUCTION = """\
# The Python reference

Made from the package's docstrings by `tools/python_reference.py`; [the README](../README.md) has
examples. `quire` exports
{names}.
The other classes below are what these take and return.
"""


def reference() -> str:
    """The whole page."""
    quire = importlib.import_module("quire")
    exported = [getattr(quire, name) for name in quire.__all__ if name[0] != "_"]
    names = ", ".join(f"`{owner.__name__}`" for owner in exported)
    parts = [INTRODUCTION.format(names=names)]
    parts += [class_text(owner) for owner in with_their_kinds(exported)]
    errors = importlib.import_module("quire.errors")
    summary, _, tree = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")
    parts.append(f"## Errors\n\nIn `quire.errors`. {summary}\n\n```text\n{tree}\n```\n")
    return "\n".join(parts)


def with_their_kinds(exported: list[type]) -> list[type]:
    """The exported classes and those of the package that their public parts name, once each."""
    found: list[type] = []
    waiting = list(exported)
    while waiting:
        owner = waiting.pop(0)
        if owner not in found:
            found.append(owner)
            waiting += named_classes(owner)
    return found


def named_classes(owner: type) -> Iterator[type]:
    """Classes of the package in the types of a class's fields, and in what its methods return."""
    hints = list(typing.get_type_hints(owner).values()) if dataclasses.is_dataclass(owner) else []
    for _, member in members(owner):
        function = member.fget if isinstance(member, property) else member
        own = typing.get_type_hints(getattr(function, "__func__", function))
        hints.append(own.get("return"))
        # A constructor that takes all options has them under the name of the class that joins them.
        kinds = getattr(getattr(function, "options", object), "__mro__", ())
        hints += [kind for kind in kinds if kind.__name__ == "EngineOptions"]
    for hint in hints:
        yield from classes_in(hint)


def classes_in(hint: object) -> Iterator[type]:
    """Classes of the package in a type."""
    for part in typing.get_args(hint):
        yield from classes_in(part)
    if isinstance(hint, type) and hint.__module__.startswith("quire."):
        yield hint


def members(owner: type) -> list[tuple[str, object]]:
    """Public methods and properties in their order, the constructor first if it says anything."""
    found = []
    for name, member in vars(owner).items():
        is_shown = not name.startswith("_") or (name == "__init__" and member.__doc__)
        kinds = (property, classmethod, staticmethod)
        if is_shown and (inspect.isfunction(member) or isinstance(member, kinds)):
            found.append((name, member))
    return sorted(found, key=lambda each: each[0] != "__init__")


def class_text(owner: type) -> str:
    """The section of a class: description, constructor, fields and methods."""
    lines = [f"## {owner.__name__}", ""]
    names: list[str] = []
    if dataclasses.is_dataclass(owner):
        lines += ["```python", signature(owner.__name__, inspect.signature(owner)), "```", ""]
        names = [each.name for each in dataclasses.fields(owner)]
    lines += [prose(owner.__doc__, names), ""]
    if entries := [*field_entries(owner), *option_entries(owner)]:
        lines += [*entries, ""]
    if issubclass(owner, enum.Enum):
        lines += [", ".join(f"`{each.value}`" for each in owner), ""]
    for name, member in members(owner):
        lines += member_text(owner, name, member)
    return "\n".join(lines)


def field_entries(owner: type) -> list[str]:
    """An entry for each field of a class that has a `#:` comment above it."""
    source = inspect.getsource(owner).splitlines()
    found, note = [], ""
    for line in source:
        comment = re.match(r" {4}#: (.*)", line)
        field = re.match(r" {4}(\w+): ", line)
        if field and note:
            found.append(f"- `{field[1]}`: {note.strip()}".replace("<", "&lt;"))
        note = f"{note} {comment[1]}" if comment else ""
    return found


def option_entries(owner: type) -> list[str]:
    """An entry for each field that is an option, from its declaration."""
    if not dataclasses.is_dataclass(owner):
        return []
    # Not before `quire` itself was imported: this file may run where it is not installed.
    from quire.option_fields import declared_options, flag_name

    found = []
    for each, declared in declared_options(owner):
        flag = "" if declared.group is None else f" (`{flag_name(each, declared)}`)"
        found.append(f"- `{each.name}`{flag}: {declared.doc}".replace("<", "&lt;"))
    return found


def member_text(owner: type, name: str, member: object) -> list[str]:
    """A method or property, under its signature."""
    if isinstance(member, property):
        kind = inspect.signature(member.fget).return_annotation
        text = f"`{_plain(kind)}`. {prose(member.__doc__)}".strip()
        return [f"### {owner.__name__}.{name}", "", text, ""]
    function = getattr(member, "__func__", member)
    shown = inspect.signature(function)
    first, *others = shown.parameters.values()
    shown = shown.replace(parameters=others if first.name in ("self", "cls") else [first, *others])
    title, call = f"{owner.__name__}.{name}", name
    if name == "__init__":
        title, call = f"{owner.__name__}(...)", owner.__name__
        shown = shown.replace(return_annotation=inspect.Signature.empty)
        if options := getattr(function, "options", None):  # which have a section of their own
            shown = shown.replace(parameters=[*own_parameters(options), OPTIONS])
    block = ["```python", signature(call, shown), "```"]
    return [f"### {title}", "", *block, "", prose(member.__doc__, list(shown.parameters)), ""]


OPTIONS = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)


def own_parameters(options: type) -> Iterator[inspect.Parameter]:
    """The first parameter, which is positional, and the parameters that are no options."""
    first, *others = inspect.signature(options).parameters.values()
    yield first
    from quire.option_fields import declared_options  # as above

    names = {each.name for each, _ in declared_options(options)}
    for parameter in others:
        if parameter.name not in names:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def signature(name: str, shown: inspect.Signature) -> str:
    """On one line, or one parameter a line where that is too long."""
    returns = ""
    if shown.return_annotation not in (inspect.Signature.empty, None):
        returns = f" -> {_plain(shown.return_annotation)}"
    words = []
    for parameter in shown.parameters.values():
        text = parameter.name
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            words.append(f"**{text}")
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        if parameter.annotation is not inspect.Parameter.empty:
            text += f": {_plain(parameter.annotation)}"
        if parameter.default is not inspect.Parameter.empty:
            default = parameter.default
            text += " = ..." if type(default) is object or callable(default) else f" = {default!r}"
        words.append(re.sub(r"<factory>", "[]", text))
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) <= 96:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returns}"])


def _plain(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+([A-Z])", r"\1", text).replace("'", "")


ENTRY = re.compile(r"(?:(?<=[.;)] )|^)(`?[a-z]\w*`?(?:, `?[a-z]\w*`?)*): ")
AFTER_ENTRIES = re.compile(r"(?<=\.) (?=(?:Raises|Returns) )")


def prose(docstring: str | None, names: Collection[str] = ()) -> str:
    """Paragraphs as Markdown; `name: what it means` becomes an entry of a list.

    names: those that may begin an entry.
    """
    paragraphs = []
    for paragraph in inspect.cleandoc(docstring or "").split("\n\n"):
        if paragraph.startswith("    "):  # an example
            paragraphs.append(f"```python\n{inspect.cleandoc(paragraph)}\n```")
        else:
            text = " ".join(line.strip() for line in paragraph.splitlines())
            paragraphs.append(_with_entries(text, names).replace("<", "&lt;"))
    return "\n\n".join(paragraphs)


def _with_entries(text: str, names: Collection[str]) -> str:
    """A paragraph: the text before its entries, the entries, and the text after them."""
    starts = [
        found
        for found in ENTRY.finditer(text)
        if set(found[1].replace("`", "").split(", ")) <= set(names)
    ]
    if not starts:
        return text
    ends = [*(found.start() for found in starts[1:]), len(text)]
    entries = [
        f"- `{found[1].replace('`', '')}`: {text[found.end() : end].strip()}"
        for found, end in zip(starts, ends, strict=True)
    ]
    last, *behind = AFTER_ENTRIES.split(entries[-1], maxsplit=1)
    before = text[: starts[0].start()].strip()
    pieces = [before, "\n".join([*entries[:-1], last]), *behind]
    return "\n\n".join(piece for piece in pieces if piece)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
