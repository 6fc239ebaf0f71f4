"""Counts the least bytes and operations of a step, and their least time.

Holds plain numbers of one model, computed once when an engine is built
(`assembly.reports.model_work`), and some arithmetic on integers for each step. `utilization` sums
the results. With several ranks, all numbers are those of the first rank.

    bytes       every weight that any token of the step needs, K and V of every context, the K and V
                that are written, and states twice (read and written)
    operations  two for each weight and token, and attention's for each (query, key) pair
    floor       max(bytes / rate of a copy, operations / rate of a matrix product)

Reads from caches, activations and intermediate results count as free. (S. Williams, A. Waterman, D.
Patterson: Roofline. CACM 52(4), 2009.)
"""

from typing import NamedTuple

from quire.core.scheduling.cost_model import StepLoad


class AttentionWork(NamedTuple):
    """All attention layers with the same window, together."""

    #: Number of keys that a query sees, its own included; None for all.
    window: int | None
    #: Bytes of K and V of one token.
    kv_bytes: int
    #: Number of operations for one query and one key, over all heads.
    pair_operations: int


class ExpertWork(NamedTuple):
    """All mixtures of experts in which a token uses the same share of the experts, together."""

    #: Bytes of all experts.
    num_bytes: int
    #: Share of the experts that one token uses.
    active_share: float


class StepWork(NamedTuple):
    """The costs of a served model from which a step's bytes and operations are computed."""

    #: Bytes of the weights that every step reads.
    layer_bytes: int
    #: Bytes of the weights that compute logits.
    head_bytes: int
    #: Bytes of a token: a row of the embedding, and the K and V that are written.
    token_bytes: int
    #: Bytes of a sequence's states, read and written.
    state_bytes: int
    #: Number of operations for each token.
    token_operations: int
    #: Number of operations for each token that gets logits.
    head_operations: int
    attention: tuple[AttentionWork, ...] = ()
    experts: tuple[ExpertWork, ...] = ()

    def of(self, load: StepLoad, num_sampled: int) -> tuple[float, float]:
        """(bytes, operations) of a step; num_sampled: tokens that its rows got.

        Two numbers are estimates. A window is subtracted from the mean context of the step's
        decoding rows, and of its chunks, not from each context. The number of experts that are read
        is the expected one if each token chose at random. Drafts that are computed again are left
        out, since that is no use.
        """
        # Unpack all fields at once: between two steps they leave the CPU's caches, so each read is
        # slow.
        layers, head, row, state, token_operations, head_operations, attention, experts = self
        decodes, decode_pairs, chunk_tokens, chunk_pairs, *others = load
        num_logits, chunks, num_context, num_drafts, _ = others
        num_tokens = decodes + chunk_tokens
        num_bytes: float = layers + row * num_tokens + state * (decodes - num_drafts + chunks)
        operations = token_operations * num_tokens
        num_logits += num_sampled
        if num_logits:
            num_bytes += head
            operations += head_operations * num_logits
        for window, kv_bytes, pair_operations in attention:
            if window is None:
                num_read, num_pairs = decode_pairs + num_context, decode_pairs + chunk_pairs
            else:
                seen = min(decode_pairs, window * decodes)
                num_read = seen + min(num_context, window * chunks + chunk_tokens)
                num_pairs = seen + min(chunk_pairs, window * chunk_tokens)
            num_bytes += kv_bytes * num_read
            operations += pair_operations * num_pairs
        for expert_bytes, active_share in experts:
            num_bytes += expert_bytes * (1.0 - (1.0 - active_share) ** num_tokens)
        return num_bytes, operations


class MachineRates(NamedTuple):
    """The machine's best measured rates."""

    #: Memory bandwidth: bytes read on a CPU, bytes read plus bytes written on a GPU.
    bytes_per_s: float
    #: Operations per second of a large matrix product in the format of the model's weights.
    operations_per_s: float

    def floor_s(self, num_bytes: float, operations: float) -> float:
        """The minimum time of a step with this work."""
        return max(num_bytes / self.bytes_per_s, operations / self.operations_per_s)
