"""Finds a model's dialect (its format of reasoning and tool calls) by chat template or name.

Called when a server or an `LLM` starts.
"""

import tomllib
from pathlib import Path

import msgspec

from quire.errors import ConfigurationError, did_you_mean, shown
from quire.registry import Registry
from quire.text.parsers.dialect import Dialect

_FOLDER = Path(__file__).parent / "dialects"
GENERIC = "json"
"""The dialect of models whose chat template does not support tools."""


def read_dialect(path: Path) -> Dialect:
    """Read a dialect's file. Raises OSError, and ValueError for contents that describe none."""
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Dialect)


def _read_folder() -> dict[str, Dialect]:
    found = map(read_dialect, sorted(_FOLDER.glob("*.toml")))
    return {dialect.name: dialect for dialect in found}


DIALECTS: Registry[Dialect] = Registry("dialect", _read_folder)
"""All dialects, each under its `name`."""


def dialect_names(*, for_reasoning: bool = False) -> dict[str, Dialect]:
    """The accepted names for the format of calls (or of reasoning), with their dialects: each
    dialect's name and its aliases. Raises ConfigurationError if two dialects have one name."""
    found: dict[str, Dialect] = {}
    for name, dialect in DIALECTS.items():
        aliases = dialect.reasoning_aliases if for_reasoning else dialect.aliases
        own = (name,) if dialect.has_reasoning or not for_reasoning else ()
        for each in (*own, *aliases):
            if found.setdefault(each, dialect) is not dialect:
                raise ConfigurationError(
                    f"the dialects {found[each].name!r} and {name!r} both have the name {each!r};"
                    " give one of them another"
                )
    return found


def find_dialect(
    template_source: str | None,
    name: str | None = None,
    reasoning_name: str | None = None,
    own: Dialect | None = None,
) -> Dialect:
    """The dialect called `name` if that is given, else `own`, else the one recognized by the chat
    template.

    `template_source` is None if the model has no template. `reasoning_name`, if given, is a dialect
    whose format of reasoning replaces that of the result. `own` is the dialect in the model's
    response template, or None. For an unrecognized template, the generic dialect is used: reasoning
    in <think>, and calls only where a request forces them. Raises ConfigurationError for an unknown
    name.
    """
    if name is not None:
        dialect = _named(name, for_reasoning=False)
    else:
        dialect = own or _recognised(template_source or "")
    if reasoning_name is None:
        return dialect
    other = _named(reasoning_name, for_reasoning=True)
    if other.channels is not None or dialect.channels is not None:
        if other.name != dialect.name:
            raise ConfigurationError(
                f"the reasoning of {reasoning_name!r} can't be combined with the calls of"
                f" {dialect.name!r}: one of them writes both in channels; give both the same name"
            )
        return dialect
    return msgspec.structs.replace(
        dialect,
        reasoning=other.reasoning,
        special_tokens=dialect.special_tokens | other.special_tokens,
    )


def _named(name: str, *, for_reasoning: bool) -> Dialect:
    known = dialect_names(for_reasoning=for_reasoning)
    if name in known:
        return known[name]
    what = "reasoning" if for_reasoning else "tool calls"
    raise ConfigurationError(
        f"{shown(name)} is not a dialect of {what}{did_you_mean(name, known)}; known names:"
        f" {', '.join(sorted(known))}"
    )


def _recognised(template_source: str) -> Dialect:
    """The dialect whose words all occur in the template. If there are several, the one with the
    longest words in total; if there is none, the generic dialect."""
    best, most = DIALECTS.get(GENERIC), 0
    for _, dialect in DIALECTS.items():
        for words in dialect.template_words:
            size = sum(map(len, words))
            if size > most and all(word in template_source for word in words):
                best, most = dialect, size
    return best
