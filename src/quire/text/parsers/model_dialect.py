"""The dialect of a model, from its folder and the options.

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
    """source: what it was found by. refusal: why the model's response template is not used; None:
    it is, or was not wanted, or there is none."""

    dialect: Dialect
    source: str
    refusal: str | None = None


def model_dialect(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    tokenizer_fields: Mapping[str, Any],
    name: str | None = None,
    reasoning_name: str | None = None,
) -> ModelDialect:
    """What the name says, or else the model's response template, or else its chat template.

    tokenizer_fields: as in tokenizer_config.json. name, reasoning_name: as `find_dialect` takes
    them; it also says what is raised.
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
