"""The interface of a head, a small model that drafts tokens from the target's hidden states.

A head has layers of its own, and uses the target's embedding and in most cases its vocabulary
projection. Its input at position i is token i together with a state of position i - 1, which
summarizes all tokens up to that one. There are two kinds of states:

- of the target: `states_of` computes it from the hidden state that a step of the target computed;
- of the head itself: the result of `forward`, from which the next token is drafted, too.

So a head drafts token after token: the first from the target's last state, each later one from the
head's previous result. Position 0 has no state before it; there the caller gives zeros.

Published heads store K and V of a token and a state under the state's position, i - 1. Here they
are stored under the token's position. Scores stay the same, since they depend only on distances
between rotary positions. So the K and V of a block depend on the tokens of this block and those
before it, and sequences with the same prefix can share them.

Shapes: T tokens of a step, R rows, H hidden size of the head, V vocabulary size of the target.
"""

from typing import ClassVar

import torch

from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.rotary import RopeLimits, RotaryEmbedding
from quire.layers.storage import Storage
from quire.models.config import DecoderConfig
from quire.models.decoder import DecoderEnds, DecoderForCausalLM
from quire.models.interface import CausalLM, InputEmbeds


class DraftHead(CausalLM):
    """A head that drafts. `use_target` must be called after loading, before the first step.

    `logits` cover the head's own vocabulary; `token_ids` maps its ids to the target's.
    """

    #: Method in the options, as vLLM names it: mtp, eagle3.
    method: ClassVar[str]
    #: The layers of the target whose inputs `states_of` reads; empty if it reads the target's
    #: hidden states after the final norm.
    target_layers: tuple[int, ...] = ()
    #: Number of columns of the argument of `states_of`.
    input_size: int
    #: [most tokens of a step, H]: the caller writes the state before each token here.
    states: torch.Tensor
    #: [own vocabulary size] int64, the token id of the target for each own id; None if equal.
    token_ids: torch.Tensor | None = None
    #: Whether the head uses the target's embedding and its vocabulary projection.
    shares_embedding: bool = True
    shares_head: ClassVar[bool] = False
    #: The target's embedding, or the head's own.
    embed_tokens: VocabEmbedding
    #: The projection to the head's vocabulary, which may be the target's.
    lm_head: Linear

    def use_target(
        self, target: DecoderForCausalLM, max_num_tokens: int, ends: DecoderEnds | None = None
    ) -> None:
        """Take the modules over that the head shares with its target, and allocate `states` for
        steps of at most `max_num_tokens`. If the target is one rank's shard, `ends` replace its
        embedding and projection."""
        weight = next(self.parameters())
        self.states = torch.zeros(
            max_num_tokens, self.hidden_size, dtype=weight.dtype, device=weight.device
        )
        if self.shares_embedding:
            self.embed_tokens = target.model.embed_tokens if ends is None else ends.embed_tokens
        if self.shares_head:
            lm_head = target.lm_head if ends is None else ends.lm_head
            assert lm_head is not None
            self.lm_head = lm_head

    def states_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's states [T, H], computed from its hidden states, or from the inputs of its
        `target_layers` [T, input_size]. Zeros become zeros."""
        return hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self.embed_tokens(token_ids)
        return embeds

    def embed_with(self, token_ids: torch.Tensor, input_embeds: InputEmbeds | None) -> torch.Tensor:
        """The inputs [T, H] of a step's tokens, before the head's norm."""
        embeds = self.embed(token_ids)
        return embeds if input_embeds is None else self.operators.put_rows(embeds, *input_embeds)


def make_rotary(
    config: DecoderConfig, max_model_len: int, storage: Storage
) -> RotaryEmbedding | None:
    """The rotation of a head's only layer; None if nothing is rotated."""
    index = config.rope_of(0)
    if index is None:
        return None
    each = config.ropes[index]
    limits = RopeLimits(each.rotary_dim, config.max_position_embeddings, max_model_len)
    return RotaryEmbedding(each.rope, limits, **storage)
