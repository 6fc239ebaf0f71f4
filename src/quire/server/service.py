"""What every HTTP handler needs: the engine, the text side of the model, and its name.

Made by `launch`, read by the API families. Imports no torch.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar, cast

from fastapi import Request as HTTPRequest

from quire.engine.async_engine import AsyncEngine
from quire.engine.inputs import InputProcessor
from quire.errors import QuireError
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

LONG_TEXT_CHARACTERS = 8192
"""Longer texts are tokenized in a thread: some milliseconds during which other streams go on."""

P = ParamSpec("P")
R = TypeVar("R")


class UnknownModelError(QuireError):
    """The request names a model that is not served here."""

    http_status = 404
    code = "model_not_found"
    param = "model"


@dataclass(frozen=True, slots=True)
class Service:
    """One served model. seeds: draws the seed of each request that brings none."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model_name: str
    seeds: random.Random = field(default_factory=random.Random)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def inputs(self) -> InputProcessor:
        return InputProcessor(self.tokenizer, self.engine.limits)

    def draw_seed(self) -> int:
        return self.seeds.getrandbits(64)

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is the served model, or left out."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(
                f"the model {name!r} is not served here; this server has {self.model_name!r} "
                "(see /v1/models)"
            )


def service_of(http: HTTPRequest) -> Service:
    """The service that `create_app` was given."""
    return cast(Service, http.app.state.service)


async def call_for_text(
    num_characters: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call `function`, whose time grows with the text: in a thread when there is much of it."""
    if num_characters < LONG_TEXT_CHARACTERS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
