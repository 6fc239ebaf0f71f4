"""Selects a model's dialect (format of reasoning and tool calls) from its files and options.

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
    """A model's dialect, and the source that determined it."""

    dialect: Dialect
    #: The option or setting that determined the dialect, as a phrase for the log.
    source: str
    #: Why the model's response template can't be used; None if it is used, missing, or overridden
    #: by `name`.
    refusal: str | None = None


def model_dialect(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    tokenizer_fields: Mapping[str, Any],
    name: str | None = None,
    reasoning_name: str | None = None,
) -> ModelDialect:
    """The dialect called `name` if that is given, else the dialect in the model's response
    template, else the one recognized by the chat template.

    `tokenizer_fields` are the fields of tokenizer_config.json. `name`, `reasoning_name` and the
    errors are those of `find_dialect`.
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
