"""Requests with images for engines of tiny models, and transformers' answers to them.

To add a family, add an entry to `IMAGE_FAMILIES`.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.models.vision import (
    gemma3_files,
    gemma4_files,
    internvl_files,
    lfm2_vl_files,
    pixtral_files,
    qwen3_vl_files,
)
from tests.models.vision.idefics3_files import (
    IMAGE_TOKEN,
    TILE_TOKENS,
    make_tile,
    save_smolvlm,
)
from transformers import PreTrainedModel

from quire.core.adapters import AdapterRef
from quire.core.content_spans import Content, ContentSpan
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine

OTHER_SIZE = 100

Part = list[int] | int
"""Tokens of a prompt, or the seed of an image."""


@dataclass(frozen=True)
class ImageFamily:
    """How a family's images are made and placed in prompts."""

    #: Writes the model to a folder, and returns transformers' model of it.
    save: Callable[[Path], PreTrainedModel]
    #: The input of the tower for the image of a seed, and its grid.
    make: Callable[[int], tuple[torch.Tensor, tuple[int, int, int]]]
    #: The ids that stand for one image.
    token_ids: list[int]
    #: The arguments of transformers' `forward` for the inputs of a prompt's images, and the ids of
    #: all tokens [1, T].
    arguments: Callable[[list[torch.Tensor], torch.Tensor], dict[str, Any]]
    #: The grid of a span; None for models whose positions have one axis.
    span_grid: tuple[int, int, int] | None = None
    #: The number of ids before and behind the placeholders in `token_ids`.
    num_around: int = 0
    #: Whether layers have states, which are kept at the last whole block of a prompt only.
    has_states: bool = False
    #: Whether some layers have windows, in KV groups of their own.
    has_windows: bool = False
    #: The family with images of another size, those of seeds from OTHER_SIZE on; None if all images
    #: of the family have one size.
    other: "ImageFamily | None" = None
    #: The number of blocks of 8 tokens with which sequences of `PROMPTS` are preempted.
    num_cramped_blocks: int = 12

    @property
    def num_placeholders(self) -> int:
        """Number of positions of the span of an image."""
        return len(self.token_ids) - 2 * self.num_around

    def of(self, seed: int) -> "ImageFamily":
        """The family with the size of an image."""
        return self.other if self.other is not None and seed >= OTHER_SIZE else self


def _qwen(name: str, grid: tuple[int, int, int] = (1, 4, 6), **fields: Any) -> ImageFamily:
    return ImageFamily(
        save=lambda folder: qwen3_vl_files.save(name, folder),
        make=lambda seed: (qwen3_vl_files.make_patches(grid, seed), grid),
        token_ids=qwen3_vl_files.token_ids(grid),
        arguments=lambda images, ids: qwen3_vl_files.arguments(images, ids, grid),
        span_grid=(1, grid[1] // 2, grid[2] // 2),
        num_around=1,
        **fields,
    )


def _pixtral(rows: int, columns: int, **fields: Any) -> ImageFamily:
    return ImageFamily(
        save=lambda folder: pixtral_files.save("mistral3", folder),
        make=lambda seed: (pixtral_files.make_image(2 * rows, 2 * columns, seed), (1, 1, 1)),
        token_ids=pixtral_files.token_ids(rows, columns),
        arguments=pixtral_files.arguments,
        **fields,
    )


IMAGE_FAMILIES = {
    "smolvlm": ImageFamily(
        save=save_smolvlm,
        make=lambda seed: (make_tile(seed), (1, 1, 1)),
        token_ids=[IMAGE_TOKEN] * TILE_TOKENS,
        arguments=lambda tiles, _: {"pixel_values": torch.stack(tiles)[None]},
    ),
    "mistral3": _pixtral(2, 3, other=_pixtral(3, 1)),
    "gemma3": ImageFamily(
        save=gemma3_files.save,
        make=lambda seed: (gemma3_files.make_image(seed), (1, 1, 1)),
        token_ids=gemma3_files.TOKEN_IDS,
        arguments=gemma3_files.arguments,
        num_around=1,
        num_cramped_blocks=26,
        has_windows=True,
    ),
    "gemma4": ImageFamily(
        save=gemma4_files.save,
        make=lambda seed: (gemma4_files.make_image(seed), (1, 1, 1)),
        token_ids=gemma4_files.TOKEN_IDS,
        arguments=gemma4_files.arguments,
        num_around=1,
        num_cramped_blocks=26,
        has_windows=True,
    ),
    "internvl": ImageFamily(
        save=internvl_files.save,
        make=lambda seed: (internvl_files.make_tile(seed), (1, 1, 1)),
        token_ids=[internvl_files.IMAGE] * internvl_files.TILE_TOKENS,
        arguments=internvl_files.arguments,
    ),
    "lfm2_vl": ImageFamily(
        save=lfm2_vl_files.save,
        make=lambda seed: (lfm2_vl_files.make_patches((1, 4, 6), seed), (1, 4, 6)),
        token_ids=lfm2_vl_files.token_ids((1, 4, 6)),
        arguments=lambda images, _: lfm2_vl_files.arguments(images, *[(1, 4, 6)] * len(images)),
        num_around=1,
        has_states=True,
        num_cramped_blocks=36,
    ),
    "qwen3_vl": _qwen("qwen3_vl", other=_qwen("qwen3_vl", (1, 6, 2))),
    "qwen3_5": _qwen(
        "qwen3_5", other=_qwen("qwen3_5", (1, 6, 2)), has_states=True, num_cramped_blocks=36
    ),
}


def text(seed: int, length: int) -> list[int]:
    """Random token ids that are no placeholders."""
    rng = random.Random(seed)
    return [rng.randrange(20, 1000) for _ in range(length)]


PROMPTS: dict[str, list[Part]] = {
    "in the middle": [text(1, 13), 1, text(2, 9)],
    "first": [1, text(3, 5)],
    "two": [text(1, 13), 1, 2, text(4, 6)],
    "two, exchanged": [text(1, 13), 2, 1, text(4, 6)],
    "the same twice": [text(1, 13), 2, text(5, 3), 2, text(6, 17)],
    "text": [text(1, 13), text(7, 20)],
}
"""Some begin alike, and two differ only in their images, which have equal sizes."""


def token_ids_of(family: ImageFamily, parts: Sequence[Part]) -> list[int]:
    """The token ids of a prompt, with placeholders."""
    return [
        token_id
        for part in parts
        for token_id in (family.of(part).token_ids if isinstance(part, int) else part)
    ]


def make_request(
    family: ImageFamily,
    name: str,
    parts: Sequence[Part],
    n: int = 1,
    adapter: AdapterRef | None = None,
    **params: Any,
) -> Request:
    """The request for a prompt. By default it is decoded greedily."""
    spans, contents, position = [], {}, 0
    for part in parts:
        if not isinstance(part, int):
            position += len(part)
            continue
        own = family.of(part)
        values, grid = own.make(part)
        stored = values.contiguous().numpy().tobytes()
        digest = hashlib.blake2b(stored, digest_size=16).hexdigest()
        first = position + own.num_around
        spans.append(ContentSpan(first, own.num_placeholders, digest, own.span_grid))
        contents[digest] = Content(digest, tuple(values.shape), stored, grid)
        position += len(own.token_ids)
    given = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0} | params
    return Request(
        name,
        token_ids_of(family, parts),
        DecodingParams(**given),
        n,
        adapter=adapter,
        content_spans=tuple(spans),
        contents=tuple(contents.values()),
    )


def requests_of(family: ImageFamily, n: int = 1, **params: Any) -> list[Request]:
    """A request for each of PROMPTS."""
    return [make_request(family, name, parts, n, **params) for name, parts in PROMPTS.items()]


Answers = dict[tuple[str, int], list[Any]]
"""Tokens and log-probabilities by request and branch."""


def answers_of(engine: Engine, requests: Sequence[Request]) -> Answers:
    """Run the requests together, and return what they get. Raises AssertionError for an error."""
    found: Answers = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            branch = found.setdefault((output.request_id, output.branch_index), [])
            entries = output.logprobs or [None] * len(output.token_ids)
            branch += zip(output.token_ids, entries, strict=True)
    return found


@torch.inference_mode()
def reference_logits(
    family: ImageFamily, model: PreTrainedModel, parts: Sequence[Part], answer: Sequence[int]
) -> torch.Tensor:
    """transformers' logits [len(answer), V] before each token of the answer."""
    prompt = token_ids_of(family, parts)
    values = [family.make(part)[0] for part in parts if isinstance(part, int)]
    ids = torch.tensor([[*prompt, *answer]])
    more = family.arguments(values, ids) if values else {}
    logits = model(input_ids=ids, **more).logits[0].float()
    return logits[len(prompt) - 1 : -1]
