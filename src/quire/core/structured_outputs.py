"""The form that an answer must have: JSON schema, regular expression, choice or grammar.

Plain data, as the caller gives it. `text.grammars` compiles this form into a grammar and token
masks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """One form that the whole answer obeys; exactly one of the first six fields is given.

    Raises InvalidRequestError that names the field.
    """

    #: A JSON schema, as an object or as JSON text.
    json: str | Mapping[str, Any] | None = None
    #: A regular expression that the whole answer matches.
    regex: str | None = None
    #: The allowed answers; the answer is one of these texts.
    choice: Sequence[str] | None = None
    #: A grammar in EBNF, in the dialect of Lark or GBNF.
    grammar: str | None = None
    #: True allows any JSON object.
    json_object: bool | None = None
    #: Parts between tags that obey schemas of their own, as an object or as JSON text.
    structural_tag: str | Mapping[str, Any] | None = None
    #: Whether JSON is written without optional white space.
    disable_any_whitespace: bool = False
    #: Whether an object may only have properties that the schema names.
    disable_additional_properties: bool = False
    #: A regular expression for the white space between the parts of JSON; None allows a space, or a
    #: line break with up to 32 blanks.
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {' and '.join(given) or 'none'} of {', '.join(KINDS)};"
                " give exactly one",
                "structured_outputs",
            )
