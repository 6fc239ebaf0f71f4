"""Measures at the start whether a model's weights and activations bear the chosen weight format.

Some models have a few channels of activations that are a hundred times the others: what a scale
leaves of the rest is noise. Before the engine is built, a prompt of fixed token ids is read twice:

1. Of each linear, some outputs are computed again from exact rows of the checkpoint. The relative
   error of the format's product is its noise divided by the signal, of the median token.
2. To each linear's outputs as much random noise is added as was measured there. How far this moves
   the next-token distributions is about how far the format has moved them from the exact ones,
   which would take a second model to know.

Knows a format by `LinearMethod.apply` alone. Called by `rank_build`.

Shapes: T tokens, I input size, O output size, R rows of a weight that are read again.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from quire.attention.interface import AttentionSpec, rotated
from quire.attention.kv_rounding import divergence
from quire.attention.reference import attend_dense
from quire.formats.coded import CodedTorchMethod
from quire.formats.rounded import RoundedTorchMethod
from quire.formats.weight_format import LinearMethod, LinearModule
from quire.kernels.rotary import Rotation
from quire.layers.linear import Linear
from quire.models.checkpoints.linear_weights import LinearWeights
from quire.models.config import ModelConfig
from quire.models.interface import CausalLM, TextModel
from quire.observability.log import get_logger

logger = get_logger(__name__)

NUM_TOKENS = 32
MOST_DIVERGENCE = 0.12
"""In nats. Measured with int8 and int4 on SmolLM2-135M and on the embedded model, its activations
as they are and with outliers of 8 to 256 times their channel: above, the perplexity of held-out
text rose by 3.4% or more; up to 0.1, by 2.2% at most; nothing lay between. The true divergence on
held-out text was 0.2 to 1.5 times the estimate."""

MOST_SECONDS = 5.0
"""For the reading of all linears' rows; a start does not wait longer for what it can do without."""

NUM_RUNS, ROWS_PER_RUN = 2, 16
"""Rows of each part of a weight that are read again: in runs, which a file gives up faster."""
MOST_EXPERTS = 2
"""Of each layer that are measured, of those that the prompt has; the others are taken to be like
them."""
_EXPERT = re.compile(r"experts\.\d+")

_STRIDE = 7919
"""A prime: token ids from all parts of a vocabulary."""


@dataclass(frozen=True, slots=True)
class WeightNoise:
    """divergence: of next-token distributions, in nats, that noise like the format's causes; not a
    number where the model computes none. errors: the relative error of each linear that was
    measured, by its path in the model, the largest first; experts of a layer have one path."""

    divergence: float
    errors: Mapping[str, float]

    @property
    def is_bad(self) -> bool:
        """Whether answers suffer."""
        return not self.divergence <= MOST_DIVERGENCE


@dataclass(frozen=True, slots=True)
class CheckedSetup:
    """What the model was loaded from: folder and config. dtype: of its activations. num_ranks: that
    share it."""

    folder: Path
    config: ModelConfig
    dtype: torch.dtype
    num_ranks: int


OnProduct = Callable[[LinearModule, torch.Tensor, torch.Tensor], torch.Tensor]
"""Linear, x [..., I], its product [..., O] -> the product to go on with."""


class _Watched(LinearMethod):
    """Multiplies by `inner`, one linear at a time, and shows each product to `on_product`."""

    def __init__(self, inner: LinearMethod, on_product: OnProduct) -> None:
        self._inner, self._on_product = inner, on_product

    def takes_experts_with(self, down: LinearMethod) -> bool:
        return False

    def apply(
        self, linear: LinearModule, x: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._on_product(linear, x, self._inner.apply(linear, x, out_dtype))

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        return self._inner.num_bytes(num_outputs, num_inputs, dtype)

    def create(
        self, linear: LinearModule, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        raise AssertionError("the model is loaded")

    def load_part(
        self, linear: LinearModule, parameter: str, index: int, first_row: int, rows: torch.Tensor
    ) -> None:
        raise AssertionError("the model is loaded")


class _OneSequence:
    """An `AttentionCall` over one sequence, with K and V as they are."""

    def __init__(self, specs: tuple[AttentionSpec, ...]) -> None:
        self._specs = specs
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        q, k = rotated(q, k, rotation)
        if k is not None:
            self._written[layer] = k, v
        return attend_dense(self._specs[layer], q, *self._written[layer], sinks)[0].to(q.dtype)


class _Noise(NamedTuple):
    """Of the outputs of a linear's part. error: noise / signal, of the median token. signal: the
    mean square of exact outputs, of the median token."""

    error: float
    signal: float


_Parts = tuple[_Noise, ...]
"""Of a linear: queries, keys and values, for one, may differ in size by far."""


class _Errors:
    """Measures the noise of linears. paths: of all linears of the model."""

    def __init__(
        self, weights: LinearWeights, dtype: torch.dtype, paths: Mapping[LinearModule, str]
    ) -> None:
        self._weights, self._dtype, self._paths = weights, dtype, paths
        self._found: dict[str, list[_Parts]] = {}
        self._began_s = time.perf_counter()

    def see(self, linear: LinearModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """An `OnProduct` that measures and changes nothing. Raises TimeoutError."""
        if time.perf_counter() - self._began_s > MOST_SECONDS:
            raise TimeoutError("its weights can't be read again quickly")
        found = self._found.setdefault(self._paths[linear], [])
        if len(found) < MOST_EXPERTS and x.numel():
            flat, products = x.reshape(-1, linear.input_size).float(), y.reshape(-1, y.shape[-1])
            parts = [
                self._measure(linear, index, flat, part.float())
                for index, part in enumerate(torch.split(products, list(linear.part_sizes), dim=1))
            ]
            known = tuple(part for part in parts if part is not None)
            found += [known] if len(known) == len(parts) else []
        return y

    def by_path(self) -> dict[str, _Parts]:
        """Of all that was measured, the largest error first."""
        worst = {path: max(found, key=max) for path, found in self._found.items() if found}
        return dict(sorted(worst.items(), key=lambda item: max(item[1]), reverse=True))

    def _measure(
        self, linear: LinearModule, index: int, x: torch.Tensor, y: torch.Tensor
    ) -> _Noise | None:
        """x [T, I], y [T, O] of part `index`. None: the checkpoint doesn't tell."""
        outputs: list[int] = []
        rows: list[torch.Tensor] = []
        biases: list[torch.Tensor] = []
        size = linear.part_sizes[index]
        for first in range(0, size, max(ROWS_PER_RUN, -(-size // NUM_RUNS))):
            span = range(first, min(first + ROWS_PER_RUN, size))
            found = self._weights.rows(linear, index, span)
            bias: torch.Tensor | None = torch.zeros(len(span))
            if linear.has_bias:
                bias = self._weights.biases(linear, index, span)
            if found is None or bias is None:
                return None
            outputs += span
            rows.append(found)
            biases.append(bias)
        weight, added = (self._rounded(torch.cat(each)).to(x.device) for each in (rows, biases))
        exact = x @ weight.T + added
        noise = (y[:, outputs] - exact).square_().mean(1)
        signal = exact.square_().mean(1)
        ratios = noise[signal > 0] / signal[signal > 0]
        return _Noise(ratios.median().item() if len(ratios) else 0.0, signal.median().item())

    def _rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """As a model of this dtype has them without a format."""
        return numbers.to(self._dtype).float()


@torch.inference_mode()
def measure_weights(
    model: CausalLM, weights: LinearWeights, dtype: torch.dtype, max_model_len: int
) -> WeightNoise:
    """Of a model of this dtype that is ready to run, without recurrent layers. weights: of its
    checkpoint. max_model_len: of the longest prompt that it takes. Raises TimeoutError."""
    device = next(model.parameters()).device
    places = torch.arange(min(NUM_TOKENS, max_model_len), device=device)
    paths: dict[LinearModule, str] = {
        module: _EXPERT.sub("experts", path)
        for path, module in model.named_modules()
        if isinstance(module, Linear)
    }
    errors = _Errors(weights, dtype, paths)
    quiet = _log_probabilities(model, places, errors.see)
    by_path = errors.by_path()
    generator = torch.Generator(device).manual_seed(0)

    def add_noise(linear: LinearModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = by_path.get(paths[linear])
        if found is None:
            return y
        parts = torch.split(y.float(), list(linear.part_sizes), dim=-1)
        noisy_parts = [_with_noise(*each, generator) for each in zip(parts, found, strict=True)]
        return torch.cat(noisy_parts, dim=-1).to(y.dtype)

    noisy = _log_probabilities(model, places, add_noise)
    errors_by_path = {path: max(found).error for path, found in by_path.items()}
    return WeightNoise(divergence(quiet, noisy).median().item(), errors_by_path)


def _with_noise(y: torch.Tensor, noise: _Noise, generator: torch.Generator) -> torch.Tensor:
    """y [..., O] fp32 of a part."""
    power = y.square().mean(-1, keepdim=True)
    if not power.any():  # the format has left nothing of which noise could be a share
        power += noise.signal
    random = torch.randn(y.shape, device=y.device, generator=generator)
    return random.mul_(power.mul_(noise.error).sqrt_()).add_(y)


def _log_probabilities(
    model: CausalLM, places: torch.Tensor, on_product: OnProduct
) -> torch.Tensor:
    """[T, V] fp32, of the prompt's tokens at `places`."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    methods = {linear: linear.method for linear in linears}
    watched = {method: _Watched(method, on_product) for method in methods.values()}
    try:
        for linear in linears:
            linear.method = watched[methods[linear]]
        token_ids = places * _STRIDE % model.vocab_size
        hidden = model(token_ids, places, _OneSequence(model.attention_specs)).hidden
        return torch.log_softmax(model.logits(hidden), dim=-1)
    finally:
        for linear, method in methods.items():
            linear.method = method


@dataclass(frozen=True, slots=True)
class ModelRounding:
    """What rounds a model's weights or activations, as messages name it, and what to do where that
    is bad for the model."""

    name: str
    advice: str


def rounding_of(quantization: str | None, config: ModelConfig) -> ModelRounding | None:
    """None: nothing rounds them, or nothing that costs more on one model than on another.
    quantization: the option."""
    if quantization is not None:
        return ModelRounding(f"quantization={quantization}", "use another format, or none")
    if config.quantized is not None and config.quantized.has_token_scales:
        name = f"rounding activations with one scale a token, as {config.quantized.method} says,"
        return ModelRounding(name, "use the original checkpoint, before it was quantized")
    return None


def check_weights(
    model: TextModel, setup: CheckedSetup, rounding: ModelRounding, max_model_len: int
) -> None:
    """Log what was measured, as a warning where the rounding is bad for this model; also why
    nothing could be. Raises nothing: the model may serve all the same."""
    if reason := _why_not(model, setup):
        logger.info("what %s costs this model is not measured, as %s", rounding.name, reason)
        return
    assert isinstance(model, CausalLM)
    began_s = time.perf_counter()
    try:
        weights = LinearWeights(setup.folder, setup.config, model)
        found = measure_weights(model, weights, setup.dtype, max_model_len)
    except TimeoutError as error:
        logger.info("what %s costs this model is not measured, as %s", rounding.name, error)
        return
    except Exception as error:
        logger.warning("what %s costs this model can't be measured: %s", rounding.name, error)
        return
    _tell(found, rounding, setup.folder, time.perf_counter() - began_s)


def _why_not(model: TextModel, setup: CheckedSetup) -> str | None:
    if setup.num_ranks > 1:
        return "each rank has a share of it"
    methods = {module.method.storage for module in model.modules() if isinstance(module, Linear)}
    if any(isinstance(method, RoundedTorchMethod | CodedTorchMethod) for method in methods):
        return "torch multiplies its weights, which would take long"
    if model.recurrent_specs:
        return "it has recurrent layers"
    return None if isinstance(model, CausalLM) else "it predicts no tokens"


def _tell(found: WeightNoise, rounding: ModelRounding, folder: Path, took_s: float) -> None:
    if not found.errors:
        logger.info(
            "what %s costs this model is not measured, as its linears' weights are no tensors of"
            " the checkpoint",
            rounding.name,
        )
        return
    if not found.is_bad:
        logger.info(
            "%s moves next-token distributions by about %.2g nats on the calibration prompt"
            " (measured in %.2f s)",
            rounding.name,
            found.divergence,
            took_s,
        )
        return
    path, error = next(iter(found.errors.items()))
    logger.warning(
        "%s is bad for this model: on the calibration prompt it moves next-token distributions by"
        " about %.2g nats, and more than %g has cost 3%% of perplexity or more; the outputs of %s"
        " are %.0f%% noise. %s, or measure your text with `quire bench perplexity FILE --model"
        " %s`",
        rounding.name,
        found.divergence,
        MOST_DIVERGENCE,
        path,
        100 * error**0.5,
        rounding.advice.capitalize(),
        folder,
    )
