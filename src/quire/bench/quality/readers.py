"""Models that read windows of a text, each in one weight format and one KV format.

The engine reads with the kernels, pages and chunks of serving. If it can't store a KV format on
this machine, the format is simulated: the same model attends to rounded K and V, computed by torch
(`attention.kv_rounding`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from quire.assembly.device_setup import DeviceSetup, choose_device, choose_setup
from quire.assembly.format_checks.compensated_rounding import compensate_rounding
from quire.assembly.host_memory_plan import wanted_model_len
from quire.assembly.host_part import place_weights
from quire.assembly.model_kind import ModelKind, choose_kind
from quire.attention.backends import default_backends, is_read
from quire.attention.kv_registry import AUTO, load_kv_format
from quire.attention.kv_rounding import RoundedAttention
from quire.bench.quality.comparison import Logits
from quire.bench.quality.windows import Window
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError
from quire.layers.linear import Linear
from quire.layers.operator_module import use_operators
from quire.models.checkpoints.loader import Reading, load_again, load_model
from quire.models.interface import CausalLM
from quire.offline.llm import LLM
from quire.options.engine_options import EngineOptions
from quire.runtime.model_runner import ModelRunner
from quire.text.tokenizer import Tokenizer


class Reader(Protocol):
    """A model that reads windows."""

    #: The dtype of activations.
    dtype: str

    #: Bytes of all weights.
    weight_bytes: int

    #: Mean bits per weight of the linear layers, including scales and the head.
    linear_bits: float

    #: Bytes of K and V of one token in all layers.
    token_bytes: int

    #: Whether the KV format is simulated by rounding, without pages.
    is_simulated: bool

    def hidden(self, window: Window) -> torch.Tensor:
        """The hidden states [counted tokens, hidden size] from which the counted tokens are
        predicted."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits for hidden states; see `comparison.Logits`."""
        ...


class EngineReader:
    """Reads windows with the engine itself."""

    is_simulated = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options` has arguments of `LLM`. Raises ConfigurationError."""
        self._llm = LLM(
            **{**options, "enable_prefix_caching": False, "max_num_seqs": 1},
            disable_log_stats=True,
        )
        runner = self._llm.engine.kv_memory
        assert isinstance(runner, ModelRunner), "several processes compute"
        if not isinstance(runner.model, CausalLM):
            raise ConfigurationError(
                f"model is {options.get('model')!r}, which predicts no tokens; name one that"
                " generates text"
            )
        self._runner, self._model = runner, runner.model
        facts = self._llm.engine.facts
        self.dtype, self.weight_bytes = str(facts["dtype"]), int(facts["weight_bytes"] or 0)
        self.linear_bits = _linear_bits(runner.model, getattr(torch, self.dtype))
        sizes = (facts[name] for name in ("kv_cache_bytes", "num_kv_groups"))
        page_bytes, num_groups = (int(size or 0) for size in sizes)
        slots = int(facts["num_blocks"] or 0) * int(facts["block_size"] or 0)
        self.token_bytes = page_bytes * num_groups // slots

    @property
    def kernels(self) -> str:
        """The name of the engine's kernels."""
        return str(self._llm.engine.facts["kernels"])

    @property
    def max_window(self) -> int:
        """Tokens of the longest window, one less than the context, since one token is generated."""
        return int(self._llm.engine.facts["max_model_len"] or 0) - 1

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.get_tokenizer()

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the model's vocabulary."""
        return self._model.vocab_size

    def hidden(self, window: Window) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        self._runner.on_hidden = lambda hidden: pieces.append(hidden.clone())
        try:
            prompt = {"prompt_token_ids": list(window.token_ids)}
            self._llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), False)
        finally:
            self._runner.on_hidden = None
        return torch.cat(pieces)[window.predicting].clone()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.logits_of(hidden)

    def take_head(self) -> Logits:
        """Return the model's head and free the layers. The reader can't read afterwards."""
        model = self._model
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                del module[:]
        del self._llm, self._runner, self._model
        return model.logits


class SimulatedReader:
    """Reads windows with a model that attends to rounded K and V, without pages."""

    is_simulated = True

    def __init__(self, options: Mapping[str, Any], name: str) -> None:
        """`options` has arguments of `LLM`. `name` is the name of a KV format.

        Raises ConfigurationError.
        """
        kind = choose_kind(EngineOptions.from_mapping(options))
        checked, config = kind.options, kind.config
        device = choose_device(checked.device)
        chosen = choose_setup(checked, config, device, checked.num_threads)
        placed = place_weights(checked, kind.folder, config, chosen)
        setup = placed.setup
        model = _load(kind, setup)
        kv_format = load_kv_format(name, setup.dtype)
        self._model = model
        self._device = device
        self._attention = RoundedAttention(model.attention_specs, kv_format)
        self.dtype = str(setup.dtype).removeprefix("torch.")
        self.weight_bytes = placed.device_bytes + placed.host_bytes
        self.linear_bits = _linear_bits(model, setup.dtype)
        self.token_bytes = sum(
            spec.num_kv_heads * form.num_bytes(spec.head_dim)
            for spec in model.attention_specs
            for form in kv_format.vectors(is_latent=spec.value_dim is not None)
        )

    @torch.inference_mode()
    def hidden(self, window: Window) -> torch.Tensor:
        token_ids = torch.tensor(window.token_ids, dtype=torch.int64, device=self._device)
        positions = torch.arange(len(token_ids), device=self._device)
        found: torch.Tensor = self._model(token_ids, positions, self._attention)
        return found[window.predicting]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def open_reader(options: Mapping[str, Any], kv_cache_dtype: str) -> Reader:
    """An `EngineReader` if the engine can store this KV format, else a `SimulatedReader`.

    `options` has arguments of `LLM`, except kv_cache_dtype.
    """
    device = choose_device(str(options.get("device", AUTO)))
    if any(is_read(kv_cache_dtype, backend) for backend in default_backends(device.type)):
        return EngineReader({**options, "kv_cache_dtype": kv_cache_dtype})
    return SimulatedReader(options, kv_cache_dtype)


def _linear_bits(model: nn.Module, dtype: torch.dtype) -> float:
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    num_bytes = sum(
        each.method.num_bytes(each.output_size, each.input_size, dtype) for each in linears
    )
    return 8 * num_bytes / sum(each.output_size * each.input_size for each in linears)


def _load(kind: ModelKind, setup: DeviceSetup) -> CausalLM:
    """Load the model with the same rounded weights as in an engine."""
    model_len = wanted_model_len(kind.options, kind.config)
    reading = Reading(setup.num_threads)
    model = load_model(
        kind.folder,
        kind.config,
        dtype=setup.dtype,
        device=setup.device,
        max_model_len=model_len,
        methods=setup.methods,
        reading=reading,
    )
    assert isinstance(model, CausalLM), "the engine has read the text with the same model"
    use_operators(model, setup.operators)
    reload = partial(
        load_again,
        model=model,
        folder=kind.folder,
        config=kind.config,
        methods=setup.methods,
        reading=reading,
    )
    compensate_rounding(model, model_len, reload)
    return model
