"""Plans the memory of a model's tower, and makes the store of contents, which loads it.

A tower encodes images on the model's device. Of several ranks, rank 0 has it. Called by
`rank_build`.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from quire.assembly.device_setup import DeviceSetup, dense_methods
from quire.attention.interface import AttentionBackend
from quire.distributed.group import ProcessGroup
from quire.errors import ConfigurationError
from quire.layers.operator_module import use_operators
from quire.models.checkpoints.loader import ONE_THREAD, Reading
from quire.models.config import ModelConfig
from quire.models.interface import CausalLM, TextModel
from quire.models.vision.slices import use_kernels
from quire.models.vision.towers import TowerSource
from quire.models.vision.vision_tower import Slices, VisionTower, finish
from quire.options.engine_options import EngineOptions
from quire.runtime.contents.content_slots import StepContents
from quire.runtime.contents.content_store import ContentStore, max_slots
from quire.runtime.contents.ranked_contents import EmbeddingShape, RankedContents


@dataclass(frozen=True, slots=True)
class VisionMemory:
    """The memory that images take beside the language model, in bytes."""

    weight_bytes: int
    #: Maximum bytes of the cached embeddings.
    cache_bytes: int
    #: Maximum bytes of the embeddings in the slots of all ranks that the cache may have forgotten.
    slot_bytes: int

    @property
    def embedding_bytes(self) -> int:
        """Maximum bytes of all embeddings."""
        return self.cache_bytes + self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """All of it, except for the inputs of running requests."""
        return self.weight_bytes + self.embedding_bytes

    def of_rank(self, rank: int, num_ranks: int) -> "VisionMemory":
        """The part of one rank, on a device of its own."""
        if rank:
            return VisionMemory(0, 0, self.slot_bytes // num_ranks)
        return replace(self, slot_bytes=self.slot_bytes // num_ranks)

    def facts(self) -> dict[str, int | str | None]:
        """The facts that the engine reports; none without a tower."""
        if not self.total_bytes:
            return {}
        return {
            "vision_weight_bytes": self.weight_bytes,
            "encoder_cache_bytes": self.embedding_bytes,
        }


NO_VISION = VisionMemory(0, 0, 0)
"""Without a tower."""


def plan_vision(
    options: EngineOptions, source: TowerSource | None, setup: DeviceSetup
) -> VisionMemory:
    """The memory of the tower and of embeddings; nothing without a tower. Raises
    CheckpointError."""
    if source is None:
        return NO_VISION
    num_bytes = content_bytes(options, source, setup)
    num_slots = max_slots(options.encoder_cache_bytes, num_bytes)
    return VisionMemory(
        source.weight_bytes(setup.dtype, dense_methods(setup)),
        options.encoder_cache_bytes,
        num_slots * num_bytes * options.tensor_parallel_size,
    )


def content_bytes(options: EngineOptions, source: TowerSource, setup: DeviceSetup) -> int:
    """The bytes of the embeddings of the longest content that a prompt may have."""
    return source.max_content_values(options.max_model_len) * setup.dtype.itemsize


def most_step_tokens(
    options: EngineOptions, source: TowerSource | None, config: ModelConfig
) -> int:
    """Maximum number of tokens that one step computes.

    If a content must be computed in one step, it is computed even if it exceeds what the step may
    still take, which is at least one token.
    """
    most = options.max_num_batched_tokens
    if source is None or not config.reads_contents_whole:
        return most
    return most + source.max_content_tokens(options.max_model_len) - 1


def check_backend(
    source: TowerSource | None, config: ModelConfig, backend: AttentionBackend
) -> None:
    """Raise ConfigurationError if the backend can't compute the model's images."""
    if source is None or not config.reads_contents_whole or backend.serves_sight_ahead:
        return
    raise ConfigurationError(
        f"{type(backend).__name__} can't compute images of {config.wrapper}, whose tokens attend to"
        " each other in both directions; leave the option attention_backend out, or set"
        " language_model_only"
    )


def make_contents(
    options: EngineOptions,
    source: TowerSource,
    setup: DeviceSetup,
    model: TextModel,
    reading: Reading | None,
    group: ProcessGroup | None,
) -> tuple[ContentStore | None, StepContents]:
    """Make the store that encodes with the tower. Returns it, and the contents of the rank's rows.

    `model` is the loaded language model. The tower is loaded now, as `reading` says, or for the
    first content if `reading` is None; then `group` must be None. Of the ranks of a `group`, only
    rank 0 loads the tower and has a store. Raises CheckpointError.
    """
    # First, say how the tower is loaded, and how its store is made.
    assert isinstance(model, CausalLM), "a tower is only found for models that generate"
    look_up = model.embed

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        return look_up(token_ids.to(setup.device))

    def load(how: Reading = ONE_THREAD) -> Slices[VisionTower]:
        tower = yield from source.load(
            dtype=setup.dtype, device=setup.device, methods=dense_methods(setup), reading=how
        )
        use_operators(tower, setup.operators)
        use_kernels(tower, setup.kernels)
        tower.use_embedding(embed)
        return tower

    num_slots = max_slots(options.encoder_cache_bytes, content_bytes(options, source, setup))
    store: ContentStore | None = None
    make = partial(
        ContentStore,
        num_slots=num_slots,
        max_cache_bytes=options.encoder_cache_bytes,
        in_one_step=any(spec.sees_ahead for spec in model.attention_specs),
        device=setup.device,
    )
    # Then make the store, in rank 0 only, and share its results with the other ranks.
    if reading is None:
        assert group is None, "ranks load the tower together"
        store = make(source.outline(), load=load)
    elif group is None or group.rank == 0:
        store = make(finish(load(reading)))
    else:
        source.join_look_up(embed)
    if group is None:
        assert store is not None
        return store, store
    width = source.embedding_width()
    shape = EmbeddingShape(width, setup.dtype, setup.device)
    return store, RankedContents(group, store, num_slots, shape)
