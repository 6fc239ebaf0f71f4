"""Selects the dialect of a model by its folder and the options.

Called when a server starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.text.chat_template import ChatTemplate
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import find_dialect
from quire.text.parsers.mark_patterns import UnmappableError
from quire.text.parsers.response_template import read_response_template
from quire.text.parsers.template_fit import fitted
from quire.text.tokenizer import Tokenizer

_FIELD = "response_template"


@dataclass(frozen=True, slots=True)
class ModelDialect:
    """A model's dialect, and how it was found."""

    dialect: Dialect
    #: The option or file that determined it, in words.
    source: str
    #: Why the model's response template is not used; None if it is used, not wanted or missing.
    refusal: str | None = None


def model_dialect(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    tokenizer_fields: Mapping[str, Any],
    name: str | None = None,
    reasoning_name: str | None = None,
) -> ModelDialect:
    """The dialect called `name`, or else that of the model's response template, or else that of its
    chat template.

    `tokenizer_fields` are those of tokenizer_config.json. The names and errors are those of
    `find_dialect`.
    """
    recognised = find_dialect(template.source_for_tools)
    own, source, refusal = None, "its chat template", None
    if name is not None:
        source = f"--tool-call-parser {name}"
    elif tokenizer_fields.get(_FIELD) is not None:
        try:
            own = read_response_template(
                tokenizer_fields[_FIELD],
                recognised,
                lambda text: bool(tokenizer.special_ids_of([text])),
            )
            source = f"its {_FIELD}"
        except UnmappableError as error:
            refusal = f"the model's {_FIELD} is not used: {error}"
    found = find_dialect(template.source_for_tools, name, reasoning_name, own)
    return ModelDialect(fitted(found, template.render), source, refusal)
