"""What an answer must look like: a JSON schema, a regular expression, a choice, a grammar.

Plain data, as the caller gives it. `text.grammars` makes a grammar of it, and masks of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """One form that the whole answer obeys; exactly one of the first six is given.

    json: a JSON schema, as an object or as JSON text. regex: the answer matches it as a whole.
    choice: the answer is one of these texts. grammar: EBNF, in the dialect of Lark or GBNF.
    json_object: any JSON object. structural_tag: parts between tags that obey schemas of their
    own, as an object or as JSON text.
    disable_any_whitespace: JSON is written without optional white space.
    disable_additional_properties: an object has no properties but those that the schema names.
    whitespace_pattern: a regular expression for what may stand between the parts of JSON; None: a
        space, or a line break with up to 32 blanks.

    Raises InvalidRequestError that names the field.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {' and '.join(given) or 'none'} of {', '.join(KINDS)};"
                " give exactly one",
                "structured_outputs",
            )
