"""Measures at the start whether the chosen weight format suits a model's weights and activations.

In some models a few channels of activations are a hundred times as large as the others, so that a
shared scale reduces the other channels to noise. Before the engine is built, the model reads a
prompt of fixed token ids twice:

1. For each linear, some outputs are also computed from exact rows of the checkpoint. The relative
   error of the format is noise divided by signal, for the median token.
2. Random noise of the measured size is added to each linear's outputs. This noise moves the
   next-token distributions about as far as the format's rounding did. They are not compared with
   the exact distributions, because these would need a second model.

Formats are only used through `LinearMethod.apply`.

Shapes: T tokens, I input size, O output size, R rows of a weight that are read again, P parts fused
into one linear (such as q, k and v).
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from quire.assembly.format_checks.watched_products import (
    TOKEN_STRIDE,
    OnProduct,
    watched_products,
)
from quire.attention.kv_rounding import divergence
from quire.attention.whole_sequence import ExactAttention
from quire.errors import CheckpointError
from quire.formats.block_quantized.linear_methods import BlockQuantizedTorchMethod
from quire.formats.rounded import RoundedTorchMethod
from quire.formats.weight_format import LinearModule
from quire.layers.linear import Linear
from quire.models.checkpoints.linear_weights import LinearWeights
from quire.models.config import ModelConfig
from quire.models.interface import CausalLM, TextModel
from quire.observability.log import get_logger

logger = get_logger(__name__)

NUM_TOKENS = 32
MOST_DIVERGENCE = 0.12
"""Maximum divergence, in nats, of a format that counts as good. It was measured with int8 and int4
on SmolLM2-135M and the embedded model, without and with outliers of 8 to 256 times their channel.
Perplexity of held-out text rose by 3.4% or more above this limit, and by at most 2.2% up to 0.1; no
case lay in between. For int4 on SmolLM2-135M the estimate is 0.069. The true divergence is 0.036,
both on the prompt and on the text."""

MOST_SECONDS = 5.0
"""The time limit for reading rows of all linears, since the check must not delay a start."""

NUM_RUNS, ROWS_PER_RUN = 2, 16
"""From each part of a weight, NUM_RUNS runs of ROWS_PER_RUN consecutive rows are read again. Runs
are read faster than single rows."""
MOST_EXPERTS = 2
"""Maximum number of experts that are measured per layer, among those that the prompt uses. The
worst of their errors is used for all experts of the layer."""
_EXPERT = re.compile(r"experts\.\d+")


@dataclass(frozen=True, slots=True)
class WeightNoise:
    """The rounding noise that a format causes in a model's linears, and the effect on
    predictions."""

    #: Divergence of next-token distributions, in nats, that noise of this size causes; NaN if the
    #: model's results are not numbers.
    divergence: float

    #: Relative error of each measured linear, by its path in the model, the largest first. All
    #: experts of a layer share one path.
    errors: Mapping[str, float]

    @property
    def is_bad(self) -> bool:
        """Whether the format harms answers."""
        return not self.divergence <= MOST_DIVERGENCE


@dataclass(frozen=True, slots=True)
class CheckedSetup:
    """The source of a loaded model, and the settings with which it was loaded."""

    folder: Path
    config: ModelConfig

    #: The dtype of activations.
    dtype: torch.dtype

    #: The number of processes that share the model.
    num_ranks: int


@dataclass(frozen=True, slots=True)
class _Noise:
    """The noise of one linear's outputs, measured on a sample of the outputs."""

    #: Indices of the sampled outputs, [R].
    outputs: torch.Tensor

    #: A matrix that averages the sampled outputs of each part, [R, P].
    means: torch.Tensor

    #: Noise / signal of the median token in each part, [P]. Measured per part, because queries,
    #: keys and values may have very different sizes.
    errors: torch.Tensor

    #: Mean square of the exact outputs of the median token in each part, [P].
    signals: torch.Tensor

    @property
    def worst(self) -> float:
        return self.errors.max().item()


class _Errors:
    """Measures the noise of a model's linears during a forward pass."""

    def __init__(
        self, weights: LinearWeights, dtype: torch.dtype, paths: Mapping[LinearModule, str]
    ) -> None:
        """`paths` maps each linear of the model to its path."""
        self._weights, self._dtype, self._paths = weights, dtype, paths
        self._found: dict[str, list[_Noise]] = {}
        self._began_s = time.perf_counter()

    def measure_product(
        self, linear: LinearModule, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """An `OnProduct` that measures a product and returns it unchanged. Raises TimeoutError."""
        if time.perf_counter() - self._began_s > MOST_SECONDS:
            raise TimeoutError("its weights can't be read again quickly")
        found = self._found.setdefault(self._paths[linear], [])
        if len(found) < MOST_EXPERTS and x.numel():
            rows = self._read(linear)
            if rows is not None:
                found.append(_measure(linear, rows, x, y))
        return y

    def by_path(self) -> dict[str, _Noise]:
        """The worst noise at each path, the largest first."""
        worst = {
            path: max(found, key=lambda noise: noise.worst)
            for path, found in self._found.items()
            if found
        }
        return dict(sorted(worst.items(), key=lambda item: item[1].worst, reverse=True))

    def _read(self, linear: LinearModule) -> "_ExactRows | None":
        """The exact rows of a linear; None if the checkpoint doesn't have its tensors."""
        weights: list[torch.Tensor] = []
        biases: list[torch.Tensor] = []
        for index, size in enumerate(linear.part_sizes):
            for span in _sampled(size):
                found = self._weights.rows(linear, index, span)
                bias: torch.Tensor | None = torch.zeros(len(span))
                if linear.has_bias:
                    bias = self._weights.biases(linear, index, span)
                if found is None or bias is None:
                    return None
                weights.append(found)
                biases.append(bias)
        # Without a weight format, the model would also round the weights to this dtype.
        weight, bias = (torch.cat(each).to(self._dtype).float() for each in (weights, biases))
        return _ExactRows(weight, bias)


class _ExactRows(NamedTuple):
    """Exact rows of a linear's weight [R, I] fp32, and of its bias [R] fp32."""

    weight: torch.Tensor
    bias: torch.Tensor


def _sampled(size: int) -> list[range]:
    """The sampled outputs of a part with `size` outputs."""
    firsts = range(0, size, max(ROWS_PER_RUN, -(-size // NUM_RUNS)))
    return [range(first, min(first + ROWS_PER_RUN, size)) for first in firsts]


def _measure(linear: LinearModule, rows: _ExactRows, x: torch.Tensor, y: torch.Tensor) -> _Noise:
    """The noise of a linear's product y [..., O] with x [..., I]."""
    outputs: list[int] = []
    means = torch.zeros(len(rows.bias), len(linear.part_sizes))
    for index, size in enumerate(linear.part_sizes):
        first = len(outputs)
        outputs += [linear.part_start(index) + each for span in _sampled(size) for each in span]
        means[first : len(outputs), index] = 1.0 / (len(outputs) - first)
    sampled, means = torch.tensor(outputs, device=x.device), means.to(x.device)
    flat = x.reshape(-1, linear.input_size).float()
    exact = torch.addmm(rows.bias.to(x.device), flat, rows.weight.to(x.device).T)
    noise = (y.reshape(len(flat), -1)[:, sampled].float() - exact).square_() @ means
    signal = exact.square_() @ means
    ratios = torch.where(signal > 0, noise / signal, torch.nan)
    errors = ratios.nanmedian(0).values.nan_to_num_(0.0)
    return _Noise(sampled, means, errors, signal.median(0).values)


@torch.inference_mode()
def measure_weights(
    model: CausalLM, weights: LinearWeights, dtype: torch.dtype, max_model_len: int
) -> WeightNoise:
    """Measure a model that is ready to run and has no recurrent layers.

    `weights` reads the model's checkpoint. `max_model_len` limits the prompt's length. Raises
    TimeoutError if reading takes longer than MOST_SECONDS.
    """
    device = next(model.parameters()).device
    places = torch.arange(min(NUM_TOKENS, max_model_len), device=device)
    paths: dict[LinearModule, str] = {
        module: _EXPERT.sub("experts", path)
        for path, module in model.named_modules()
        if isinstance(module, Linear)
    }
    errors = _Errors(weights, dtype, paths)
    quiet = _log_probabilities(model, places, errors.measure_product)
    by_path = errors.by_path()
    generator = torch.Generator(device).manual_seed(0)

    def add_noise(linear: LinearModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = by_path.get(paths[linear])
        return y if found is None else _with_noise(linear, y, found, generator)

    noisy = _log_probabilities(model, places, add_noise)
    errors_by_path = {path: noise.worst for path, noise in by_path.items()}
    return WeightNoise(divergence(quiet, noisy).median().item(), errors_by_path)


def _with_noise(
    linear: LinearModule, y: torch.Tensor, noise: _Noise, generator: torch.Generator
) -> torch.Tensor:
    """y [..., O] plus random noise, whose ratio to each token's signal is the measured error.

    The signal is taken from the sampled outputs, like the noise. Over all outputs, a single massive
    output would dominate the signal.
    """
    powers = y[..., noise.outputs].float().square_() @ noise.means
    # If a part's sampled outputs are zero for all tokens, the exact signal is used instead. If they
    # are zero for a single token, such as padding, that token gets no noise.
    has_signal = (powers > 0).flatten(0, -2).any(0)
    powers = torch.where(has_signal, powers, noise.signals)
    deviations = powers.mul_(noise.errors).sqrt_()
    random = torch.randn(y.shape, device=y.device, generator=generator)
    for index, part in enumerate(torch.split(random, list(linear.part_sizes), dim=-1)):
        part.mul_(deviations[..., index : index + 1])
    return random.add_(y).to(y.dtype)


def _log_probabilities(
    model: CausalLM, places: torch.Tensor, on_product: OnProduct
) -> torch.Tensor:
    """Next-token log-probabilities [T, vocabulary] fp32 after the prompt's tokens at `places`."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    with watched_products(linears, on_product):
        token_ids = places * TOKEN_STRIDE % model.vocab_size
        hidden = model(token_ids, places, ExactAttention(model.attention_specs))
        return torch.log_softmax(model.logits(hidden), dim=-1)


@dataclass(frozen=True, slots=True)
class ModelRounding:
    """A rounding of a model's weights or activations."""

    #: The name of the rounding in messages.
    name: str

    #: The remedy if the rounding is bad for the model, in the imperative.
    advice: str


def rounding_of(quantization: str | None, config: ModelConfig) -> ModelRounding | None:
    """The rounding of a model; None if nothing is rounded, or if the rounding harms all models
    about equally.

    `quantization` is the engine's option.
    """
    if quantization is not None:
        return ModelRounding(f"quantization={quantization}", "use another format, or none")
    if config.quantized is not None and config.quantized.has_token_scales:
        name = f"rounding activations with one scale a token, as {config.quantized.method} says,"
        return ModelRounding(name, "use the original checkpoint, before it was quantized")
    return None


def check_weights(
    model: TextModel, setup: CheckedSetup, rounding: ModelRounding, max_model_len: int
) -> None:
    """Measure the noise and log it. Logs a warning if the rounding is bad for the model.

    If it can't be measured, for example because the checkpoint can't be read again, the reason is
    logged, and the model is served nevertheless.
    """
    if reason := _why_not(model, setup):
        logger.info("what %s costs this model is not measured, as %s", rounding.name, reason)
        return
    assert isinstance(model, CausalLM)
    began_s = time.perf_counter()
    try:
        weights = LinearWeights(setup.folder, setup.config, model)
        found = measure_weights(model, weights, setup.dtype, max_model_len)
    except TimeoutError as error:  # before OSError, since it is a subclass
        logger.info("what %s costs this model is not measured, as %s", rounding.name, error)
        return
    except (CheckpointError, OSError) as error:
        logger.warning("what %s costs this model can't be measured: %s", rounding.name, error)
        return
    _log_result(found, rounding, setup.folder, time.perf_counter() - began_s)


def _why_not(model: TextModel, setup: CheckedSetup) -> str | None:
    if setup.num_ranks > 1:
        return "each rank has a share of it"
    methods = {module.method.storage for module in model.modules() if isinstance(module, Linear)}
    if any(
        isinstance(method, RoundedTorchMethod | BlockQuantizedTorchMethod) for method in methods
    ):
        return "torch multiplies its weights, which would take long"
    if model.recurrent_specs:
        return "it has recurrent layers"
    return None if isinstance(model, CausalLM) else "it predicts no tokens"


def _log_result(found: WeightNoise, rounding: ModelRounding, folder: Path, took_s: float) -> None:
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
