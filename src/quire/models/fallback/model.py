"""A model computed by a class of transformers, with quire's KV cache, attention and linears.

The class's own `forward` computes everything else, in torch. All tokens of a step are passed to it
as a batch of one row, each token with its position, although they belong to several sequences. Only
quire's attention separates the sequences. Built by `models.checkpoints`.

Shapes: T tokens of the step, R rows that need logits, H hidden size, V vocabulary size.
"""

import inspect
from typing import Any

import torch
from torch import nn

from quire.attention.interface import AttentionCall
from quire.errors import UnsupportedModelError
from quire.formats.weight_format import empty_parameter
from quire.layers.linear import Linear
from quire.models.config import ModelConfig
from quire.models.fallback.fallback_config import FallbackConfig
from quire.models.fallback.hf_classes import GivenHidden, base_of, build, find_class
from quire.models.fallback.interfaces import ATTENDING, StepAttention, register_functions
from quire.models.fallback.parts import Making, Parts, wide_parameters
from quire.models.fallback.row_check import check_rows
from quire.models.interface import CausalLM, InputEmbeds


class FallbackForCausalLM(CausalLM):
    """A causal language model of transformers. Its modules keep their names, which are also the
    names of the checkpoint's tensors."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        assert isinstance(config, FallbackConfig)
        super().__init__(config, dtype=dtype, device=device, max_model_len=max_model_len)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.attention_specs = config.attention_specs
        self._max_model_len = max_model_len
        register_functions()
        whole = build(*find_class(config.raw), dtype=dtype)
        wide = wide_parameters(whole, dtype)
        make = Making(dtype, device, max_model_len, config.tie_word_embeddings, wide)
        Parts(whole, make).replace()
        for name, child in whole.named_children():
            self.add_module(name, child)
        base = base_of(whole)
        self._given = GivenHidden()
        setattr(whole, whole.base_model_prefix, self._given)
        # The tuple hides both models from torch, which would register them as modules a second
        # time.
        self._parts: tuple[Any, Any] = whole, base
        self._arguments = _extra_arguments(base)
        _materialize(self, wide, dtype, device)

    def check_loaded(self) -> None:
        check_rows(self, self._max_model_len)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._parts[1].get_input_embeddings()(token_ids[None])
        return embedded[0]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        *,
        input_embeds: InputEmbeds | None = None,
    ) -> torch.Tensor:
        extra = {name: torch.zeros_like(positions)[None] for name in self._arguments}
        step = StepAttention(attention, self.attention_specs, token_ids, positions, input_embeds)
        with ATTENDING.to(step):
            output = self._parts[1](
                input_ids=token_ids[None],
                **extra,
                position_ids=positions[None],
                use_cache=False,
                return_dict=True,
            )
        assert step.num_called == len(self.attention_specs)
        if step.input_embeds is not None:
            raise UnsupportedModelError("this model of transformers takes nothing but token ids")
        hidden: torch.Tensor = output.last_hidden_state.flatten(0, -2)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.hidden = hidden[None]
        logits: torch.Tensor = self._parts[0](
            input_ids=None, inputs_embeds=self._given.hidden, use_cache=False, return_dict=True
        ).logits
        self._given.hidden = None
        return logits.flatten(0, -2).float()


def _extra_arguments(base: nn.Module) -> tuple[str, ...]:
    """Names of arguments of `forward` that must be passed as zeros. Relatives of BERT replace a
    missing argument by a buffer, which is too short for a long step."""
    name = "token_type_ids"
    is_taken = name in inspect.signature(base.forward).parameters
    has_buffer = any(name in module._buffers for module in base.modules())
    return (name,) if is_taken and has_buffer else ()


def _materialize(
    model: nn.Module, wide: set[str], dtype: torch.dtype, device: torch.device
) -> None:
    """Allocate the parameters that are still on the meta device, and move the buffers. `wide` are
    the names of parameters in fp32."""
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            continue  # `use` allocates its memory
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and parameter.device != device:
                own = torch.float32 if f"{path}.{name}" in wide else dtype
                module._parameters[name] = empty_parameter(tuple(parameter.shape), own, device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
