"""What KV formats cost in quality: next-token distributions beside those over exact K and V.

A text's windows are read by the engine, once with the KV cache in the model's dtype and once in
each compact format; the hidden states of all positions are kept, and the model's head makes both
distributions of them, some positions at a time. A format that the engine doesn't store on this
machine is simulated: the same model, whose attention is given what the format would give back
(`attention.kv_rounding`), computed by torch. Called by `perplexity`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quire.assembly.device_setup import choose_device, choose_setup
from quire.assembly.host_memory_plan import wanted_model_len
from quire.assembly.model_kind import choose_kind
from quire.attention.backends import AUTO, FP8, INT8
from quire.attention.kv_rounding import KV_ROUNDINGS, RoundedAttention, divergence
from quire.core.sampling_params import SamplingParams
from quire.layers.operator_module import use_operators
from quire.models.checkpoints.loader import Reading, load_model
from quire.models.interface import CausalLM
from quire.offline.llm import LLM
from quire.options.engine_options import EngineOptions
from quire.runtime.model_runner import PROMPT_LOGPROB_ROWS, ModelRunner


@dataclass(frozen=True, slots=True)
class KVQuality:
    """Of one format, over the num_tokens predicted.

    loss: mean negative log-likelihood in nats. divergence: mean Kullback-Leibler divergence, in
    nats, from the distributions over exact K and V. deep_divergence: the same of each window's last
    quarter alone. agreement: share of positions whose likeliest token is the same. token_bytes: of
    K and V of one token in all layers. is_simulated: not stored by this engine."""

    num_tokens: int
    loss: float
    divergence: float
    deep_divergence: float
    agreement: float
    token_bytes: int
    is_simulated: bool

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


class Reader(Protocol):
    """A model that reads windows of a text over one KV format."""

    token_bytes: int
    is_simulated: bool

    def hidden(self, window: Sequence[int]) -> torch.Tensor:
        """[T, H], of all tokens of a window that is read from nothing."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> [R, V] fp32."""
        ...


class EngineReader:
    """The engine itself, with the kernels, pages and chunks that serve."""

    is_simulated = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        """options: of `LLM`. Raises ConfigurationError and its kinds."""
        self._llm = LLM(
            **{**options, "enable_prefix_caching": False, "max_num_seqs": 1},
            disable_log_stats=True,
        )
        runner = self._llm.engine.kv_memory
        assert isinstance(runner, ModelRunner), "several processes compute"
        self._runner = runner
        facts = self._llm.engine.facts
        sizes = (facts[name] for name in ("kv_cache_bytes", "num_kv_groups"))
        page_bytes, num_groups = (int(size or 0) for size in sizes)
        slots = int(facts["num_blocks"] or 0) * int(facts["block_size"] or 0)
        self.token_bytes = page_bytes * num_groups // slots

    @property
    def max_window(self) -> int:
        """Tokens of the longest window: one more is generated."""
        return int(self._llm.engine.facts["max_model_len"] or 0) - 1

    def encode(self, text: str) -> list[int]:
        """With the model's tokenizer."""
        return self._llm.get_tokenizer().encode(text)

    def hidden(self, window: Sequence[int]) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        self._runner.on_hidden = lambda hidden: pieces.append(hidden.clone())
        try:
            prompt = {"prompt_token_ids": list(window)}
            self._llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), False)
        finally:
            self._runner.on_hidden = None
        return torch.cat(pieces)[: len(window)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.logits_of(hidden)


class SimulatedReader:
    """The model over K and V as a format gives them back, without pages."""

    is_simulated = True

    def __init__(self, options: Mapping[str, Any], name: str) -> None:
        """options: of `LLM`. name: in `KV_ROUNDINGS`. Raises ConfigurationError and its kinds."""
        kind = choose_kind(EngineOptions.from_mapping(options))
        checked, config = kind.options, kind.config
        device = choose_device(checked.device)
        setup = choose_setup(checked, config, device, checked.num_threads)
        model = load_model(
            kind.folder,
            config,
            dtype=setup.dtype,
            device=device,
            max_model_len=wanted_model_len(checked, config),
            methods=setup.methods,
            reading=Reading(setup.num_threads),
        )
        assert isinstance(model, CausalLM), "the engine has read the text with the same model"
        use_operators(model, setup.operators)
        rounding = KV_ROUNDINGS[name]
        self._model = model
        self._device = device
        self._attention = RoundedAttention(model.attention_specs, rounding)
        self.token_bytes = sum(
            2 * spec.num_kv_heads * rounding.vector_bytes(spec.head_dim)
            for spec in model.attention_specs
        )

    def hidden(self, window: Sequence[int]) -> torch.Tensor:
        token_ids = torch.tensor(window, dtype=torch.int64, device=self._device)
        positions = torch.arange(len(window), device=self._device)
        found: torch.Tensor = self._model(token_ids, positions, self._attention).hidden
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def open_reader(options: Mapping[str, Any], name: str) -> Reader:
    """Of the KV format of this name: the engine where it stores the format, else simulated."""
    device = choose_device(str(options.get("device", AUTO)))
    if name == INT8 or (name == FP8 and device.type == "cuda"):
        return EngineReader({**options, "kv_cache_dtype": name})
    return SimulatedReader(options, name)


@torch.inference_mode()
def compare(
    reader: Reader, windows: Sequence[Sequence[int]], exact: Sequence[torch.Tensor]
) -> KVQuality:
    """exact: of each window, the hidden states over exact K and V, of a model with equal weights.
    Windows have two tokens or more."""
    found: list[torch.Tensor] = []
    deep: list[torch.Tensor] = []
    for window, exact_hidden in zip(windows, exact, strict=True):
        hidden = reader.hidden(window)
        following = torch.tensor(window[1:], device=hidden.device)
        pieces = [
            _compare_positions(reader, hidden[part], exact_hidden[part], following[part])
            for part in _pieces(len(following))
        ]
        found.append(torch.cat(pieces, dim=1))
        deep.append(found[-1][1, 3 * len(following) // 4 :])
    figures = torch.cat(found, dim=1)
    loss, diverged, agreed = figures.mean(1).tolist()
    return KVQuality(
        figures.shape[1],
        loss,
        diverged,
        torch.cat(deep).mean().item(),
        agreed,
        reader.token_bytes,
        reader.is_simulated,
    )


def _pieces(count: int) -> Iterator[slice]:
    for first in range(0, count, PROMPT_LOGPROB_ROWS):
        yield slice(first, min(first + PROMPT_LOGPROB_ROWS, count))


def _compare_positions(
    reader: Reader, hidden: torch.Tensor, exact_hidden: torch.Tensor, following: torch.Tensor
) -> torch.Tensor:
    """Of each position its loss, its divergence, and 1 where both agree: [3, R] fp64 on the CPU."""
    exact = torch.log_softmax(reader.logits(exact_hidden), dim=-1)
    found = torch.log_softmax(reader.logits(hidden), dim=-1)
    loss = -found.gather(1, following[:, None])[:, 0]
    agrees = exact.argmax(-1) == found.argmax(-1)
    return torch.stack((loss, divergence(exact, found), agrees)).double().cpu()
