"""Finds the attention of each layer of a transformers model by running it without data.

The model runs over a few tokens on torch's meta device. A recording attention function stores the
arguments of each layer, and a recording mask function the mask that transformers would make.
Unsupported arguments are refused by name. Called by `fallback_config.py`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.attention.interface import AttentionSpec
from quire.errors import UnsupportedModelError, shown
from quire.models.fallback.hf_classes import GivenHidden, base_of, build, refusal, replaced
from quire.models.fallback.interfaces import ATTENDING, register_functions
from quire.models.fallback.parts import fits_head

TRACED = "quire_trace"
"""The name under which the recording functions are registered with transformers."""

NUM_TOKENS = 7

_IGNORED = frozenset(
    {
        *("cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "layer_idx"),
        *("max_length_k", "max_length_q", "num_items_in_batch", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "position_embeddings", "position_ids"),
        *("return_dict", "use_cache", "target_dtype"),
    }
)
"""Arguments that transformers passes to attention functions and that don't change the result."""

_OBEYED = frozenset({"dropout", "is_causal", "s_aux", "scaling", "sliding_window", "softcap"})


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The properties of a model that are found by a run on the meta device."""

    #: The specs of the attention layers, in the order of their calls.
    specs: tuple[AttentionSpec, ...]
    vocab_size: int
    #: Size of the head's input.
    hidden_size: int
    #: The name of the embedding's weight.
    embedding: str
    #: The name of the head's weight; "" if there is no head module.
    head: str
    #: Whether embedding and head share one weight, and can be replaced by quire's layers.
    is_tied: bool


@dataclass(slots=True)
class _Notes:
    """Records the masks and attention calls of a run."""

    #: The name of the model's class.
    name: str
    #: Maps the `id` of each mask made so far to (mask, window).
    masks: dict[int, tuple[torch.Tensor, int | None]] = field(default_factory=dict)
    specs: list[AttentionSpec] = field(default_factory=list)

    def refuse(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(refusal(self.name, reason))

    def make_mask(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Record a mask. transformers calls this in place of its own mask functions."""
        window = kwargs.get("local_size")
        with torch.device("cpu"):
            is_plain = _is_causal_window(kwargs["mask_function"], window)
        if not is_plain:
            raise self.refuse("its masks are neither causal nor of a sliding window")
        size = kwargs["q_length"], kwargs["kv_length"]
        mask = torch.empty(1, 1, *size, device="meta")
        self.masks[id(mask)] = mask, window  # stored, so that no other tensor gets its id
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Record an attention call. transformers calls this in place of its attention functions."""
        layer = len(self.specs)
        window, num_tokens = kwargs.get("sliding_window"), query.shape[2]
        if num_tokens != NUM_TOKENS or key.shape[2] != NUM_TOKENS:
            raise self.refuse(
                f"its attention call {layer} has {num_tokens} queries and {key.shape[2]} keys for"
                f" {NUM_TOKENS} tokens"
            )
        # The mask determines the window of a layer, even if the layer also passes a window.
        if attention_mask is not None:
            if id(attention_mask) not in self.masks:
                raise self.refuse(f"its attention call {layer} has a mask of its own")
            _, window = self.masks[id(attention_mask)]
        if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
            raise self.refuse(f"its attention call {layer} is not causal")
        unknown = [
            name
            for name, given in kwargs.items()
            if given is not None and name not in _IGNORED | _OBEYED
        ]
        if unknown:
            raise self.refuse(
                f"its attention call {layer} passes {', '.join(map(shown, unknown))}, which quire's"
                " attention doesn't support"
            )
        self.specs.append(_spec(query, key, value, window, kwargs))
        out = query.new_empty(query.shape[0], NUM_TOKENS, query.shape[1], value.shape[3])
        return out, None


def _spec(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    said: dict[str, Any],
) -> AttentionSpec:
    head_dim = max(query.shape[3], value.shape[3])
    scale, soft_cap = said.get("scaling"), said.get("softcap")
    return AttentionSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=head_dim + head_dim % 2,  # as the native kernels need it
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        window=None if window is None else int(window),
        soft_cap=None if soft_cap is None else float(soft_cap),
        has_sinks=said.get("s_aux") is not None,
    )


def _is_causal_window(allows: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask function of transformers is causal and has this window: each query sees the
    last `window` keys up to its own key, or all keys up to its own if `window` is None."""
    width = NUM_TOKENS if window is None else window
    for query in {0, 1, width - 1, width, width + 1, 2 * width - 1, 3 * width + 2}:
        keys = torch.arange(query + 2)
        zero = torch.tensor(0)
        seen = torch.as_tensor(allows(zero, zero, torch.tensor(query), keys))
        wanted = keys <= query
        if window is not None:
            wanted &= keys > query - window
        if not torch.equal(seen.expand(len(keys)), wanted):
            return False
    return True


def trace(config: Any, kind: type[Any]) -> TracedModel:
    """Run the model on the meta device. Raises UnsupportedModelError with the reason if the model
    can't run with quire's attention."""
    from transformers import masking_utils  # is not always installed

    notes = _Notes(kind.__name__)
    register_functions()
    register_functions(TRACED, notes.attend, notes.make_mask)
    try:
        model = build(config, kind, attention=TRACED, dtype=torch.float32, only_meta=True)
        with (
            torch.device("meta"),
            torch.no_grad(),
            ATTENDING.without_numbers(),
            # The function would read the positions, which have no values on the meta device.
            replaced(masking_utils, "find_packed_sequence_indices", lambda _: None),
        ):
            hidden, logits = _run(model, notes)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a class of transformers may raise anything
        raise notes.refuse(f"running it on the meta device failed: {error}") from error
    if not notes.specs:
        raise notes.refuse("it doesn't pass its attention through transformers' interface")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = config.get_text_config().tie_word_embeddings and fits_head(embedding, head)
    names = {id(module): f"{path}.weight" for path, module in model.named_modules()}
    return TracedModel(
        specs=tuple(notes.specs),
        vocab_size=logits.shape[-1],
        hidden_size=hidden.shape[-1],
        embedding=names[id(embedding)],
        head=names.get(id(head), ""),
        is_tied=bool(is_tied),
    )


def _run(model: Any, notes: _Notes) -> tuple[torch.Tensor, torch.Tensor]:
    base = base_of(model)
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise notes.refuse("it takes no positions")
    token_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    hidden = base(
        input_ids=token_ids, position_ids=token_ids, use_cache=False, return_dict=True
    ).last_hidden_state
    given = GivenHidden(hidden)
    setattr(model, model.base_model_prefix, given)
    logits = model(input_ids=token_ids, use_cache=False, return_dict=True).logits
    setattr(model, model.base_model_prefix, base)
    return hidden, logits
