"""The interface of attention backends: `plan` once a step, then `run` for each layer.

K and V of a step's tokens are written into the blocks first. Attention then reads only stored K and
V, even for the step's own tokens, so a quantized KV format gives the same result for all chunkings
of a prompt. Only the backend knows the layout inside a page.

To add a backend, add a file here that implements `AttentionBackend`, and a line in `backends.py`.

A latent layer (multi-head latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1) stores one
vector per token. The vector is the key of each query head, and its first elements are the value.
The model applies each head's key projection to the query and its value projection to the result. It
does so in prefill and in decode, so a token's result is the same in both phases.

Shapes: T tokens and S sequences of the step. R rows of the block tables, N blocks of B tokens.
Hq query heads, Hkv KV heads, D head size, Dv value size (D in most layers).
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from quire.attention.kv_format import KVFormat
from quire.errors import ConfigurationError
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.rotary import rotate, rotate_queries


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The definition of attention in one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: The factor by which q·k is multiplied.
    scale: float
    #: The number of keys that a query sees, including its own token's; None means all earlier keys.
    window: int | None = None
    #: Scores become soft_cap * tanh(score / soft_cap); None leaves scores unchanged.
    soft_cap: float | None = None
    #: Whether the softmax includes a learned logit per query head, whose value vector is zero.
    has_sinks: bool = False
    #: If False, each query sees all tokens of its sequence, as in encoders.
    causal: bool = True
    #: Whether a query of a causal layer sees all keys before its `AttentionBatch.visible_ends`, so
    #: that each query of an image sees the whole image.
    sees_ahead: bool = False
    #: None if V is stored beside K. Otherwise the layer is latent: its one KV head stores head_dim
    #: elements per token. These are the key, and the first value_dim of them are the value.
    value_dim: int | None = None
    #: The number of elements of a V head if it is below head_dim; None if it equals head_dim.
    #: Pages store a shorter head with zeros appended, up to head_dim elements.
    v_head_dim: int | None = None

    @property
    def output_dim(self) -> int:
        """Dv, the number of elements of a head's result."""
        return self.value_dim or self.v_head_dim or self.head_dim

    def with_zeros(self, v: torch.Tensor) -> torch.Tensor:
        """v [T, Hkv, Dv] -> [T, Hkv, D], the stored form, with zeros appended to each head."""
        return filled_up(v, self.head_dim)


@dataclass(slots=True)
class GroupBatch:
    """The places in one KV group where the K and V of a step's sequences are stored.

    Rows of the table may name the same blocks, for example those of branches, or of requests with a
    common prompt. No two sequences of a step write to the same block. A backend may read a shared
    block once for all sequences that share it; results don't depend on whether it does.
    """

    #: [R, most blocks of a sequence] int32, the persistent table of all rows. It is the same memory
    #: in every step, so no copies grow with the context. `AttentionBatch.rows` selects the step's
    #: rows. Entries after a sequence's last block or outside all windows (-1) are never read.
    block_tables: torch.Tensor
    #: [T] int64, block id * B + offset, where each token's K and V are written; -1 for a padding
    #: token, whose K and V are not written.
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class MixedSize:
    """The sizes of a mixed step that is captured once and replayed for all steps that fit.

    In a mixed step, some sequence computes several tokens: a chunk of a prompt, or drafts.
    """

    #: The number of the step's tokens, including padding at the end.
    num_tokens: int
    #: The most sequences of the step.
    num_seqs: int
    #: The most tokens of a sequence, as far as block tables have room.
    max_context: int


PlanVariant = tuple[int, ...]
"""Names the kernels that a plan launches. Mixed steps of one size are captured once a variant."""


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """The plan of a captured mixed step, which `AttentionBackend.write_plan` made on the host."""

    size: MixedSize
    variant: PlanVariant
    #: [W] int64, the plan on the device. Later steps of this size overwrite it.
    words: torch.Tensor


@dataclass(slots=True)
class AttentionBatch:
    """The sequences of one step. Decoding sequences (one token each) come first.

    The queries of sequence s have the positions context_lens[s] - query_len[s] onward.

    The tensors of a captured step are padded to a fixed number of decoding sequences; the lists are
    not. A padding sequence has a context of 0 tokens, an arbitrary row, and an output that is not
    read. Only backends with `serves_graphs` get such batches. The tensors of a captured mixed step
    are padded to a `MixedSize`, with single tokens whose output is not read.
    """

    #: [S + 1] int32, the first token of each sequence in the step; query_start[S] == T.
    query_start: torch.Tensor
    #: [S] int32, the number of tokens of each sequence whose K and V are stored, including those
    #: that this step writes.
    context_lens: torch.Tensor
    #: [S] int64, each sequence's row of the groups' block tables; no two are equal.
    rows: torch.Tensor
    #: The query lengths, context_lens and rows as lists on the host, so that planning copies
    #: nothing from the device.
    query_lens_list: list[int]
    context_lens_list: list[int]
    rows_list: list[int]
    #: The number of decoding sequences.
    num_decodes: int
    #: One entry per KV group.
    groups: tuple[GroupBatch, ...]
    #: [T] int32, ascending within a sequence: the position after the last key that each query sees
    #: in layers that see ahead. None if each sees the keys up to its own token, as in other layers.
    #: Only backends with `serves_sight_ahead` get it.
    visible_ends: torch.Tensor | None = None
    #: `visible_ends` on the host.
    visible_ends_list: list[int] | None = None
    #: The same step in the host's memory, if the tensors are on another device; None if they are in
    #: the host's memory themselves.
    host: "AttentionBatch | None" = None
    #: The plan of a captured mixed step: `plan` and `run` must read its words instead of the lists.
    #: None in other steps. Only backends with `serves_mixed_graphs` get it.
    mixed: MixedPlan | None = None


@dataclass(frozen=True, slots=True)
class KVPageFormat:
    """A backend's format of one layer's K and V inside a block."""

    #: The number of tokens in a block.
    block_size: int
    kv_format: KVFormat
    #: The size in bytes of one layer's part of a block, including scales and alignment.
    bytes_per_layer: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored elements, or of their codes."""
        return self.kv_format.keys.dtype


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The memory of one layer's K and V."""

    #: [N, bytes_per_layer] uint8, a strided view into the pool's storage. `pages[block]` is the
    #: layer's part of that block.
    pages: torch.Tensor
    #: The index of the layer's KV group.
    group: int
    #: The layer's format, from the backend's `page_format`.
    format: KVPageFormat


MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 2048


def page_format_of(
    spec: AttentionSpec, block_size: int, kv_format: KVFormat, served: Collection[str] | None = None
) -> KVPageFormat:
    """The pages of K and V, or of a latent layer's vectors: the format's arrays, without padding.

    Raises ConfigurationError for a format whose name is not in `served` (None has all names), and
    for an invalid block size, head count or value size.
    """
    is_power_of_two = block_size > 0 and block_size & (block_size - 1) == 0
    if not is_power_of_two or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigurationError(
            f"block_size={block_size} is not a power of two from {MIN_BLOCK_SIZE} to "
            f"{MAX_BLOCK_SIZE}; choose one, 16 is the default"
        )
    if served is not None and kv_format.name not in served:
        raise ConfigurationError(
            f"KV format {kv_format.name} can't be served; choose one of {', '.join(served)}"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigurationError(
            f"num_heads={spec.num_heads} is not a multiple of num_kv_heads="
            f"{spec.num_kv_heads}; every KV head must serve as many query heads"
        )
    if spec.v_head_dim is not None and not 0 < spec.v_head_dim <= spec.head_dim:
        raise ConfigurationError(
            f"v_head_dim={spec.v_head_dim} is not from 1 to head_dim={spec.head_dim}: pages have as"
            " much room for a head of V as for one of K"
        )
    if spec.value_dim is not None:
        _check_latent(spec, spec.value_dim)
    vectors = kv_format.vectors(is_latent=spec.value_dim is not None)
    head_bytes = sum(vector.num_bytes(spec.head_dim) for vector in vectors)
    return KVPageFormat(block_size, kv_format, block_size * spec.num_kv_heads * head_bytes)


def _check_latent(spec: AttentionSpec, value_dim: int) -> None:
    if spec.num_kv_heads != 1:
        raise ConfigurationError(
            f"num_kv_heads={spec.num_kv_heads} is not 1, but a latent layer has one KV head"
        )
    if not 0 < value_dim <= spec.head_dim:
        raise ConfigurationError(f"value_dim={value_dim} is not from 1 to head_dim={spec.head_dim}")


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """The requirements that a new backend has to meet."""

    #: torch's name of the device, such as "cpu" or "cuda".
    device_type: str
    #: The engine's native kernels; None if the engine computes without them.
    kernels: NativeKernels | None
    #: Whether each row's result must be independent of other rows.
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """The structures with which a native program calls a backend's C++ attention directly.

    The addresses of `step` and `layers` don't change after `bind`.
    """

    #: The step that `plan` prepared, without token ids and positions, which attention doesn't need.
    step: abi.Step
    #: The bound layers.
    layers: ctypes.Array[abi.AttentionLayer]


class AttentionBackend(ABC):
    """Attention over paged memory. One object serves all layers of a model."""

    #: Whether `run` may be captured in a CUDA graph if all sequences decode. If True, `run` reads
    #: only tensors, so one capture can be replayed for all steps with the same number of sequences.
    serves_graphs = False
    #: Whether mixed steps may be captured, too, with plans that `write_plan` makes.
    serves_mixed_graphs = False
    #: Whether `plan` obeys `AttentionBatch.visible_ends`.
    serves_sight_ahead = False
    #: The third-party package that computes attention; its version may affect results. None if
    #: quire or torch computes attention.
    package: str | None = None

    @classmethod
    def create(cls, request: BackendRequest) -> "AttentionBackend":
        """A new backend, not yet bound. Raises ConfigurationError if it can't run or can't meet the
        request. Unless overridden, a backend can't be batch-invariant."""
        if request.batch_invariant:
            raise ConfigurationError(f"{cls.__name__} can't obey batch_invariant=True")
        return cls()

    @property
    def native(self) -> NativeAttention | None:
        """The structures for a native program; None if attention can only be computed by `run`."""
        return None

    @staticmethod
    def page_format(spec: AttentionSpec, block_size: int, kv_format: KVFormat) -> KVPageFormat:
        """The page format for a layer. Raises ConfigurationError if the layer can't be served."""
        return page_format_of(spec, block_size, kv_format)

    @abstractmethod
    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        """Attach the allocated memory. Called once; `layers[i]` belongs to `specs[i]`."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Do the part of a step's work that does not depend on any layer's q, k and v."""

    def most_plan_variants(self, specs: Iterable[AttentionSpec]) -> int:
        """The most variants of `write_plan` for one size, if the layers are `specs`. They need not
        be bound."""
        raise NotImplementedError

    def num_plan_words(self, size: MixedSize) -> int:
        """The most 64-bit words that `write_plan` writes for a step of this size."""
        raise NotImplementedError

    def write_plan(
        self, batch: AttentionBatch, size: MixedSize, words: npt.NDArray[np.int64]
    ) -> tuple[PlanVariant, int]:
        """Plan a mixed step on the host, by the lists of `batch`, which fit `size`.

        `words` are zeros. Returns the variant and the number of words from the start that the
        device needs. Only backends with `serves_mixed_graphs` plan so.
        """
        raise NotImplementedError

    @abstractmethod
    def run(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write the inputs' k and v into the blocks, then attend with q.

        Returns [T, Hq, Dv] in q's dtype.
        """


AttentionCall = Callable[[int, AttentionInputs], torch.Tensor]
"""The function that computes a model's attention: `AttentionBackend.run` of the planned step."""


def filled_up(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """heads [..., at most D] -> [..., D], with zeros appended."""
    missing = head_dim - heads.shape[-1]
    return heads if missing == 0 else functional.pad(heads, (0, missing))


def rotated(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The inputs' q and k with their rotation applied, in torch. The inputs may be overwritten."""
    q, k, _, _, rotation = inputs
    if rotation is None:
        return q, k
    if k is None:
        return rotate_queries(q, rotation), None
    return rotate(q, k, rotation)
