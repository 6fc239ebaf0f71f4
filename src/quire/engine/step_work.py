"""Counts the bytes and operations that a step needs at least, and their time.

Plain numbers of one model, made once when an engine is built (`assembly.reports.model_work`), and
some arithmetic on integers for each step. `utilization` sums it up. Of several ranks, all of it is
of the first.

    bytes       each weight once that some token of the step needs, K and V of every context once,
                what is written of K and V, states twice
    operations  two for each weight and token, attention's for each pair of a query and a key
    floor       max(bytes / rate of a copy, operations / rate of a matrix product)

Caches, activations and everything between are free. (S. Williams, A. Waterman, D. Patterson:
Roofline. CACM 52(4), 2009.)
"""

from typing import NamedTuple

from quire.core.scheduling.cost_model import StepLoad


class AttentionWork(NamedTuple):
    """Of the attention layers that have the same window, all of them together.

    window: keys that a query sees, itself included; None: all. kv_bytes: K and V of a token.
    pair_operations: of one query and one key, over all heads.
    """

    window: int | None
    kv_bytes: int
    pair_operations: int


class ExpertWork(NamedTuple):
    """Of the mixtures of experts that choose the same share of theirs, all of them together.

    num_bytes: of all experts. active_share: of them that one token has.
    """

    num_bytes: int
    active_share: float


class StepWork(NamedTuple):
    """Of a model, as it is served.

    layer_bytes: of weights that every step reads. head_bytes: of those that give logits.
    token_bytes: an embedding's row, and K and V that are written. state_bytes: of a sequence's
        states, read and written.
    token_operations, head_operations: for each token computed, and for each that gets logits.
    """

    layer_bytes: int
    head_bytes: int
    token_bytes: int
    state_bytes: int
    token_operations: int
    head_operations: int
    attention: tuple[AttentionWork, ...] = ()
    experts: tuple[ExpertWork, ...] = ()

    def of(self, load: StepLoad, num_sampled: int) -> tuple[float, float]:
        """(bytes, operations) of a step. num_sampled: rows that got a token.

        Two are estimates. A window is taken off the mean context of the step's decoding rows, and
        of its chunks, not off each. Of experts those are read that some token chose: how many that
        are is what would be expected if each token chose at random.
        """
        # Unpacked at once: this runs between two steps, when no cache holds anything of it.
        layers, head, row, state, token_operations, head_operations, attention, experts = self
        decodes, decode_pairs, chunk_tokens, chunk_pairs, num_logits, chunks, num_context = load
        num_tokens = decodes + chunk_tokens
        num_bytes: float = layers + row * num_tokens + state * (decodes + chunks)
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
    """What the machine does at best, as measured: bytes per second, read on a CPU, read and written
    on a GPU; operations per second of a large matrix product, with the model's weights' format."""

    bytes_per_s: float
    operations_per_s: float

    def floor_s(self, num_bytes: float, operations: float) -> float:
        """The least time of a step with this work."""
        return max(num_bytes / self.bytes_per_s, operations / self.operations_per_s)
