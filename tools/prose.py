"""Counts what a reader stumbles over in the source: `python -m tools.prose [FOLDERS]`.

The function of a rule yields its findings. `--list RULE` prints the places of one rule.
`--sample 25` prints the docstrings of that many random files, for a reader who knows none of them.
"""

import argparse
import ast
import builtins
import keyword
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools.syntax import parsed, statements

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "quire"

#: Maximum number of words of a sentence in a docstring or comment.
MAX_WORDS = 35

#: From this share of function words on, a sentence has too few words that name anything.
MAX_FUNCTION_WORDS = 0.35

#: Sentences with fewer words are not measured by that share.
MIN_WORDS_OF_SHARE = 8

#: A function with more lines than this has a comment for each of its steps.
MAX_LINES_WITHOUT_STEPS = 40

#: First words of a docstring or comment that delay its subject: free relatives and fragments.
POOR_BEGINNING = re.compile(
    r"(What|Whatever|Whoever|Those|Of|One that|That which|Nothing (else )?(is|of))\b(?!.*\?)"
)

#: Phrases that stand for a number, a person or a thing that is not named.
POOR_PHRASES = re.compile(
    r"\bof whoever\b|\bso many\b(?! that)|\bthose behind\b|\bas it may\b"
    r"|\bone of no\b|\bof one that\b|\bwhat is of\b",
    re.IGNORECASE,
)

#: Pronouns, and the small words that compare, count and negate: they name nothing by themselves.
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        it its itself they them their theirs this that these those what which who whom whose
        whatever whoever one ones other others another each all any some none nothing something
        such same so as not no nor there here then than more most many few both
        """,
    )
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule."""

    #: Path below the repository's root.
    path: str
    line: int
    #: The sentence, phrase or name that was found.
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Docstring:
    """A docstring with the definition that it belongs to."""

    node: ast.Module | ast.ClassDef | Function
    line: int
    text: str

    @property
    def constant(self) -> ast.expr:
        """The syntax node of its string."""
        statement = self.node.body[0]
        assert isinstance(statement, ast.Expr)
        return statement.value

    def sentences(self) -> Iterator[str]:
        """Its sentences, without code blocks, tables and what backticks enclose."""
        for paragraph in re.split(r"\n\s*\n", self.text):
            lines = paragraph.splitlines()
            if any(re.match(r"( {4,}|>>>|[-*|] )", line) for line in lines[:1]):
                continue
            flat = re.sub(r"`[^`]*`", "CODE", " ".join(paragraph.split()))
            yield from (part for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", flat) if part)


@dataclass(frozen=True)
class Comment:
    """A comment: consecutive lines of their own, or the end of a line of code."""

    line: int
    text: str

    def sentences(self) -> Iterator[str]:
        """Its sentences."""
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`])", self.text)


@dataclass(frozen=True)
class SourceFile:
    """A Python file of the package."""

    path: str
    source: str

    @cached_property
    def syntax(self) -> ast.Module:
        return parsed(self.source)

    @cached_property
    def docstrings(self) -> list[Docstring]:
        found = []
        for node in (self.syntax, *statements(self.syntax)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    found.append(Docstring(node, node.body[0].lineno, text))
        return found

    @cached_property
    def comments(self) -> list[Comment]:
        found: list[Comment] = []
        block: list[str] = []
        for number, line in enumerate([*self.source.splitlines(), ""], 1):
            if text := re.match(r"\s*#:? ?(.*)", line):
                block.append(text[1])
            elif block:
                found.append(Comment(number - len(block), " ".join(block)))
                block = []
            if not block and (text := re.search(r"  # ([^\"']*)$", line)):
                found.append(Comment(number, text[1]))
        return found

    @property
    def texts(self) -> list[Docstring | Comment]:
        """Docstrings and comments."""
        return [*self.docstrings, *self.comments]

    @cached_property
    def functions(self) -> list[Function]:
        return [
            node
            for node in statements(self.syntax)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]


def source_files(folders: list[Path] | None = None) -> list[SourceFile]:
    """The Python files below the folders, sorted by path."""
    paths = sorted({path for folder in folders or [SOURCES] for path in folder.rglob("*.py")})
    return [SourceFile(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def poor_beginnings(file: SourceFile) -> Iterator[Finding]:
    """Docstrings and comments whose first words delay the subject."""
    for each in file.texts:
        if POOR_BEGINNING.match(each.text):
            yield Finding(file.path, each.line, each.text.split("\n\n")[0])


def poor_phrases(file: SourceFile) -> Iterator[Finding]:
    """Phrases that stand for something that is not named, in docstrings and comments."""
    for number, line in enumerate(file.source.splitlines(), 1):
        if POOR_PHRASES.search(line):
            yield Finding(file.path, number, line.strip())


def long_sentences(file: SourceFile) -> Iterator[Finding]:
    """Sentences of docstrings and comments with more than MAX_WORDS words."""
    for each in file.texts:
        for sentence in each.sentences():
            if len(sentence.split()) > MAX_WORDS:
                yield Finding(file.path, each.line, sentence)


def function_word_share(sentence: str) -> float:
    """The share of function words among the words of a sentence."""
    words = re.findall(r"[A-Za-z']+", sentence)
    return sum(word.lower() in FUNCTION_WORDS for word in words) / max(len(words), 1)


def vague_sentences(file: SourceFile) -> Iterator[Finding]:
    """Sentences of docstrings and comments that are function words for a third and more."""
    for each in file.texts:
        for sentence in each.sentences():
            is_measured = len(sentence.split()) >= MIN_WORDS_OF_SHARE
            if is_measured and function_word_share(sentence) >= MAX_FUNCTION_WORDS:
                yield Finding(file.path, each.line, sentence)


def fields_in_class_docstrings(file: SourceFile) -> Iterator[Finding]:
    """Fields that a class docstring explains as "name: ..." instead of a comment at the field."""
    for docstring in file.docstrings:
        if isinstance(docstring.node, ast.ClassDef):
            fields = _fields(docstring.node)
            for name in re.findall(
                r"(?:^|[\s(,`])([a-z_][a-z0-9_]*)`?(?:, [a-z0-9_, ]+)?: ", docstring.text
            ):
                if name in fields:
                    yield Finding(file.path, docstring.line, f"{docstring.node.name}.{name}")


def _fields(node: ast.ClassDef) -> set[str]:
    """Annotated names of a class body, its slots, and what `__init__` takes or sets."""
    fields = set()
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            fields.add(item.target.id)
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "__slots__":
            fields |= set(re.findall(r"'(\w+)'", ast.unparse(item.value)))
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            arguments = item.args
            fields |= {a.arg for a in [*arguments.args, *arguments.kwonlyargs]} - {"self"}
            fields |= set(re.findall(r"self\.(\w+)(?::[^=\n]+)? = ", ast.unparse(item)))
    return fields


def functions_without_steps(file: SourceFile) -> Iterator[Finding]:
    """Long functions without a single comment."""
    lines = file.source.splitlines()
    for node in file.functions:
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        body = lines[node.lineno : node.end_lineno]
        if length > MAX_LINES_WITHOUT_STEPS and not any(re.match(r"\s*#", line) for line in body):
            yield Finding(file.path, node.lineno, f"{node.name} ({length} lines)")


def stale_names(files: list[SourceFile]) -> Iterator[Finding]:
    """Names in backticks that occur nowhere in the code: what they named has gone."""
    known = _words_of_code(files)
    for file in files:
        for docstring in file.docstrings:
            for quoted in re.findall(r"`([^`\n]+)`", docstring.text):
                name = quoted.removesuffix("()")
                if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*(\.[A-Za-z_][A-Za-z_0-9]*)*", name):
                    continue
                missing = [part for part in name.split(".") if part not in known]
                if missing:
                    yield Finding(file.path, docstring.line, quoted)


def _words_of_code(files: list[SourceFile]) -> set[str]:
    """Identifiers of the Python and C++ sources, words of their strings, modules and folders."""
    words: set[str] = set(dir(builtins)) | set(keyword.kwlist) | set(sys.stdlib_module_names)
    for file in files:
        words |= set(re.split(r"\W", file.path))
        lines = file.source.splitlines()
        for docstring in file.docstrings:
            constant = docstring.constant
            for number in range(constant.lineno, (constant.end_lineno or constant.lineno) + 1):
                lines[number - 1] = ""
        code = (line for line in lines if not line.lstrip().startswith("#"))
        words |= set(re.split(r"\W", "\n".join(code)))
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix in {".cpp", ".h", ".toml"}:
            words |= set(re.split(r"\W", path.read_text()))
    return words


RULES: dict[str, Callable[[SourceFile], Iterator[Finding]]] = {
    "poor-beginnings": poor_beginnings,
    "poor-phrases": poor_phrases,
    "long-sentences": long_sentences,
    "vague-sentences": vague_sentences,
    "fields-in-class-docstrings": fields_in_class_docstrings,
    "functions-without-steps": functions_without_steps,
}


def findings(rule: str, files: list[SourceFile]) -> list[Finding]:
    """All places in the files that break a rule of RULES, or "stale-names"."""
    if rule == "stale-names":
        return list(stale_names(files))
    return [finding for file in files for finding in RULES[rule](file)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="what is read (src/quire)")
    parser.add_argument(
        "--list", choices=[*RULES, "stale-names"], help="print the places of this rule"
    )
    parser.add_argument("--sample", type=int, default=0, help="print docstrings of N random files")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args(arguments)
    files = source_files([folder.resolve() for folder in options.folders])
    if options.list:
        for finding in findings(options.list, files):
            print(finding)
        return 0
    if options.sample:
        for file in random.Random(options.seed).sample(files, min(options.sample, len(files))):
            print(f"## {file.path}")
            for docstring in file.docstrings:
                print(f"{docstring.line}: {docstring.text}\n")
        return 0
    _print_counts(files)
    return 0


def _print_counts(files: list[SourceFile]) -> None:
    lines = [len(file.source.splitlines()) for file in files]
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for file in files
        for node in file.functions
    ]
    comments = sum(
        bool(re.match(r"\s*#", line)) for file in files for line in file.source.splitlines()
    )
    sentences = sum(len(list(d.sentences())) for file in files for d in file.docstrings)
    print(f"{len(files):7} files, {sum(lines)} lines, {comments} of them comments")
    print(f"{max(lengths, default=0):7} lines in the longest function")
    print(f"{sum(len(f.docstrings) for f in files):7} docstrings, {sentences} sentences")
    for name in [*RULES, "stale-names"]:
        print(f"{len(findings(name, files)):7} {name}")


if __name__ == "__main__":
    sys.exit(main())
