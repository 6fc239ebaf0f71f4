"""Reports a model's properties, how this machine would serve it, and how much memory it takes.

For `quire doctor MODEL`. Reads config, tokenizer and the names of weights, without loading weights.
Of a model on the hub, fetches only small files. Uses the code that serves models. Called by
`cli.doctor.model`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quire.adapters.model_adapters import adapter_bytes
from quire.assembly.device_setup import DeviceSetup, choose_device, choose_setup
from quire.assembly.model_kind import ModelKind, choose_kind
from quire.attention.interface import AttentionSpec
from quire.compat.refusals import POOLED_ADAPTERS
from quire.core.adapter_options import AdapterOptions
from quire.core.memory.growth import Growth
from quire.errors import QuireError
from quire.formats.format_registry import WEIGHT_FORMATS
from quire.hub.found_model import FoundModel
from quire.hub.model_folder import find_model
from quire.models.checkpoints.loader import weight_bytes
from quire.models.config import ModelConfig
from quire.models.fallback.fallback_config import FallbackConfig
from quire.models.footprint import footprint, num_weights, served_footprint
from quire.options.engine_options import EngineOptions
from quire.runtime.page_layout import KVCacheLayout, plan_layout
from quire.text.tokenizer import Tokenizer

DENSE = ("bfloat16", "float32")
AS_STORED = "as stored"
"""Name of the precision of weights that are quantized in the checkpoint."""
_NOT_FETCHED = "the size of its weights is unknown until their files are fetched"


@dataclass(frozen=True, slots=True)
class Precision:
    """One way to store the weights."""

    name: str
    #: Bytes of all weights.
    weight_bytes: int = 0
    #: Bytes of the weights that decoding a token reads.
    token_bytes: int = 0
    #: Bytes of K, V and states of a sequence of the report's length. Decoding a token reads them,
    #: too.
    kv_bytes: int = 0
    #: Why this machine can't serve the model in this precision; None if it can.
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model's properties, and the memory that it takes."""

    folder: Path
    architecture: str
    #: Whether the model predicts tokens; otherwise it embeds or scores.
    generates: bool
    num_weights: int
    #: The number of weights that the forward pass of one token uses; with experts, fewer than all.
    num_active_weights: int
    num_layers: int
    #: The result of `kv_kinds`.
    kv_kinds: tuple[tuple[str, int], ...]
    max_positions: int
    has_weights: bool
    #: The dtype in which the model would be served.
    dtype: str
    #: The kernels' name, as in `DeviceSetup.name`.
    kernels: str
    device_type: str
    #: Number of tokens of the sequence whose memory is `Precision.kv_bytes`.
    num_tokens: int
    precisions: tuple[Precision, ...]
    #: Why the model can't be served although its config is valid; None if it can.
    problem: str | None
    #: Why the model can't be given text; None if it can.
    tokenizer_problem: str | None
    #: The version of transformers whose class computes the model; None if quire's own class does.
    transformers_version: str | None = None
    #: Name of the multimodal architecture that contains this language model; None for a text model.
    wrapper: str | None = None
    #: Whether a multimodal model takes images here.
    takes_images: bool = False
    #: Bytes of the adapter slots if enable_lora is set and no other option of adapters.
    adapter_bytes: int = 0
    #: Why the model can have no adapters; None if it can.
    adapter_problem: str | None = None


def report_on(model: str, revision: str | None, num_tokens: int) -> ModelReport:
    """The report on a model folder or a hub id.

    KV memory is computed for a sequence of `num_tokens` tokens, or of the model's longest length if
    that is less. Raises QuireError with the reason if the model can't be served at all.
    """
    # First, find the model without its weights, and the setup that would serve it.
    found = find_model(model, revision)
    options = EngineOptions(model=str(found.folder), skip_tokenizer_init=True)
    kind = choose_kind(options)
    config = kind.config
    setup = choose_setup(kind.options, config, choose_device(options.device), None)
    # Then count its weights and the memory of each precision.
    num_tokens = min(num_tokens, config.max_supported_positions)
    counted = num_weights(config)
    num_adapter_bytes, adapter_problem = _adapters(kind, setup)
    return ModelReport(
        folder=found.folder,
        architecture=config.architecture,
        generates=kind.generates,
        num_weights=counted.weight_bytes,
        num_active_weights=counted.token_bytes,
        num_layers=config.num_layers,
        kv_kinds=kv_kinds(config),
        max_positions=config.max_supported_positions,
        has_weights=found.has_weights,
        dtype=str(setup.dtype).removeprefix("torch."),
        kernels=setup.name,
        device_type=setup.device.type,
        num_tokens=num_tokens,
        precisions=tuple(_precisions(kind, num_tokens, found)),
        problem=_problem(kind, setup) if found.has_weights else None,
        tokenizer_problem=_tokenizer_problem(found.folder),
        transformers_version=(
            config.transformers_version if isinstance(config, FallbackConfig) else None
        ),
        wrapper=config.wrapper,
        takes_images=kind.tower is not None,
        adapter_bytes=num_adapter_bytes,
        adapter_problem=adapter_problem,
    )


def kv_kinds(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """The kinds of KV memory and states of a model, each with its number of layers."""
    kinds = Counter(_kind_of(spec) for spec in config.attention_specs)
    kinds.update(state=len(config.recurrent_specs))
    return tuple((kind, count) for kind, count in kinds.items() if count)


def _kind_of(spec: AttentionSpec) -> str:
    if spec.value_dim is not None:
        return "latent"
    if not spec.causal:
        return "both directions"
    return "full" if spec.window is None else f"window of {spec.window}"


def _precisions(kind: ModelKind, num_tokens: int, found: FoundModel) -> Iterator[Precision]:
    """Yield the precisions of the dense dtypes, or of a quantized checkpoint as stored, and then of
    all weight formats."""
    is_quantized = kind.config.quantized is not None
    if is_quantized and not (found.has_weights or found.folder.is_file()):
        yield Precision(AS_STORED, obstacle=_NOT_FETCHED)
    elif is_quantized:
        yield _precision(AS_STORED, kind.options, kind.config, num_tokens, kind.folder)
    for dtype in () if is_quantized else DENSE:
        yield _precision(dtype, replace(kind.options, dtype=dtype), kind.config, num_tokens)
    for name in WEIGHT_FORMATS:
        options = replace(kind.options, quantization=name)
        yield _precision(name, options, kind.config, num_tokens)


def _precision(
    name: str,
    options: EngineOptions,
    config: ModelConfig,
    num_tokens: int,
    quantized: Path | None = None,
) -> Precision:
    """The memory that one precision takes. `quantized` is the folder of a quantized checkpoint, in
    which the sizes of tensors are read; None for other checkpoints."""
    try:
        setup = choose_setup(options, config, choose_device(options.device), None)
        layout = _layout(setup, options, config, num_tokens)
        sizes = (
            footprint(config, setup.dtype, setup.methods)
            if quantized is None
            else served_footprint(quantized, config, setup.dtype, setup.methods)
        )
    except QuireError as error:
        return Precision(name, obstacle=str(error))
    num_blocks = Growth(layout.groups, options.block_size).most_to_hold(num_tokens)
    kv_bytes = num_blocks * layout.bytes_per_block
    return Precision(name, sizes.weight_bytes, sizes.token_bytes, kv_bytes)


def _layout(
    setup: DeviceSetup, options: EngineOptions, config: ModelConfig, num_tokens: int
) -> KVCacheLayout:
    return plan_layout(
        config.attention_specs,
        type(setup.new_backend()),
        options.block_size,
        setup.kv_format,
        recurrent_specs=config.recurrent_specs,
        typical_tokens=num_tokens,
    )


def _adapters(kind: ModelKind, setup: DeviceSetup) -> tuple[int, str | None]:
    """The bytes of adapter slots, and the reason if the model can have no adapters."""
    if not kind.generates:
        return 0, POOLED_ADAPTERS
    if isinstance(kind.config, FallbackConfig):
        return 0, "adapters are served for models that quire computes itself"
    options, kernels = (
        AdapterOptions(enable_lora=True),
        setup.new_adapter_kernels(1, captures=False),
    )
    return adapter_bytes(options, kind.config, setup.methods, kernels, setup.dtype), None


def _problem(kind: ModelKind, setup: DeviceSetup) -> str | None:
    """An error in the names or sizes of the weights; None if there is none."""
    try:
        weight_bytes(kind.folder, kind.config, setup.dtype, setup.methods)
    except QuireError as error:
        return str(error)
    return None


def _tokenizer_problem(folder: Path) -> str | None:
    try:
        Tokenizer.from_folder(folder)
    except QuireError as error:
        return str(error)
    return None
