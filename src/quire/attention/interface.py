"""The interface of attention backends: planned each step, run each layer.

K and V of a step's tokens are written into the blocks first; attention then reads only what is
stored, even for the token itself, so a compact KV format gives the same result however a prompt
was chunked. Only the backend knows the layout inside of a page.

To add a backend: one file here that implements `AttentionBackend`, one line in `backends.py`.

A latent layer (multi-head latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1) stores one
vector a token, which all query heads read as their key, and its first elements as their value. The
projections from the latent to each head's keys and values are absorbed by the model into its
queries and its output, in prefill as in decode: so a token's result does not depend on whether it
was computed in a prompt or alone.

Shapes: T tokens of the step, S sequences of the step, R rows of the block tables, Hq query heads,
Hkv KV heads, D head size, Dv value size (D in most layers), N blocks, B block size.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from quire.errors import ConfigurationError
from quire.kernels.cpu import abi
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.rotary import Rotation, rotate, rotate_queries


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention is in one layer.

    scale: multiplies q·k. soft_cap: scores become cap * tanh(score / cap).
    window: how many keys a query sees, itself included; None: all before it.
    has_sinks: a learned logit per query head joins the softmax and its value is zero.
    causal: False lets each query see all tokens of its sequence (encoders).
    value_dim: set, the layer is latent: there is one KV head, whose vector of head_dim elements a
        token is the key, and its first value_dim elements are the value; no V is stored. None: V
        is stored beside K.
    v_head_dim: elements of a head of V where that is stored and smaller than a head of q and k;
        zeros stand behind it in the pages, which are laid out as if it were as large. None: it is.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    causal: bool = True
    value_dim: int | None = None
    v_head_dim: int | None = None

    @property
    def output_dim(self) -> int:
        """Dv: elements of a head's result."""
        return self.value_dim or self.v_head_dim or self.head_dim

    def with_zeros(self, v: torch.Tensor) -> torch.Tensor:
        """v [T, Hkv, Dv] as it is stored, [T, Hkv, D]."""
        return filled_up(v, self.head_dim)


@dataclass(slots=True)
class GroupBatch:
    """Where one KV group's memory lies.

    block_tables: [R, most blocks of a sequence] int32, the persistent table of all rows, the same
        memory every step: nothing is copied that grows with the context. A step's sequences are at
        `AttentionBatch.rows`. Entries past a sequence's last block, those of other rows, and those
        that no query's window reaches (holes, -1) may hold anything and are never read. Rows may
        name the same blocks (branches, a common prompt); none of them is written by two of a step's
        sequences. A backend may read such a block once for all; no result depends on it.
    slot_mapping: [T] int64, block id * B + offset, where each token's K and V are written; -1 for a
        token of padding, whose K and V go nowhere.
    """

    block_tables: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(slots=True)
class AttentionBatch:
    """One step as attention sees it. Decoding sequences (one token each) come first.

    query_start: [S + 1] int32, first token of each sequence in the step; query_start[S] == T.
    context_lens: [S] int32, tokens of each sequence whose K and V exist after this step's write.
    rows: [S] int64, each sequence's row of the groups' block tables; no two are equal.
    query_lens_list, context_lens_list, rows_list: the same as Python numbers, for planning without
        a copy.
    num_decodes: the first so many sequences have exactly one query token.
    groups: one entry per KV group.

    The queries of sequence s stand at positions context_lens[s] - query_len[s] onward.

    The lists are of the sequences that there are. A captured step has more decoding ones in its
    tensors, up to a fixed number: those of padding have a context of 0 tokens, a row that may be
    any, and an output that is not read. Only backends that say `serves_graphs` are given such.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    rows: torch.Tensor
    query_lens_list: list[int]
    context_lens_list: list[int]
    rows_list: list[int]
    num_decodes: int
    groups: tuple[GroupBatch, ...]


@dataclass(frozen=True, slots=True)
class KVPageFormat:
    """How a backend lays out one layer's K and V inside a block.

    bytes_per_layer: of one block of one layer, scales and alignment included.
    """

    block_size: int
    dtype: torch.dtype
    bytes_per_layer: int


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Where one layer's K and V lie: `pages[block]` is that layer's part of the block, as bytes.

    pages: [N, bytes_per_layer] uint8, a strided view into the pool's storage.
    group: index of the layer's KV group.
    format: what the backend's `page_format` said for this layer.
    """

    pages: torch.Tensor
    group: int
    format: KVPageFormat


MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 2048


def plain_page_format(
    spec: AttentionSpec, block_size: int, dtype: torch.dtype, served: Collection[torch.dtype]
) -> KVPageFormat:
    """K and V, or a latent layer's vectors, in a dtype of `served`, without scales or padding.

    Raises ConfigurationError for another dtype, a block size, head counts or a value size that
    can't be.
    """
    is_power_of_two = block_size > 0 and block_size & (block_size - 1) == 0
    if not is_power_of_two or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigurationError(
            f"block_size={block_size} is not a power of two from {MIN_BLOCK_SIZE} to "
            f"{MAX_BLOCK_SIZE}; choose one, 16 is the default"
        )
    if dtype not in served:
        names = ", ".join(str(d).removeprefix("torch.") for d in served)
        raise ConfigurationError(f"KV dtype {dtype} can't be served; choose one of {names}")
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigurationError(
            f"num_heads={spec.num_heads} is not a multiple of num_kv_heads="
            f"{spec.num_kv_heads}; every KV head must serve as many query heads"
        )
    num_elements = 2 * block_size * spec.num_kv_heads * spec.head_dim
    if spec.v_head_dim is not None and not 0 < spec.v_head_dim <= spec.head_dim:
        raise ConfigurationError(
            f"v_head_dim={spec.v_head_dim} is not from 1 to head_dim={spec.head_dim}: pages have as"
            " much room for a head of V as for one of K"
        )
    if spec.value_dim is not None:
        _check_latent(spec, spec.value_dim)
        num_elements = block_size * spec.head_dim
    return KVPageFormat(block_size, dtype, num_elements * dtype.itemsize)


def _check_latent(spec: AttentionSpec, value_dim: int) -> None:
    if spec.num_kv_heads != 1:
        raise ConfigurationError(
            f"num_kv_heads={spec.num_kv_heads} of a latent layer; all of its heads read one vector"
        )
    if not 0 < value_dim <= spec.head_dim:
        raise ConfigurationError(f"value_dim={value_dim} is not from 1 to head_dim={spec.head_dim}")


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a backend is created for.

    device_type: torch's name of the device ("cpu", "cuda"). kernels: the engine's native ones;
    None: it computes without. batch_invariant: no row's result may depend on other rows.
    """

    device_type: str
    kernels: NativeKernels | None
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class NativeAttention:
    """The structures with which a native program calls a backend's C++ attention by itself.

    step: what `plan` prepared, without token ids and positions, which attention doesn't need.
    layers: of the bound layers. Both keep their addresses from `bind` on.
    """

    step: abi.Step
    layers: ctypes.Array[abi.AttentionLayer]


class AttentionBackend(ABC):
    """Attention over paged memory. One object serves all layers of a model.

    serves_graphs: `run` of a step in which all sequences decode reads nothing but tensors, whose
    addresses and shapes may be captured once and replayed for all steps of as many sequences.
    package: the distribution that computes, where it is neither ours nor torch; its version may
    decide over bits.
    """

    serves_graphs = False
    package: str | None = None

    @classmethod
    def create(cls, request: BackendRequest) -> "AttentionBackend":
        """A backend that is not bound yet. Raises ConfigurationError where it can't run or can't
        obey the request; this one can't be batch-invariant."""
        if request.batch_invariant:
            raise ConfigurationError(f"{cls.__name__} can't obey batch_invariant=True")
        return cls()

    @property
    def native(self) -> NativeAttention | None:
        """For a native program of all layers; None: this backend is called through `run` alone."""
        return None

    @staticmethod
    @abstractmethod
    def page_format(spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> KVPageFormat:
        """The page format for a layer. Raises ConfigurationError for what it can't serve."""

    @abstractmethod
    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        """Attach the memory, once, after it was allocated. `layers[i]` belongs to `specs[i]`."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for a step: all work that does not depend on the layer's q, k and v."""

    @abstractmethod
    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Write k [T, Hkv, D] and v [T, Hkv, Dv] into the blocks, then attend with q [T, Hq, D].

        k: None, and v as well: an earlier call of this step with the same `layer` has written
        them, and q alone is rotated: one layer attends what another has stored.
        v: None in latent layers, whose vectors are k; one that is given to them is ignored.
        sinks: [Hq], for specs with has_sinks. rotation: what is done to q and k first; None: they
        come as they are to be stored and compared, as always in latent layers: a rotation turns
        the first elements of a head, which there are the value. Their models turn the part behind
        it themselves: q = [q absorbed, turned q], k = [latent, turned k]. q, k and v may be
        overwritten.
        Returns [T, Hq, Dv] in q's dtype.
        """


class AttentionCall(Protocol):
    """What a model is given to attend with: `AttentionBackend.run` of the planned step."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor: ...


def filled_up(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """heads [..., at most D], with zeros behind them where they are smaller -> [..., D]."""
    missing = head_dim - heads.shape[-1]
    return heads if missing == 0 else functional.pad(heads, (0, missing))


def rotated(
    q: torch.Tensor, k: torch.Tensor | None, rotation: Rotation | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q and k of a call as they are to be compared and stored, by torch; both may be
    overwritten."""
    if rotation is None:
        return q, k
    if k is None:
        return rotate_queries(q, rotation), None
    return rotate(q, k, rotation)
