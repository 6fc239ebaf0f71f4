"""What the router knows of one replica.

That are its engine's facts and the load that it was given.

The load is counted where it is given out, when a request is placed, when its first token comes and
when it ends: what a replica reports of itself is always some requests old.
"""

from dataclasses import dataclass

from quire.core.scheduling.cost_model import StepCostModel, StepLoad

# Attention of chunks is linear in its pairs: any two points give the slope.
_MANY_PAIRS = 1_000_000


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """An engine as far as routing depends on it.

    num_blocks: of its pool, in blocks of the router's block_size. cost_model: what its steps take.
    max_num_batched_tokens, max_num_seqs: as its scheduler has them.
    """

    num_blocks: int
    cost_model: StepCostModel
    max_num_batched_tokens: int
    max_num_seqs: int


class Replica:
    """One replica's facts and load. Policies read it; `ReplicaRouter` alone changes it.

    Invariant: all counts and seconds are at least 0, and what `end` or `start_decoding` takes off
    is what `take` put on.

    index: a small number that no other replica has now; bit `index` stands for it in masks.
    accepts: whether new requests may be placed here.
    num_requests: placed here and not ended. num_prompts: of them, those whose first token is yet to
        come; num_uncached_tokens: of their prompts, what no cache has; prefill_s: what that takes.
    num_decodes, num_decode_tokens: sequences that generate, and the tokens that they attend to.
    """

    def __init__(self, name: str, index: int, facts: ReplicaFacts) -> None:
        self.name = name
        self.index = index
        self.facts = facts
        self.accepts = True
        self.num_requests = 0
        self.num_prompts = 0
        self.num_uncached_tokens = 0
        self.prefill_s = 0.0
        self.num_decodes = 0
        self.num_decode_tokens = 0
        model, step = facts.cost_model, facts.max_num_batched_tokens
        self._step_s = model.predict_s(StepLoad(num_chunk_tokens=step))
        self._token_s = self._step_s / step
        one_s = model.predict_s(StepLoad(num_chunk_tokens=1))
        many_s = model.predict_s(StepLoad(num_chunk_tokens=1, num_chunk_pairs=_MANY_PAIRS))
        self._pair_s = (many_s - one_s) / _MANY_PAIRS
        rows, base_s = facts.max_num_seqs, model.predict_s(StepLoad(1))
        self._row_s = max(0.0, model.predict_s(StepLoad(rows)) - base_s) / max(1, rows - 1)
        pairs_s = model.predict_s(StepLoad(1, _MANY_PAIRS))
        self._decode_pair_s = (pairs_s - base_s) / _MANY_PAIRS

    def __repr__(self) -> str:
        return f"Replica({self.name!r})"

    def own_prefill_s(self, num_prompt_tokens: int, num_cached_tokens: int) -> float:
        """What a prompt takes by itself, in steps of max_num_batched_tokens."""
        new = num_prompt_tokens - num_cached_tokens
        pairs = new * num_cached_tokens + 0.5 * new * (new + 1)
        return self._token_s * new + self._pair_s * pairs

    @property
    def decode_share(self) -> float:
        """What the sequences that generate here add to a step that is full of prompts, as a share
        of what it takes without them."""
        rows_s = self._row_s * self.num_decodes + self._decode_pair_s * self.num_decode_tokens
        return rows_s / self._step_s

    @property
    def wait_s(self) -> float:
        """Until the prompts that are here are computed, beside the sequences that generate."""
        return self.prefill_s * (1.0 + self.decode_share)

    # ---- what the router reports ------------------------------------------------------------

    def take(self, num_uncached_tokens: int, prefill_s: float) -> None:
        """A request was placed here."""
        self.num_requests += 1
        self.num_prompts += 1
        self.num_uncached_tokens += num_uncached_tokens
        self.prefill_s += prefill_s

    def end_prompt(self, num_uncached_tokens: int, prefill_s: float) -> None:
        """A prompt was computed, or its request ended before it was."""
        self.num_prompts -= 1
        self.num_uncached_tokens -= num_uncached_tokens
        # A sum of floats that is taken apart in another order does not come back to 0 by itself.
        self.prefill_s = max(0.0, self.prefill_s - prefill_s) if self.num_prompts else 0.0

    def start_decoding(self, num_sequences: int, num_tokens: int) -> None:
        """Sequences generate from now on, which attend to so many tokens together."""
        self.num_decodes += num_sequences
        self.num_decode_tokens += num_tokens

    def end_decoding(self, num_sequences: int, num_tokens: int) -> None:
        """They have ended."""
        self.num_decodes -= num_sequences
        self.num_decode_tokens -= num_tokens

    def end(self) -> None:
        """A request has ended or left."""
        self.num_requests -= 1
