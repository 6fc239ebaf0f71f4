"""Reads what a model folder is, how it would be served here, and what that takes.

For `quire doctor MODEL`: from config, tokenizer and the names of the weights, without loading them;
of a model of the hub only small files are fetched. Everything is asked of what serves it. Called by
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
from quire.formats.registry import weight_format_names
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
"""The precision of weights that are quantized already: their codes, where a layout holds these."""
_NOT_FETCHED = "what its weights take is seen in their files, which are not fetched yet"


@dataclass(frozen=True, slots=True)
class Precision:
    """One way to store the weights.

    weight_bytes: of all. token_bytes: of those that decoding a token reads. kv_bytes: of a sequence
    of the report's length, which decoding behind it reads, too. obstacle: why the model can't be
    served so here; None: it can.
    """

    name: str
    weight_bytes: int = 0
    token_bytes: int = 0
    kv_bytes: int = 0
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What a model is, and what it takes.

    generates: it predicts tokens; False: it embeds or scores. num_active_weights: that a token is
    computed from. kv_kinds: what layers remember, with how many do. dtype: that it would be served
    in. kernels: what computes; device_type: where. num_tokens: of the sequence that
    `Precision.kv_bytes` is of. problem: why it can't be served as it is, though its config is
    understood. tokenizer_problem: why it can't be served text; None, as before: it can.
    transformers_version: of the class that computes the model; None: quire's own does. wrapper: the
    multimodal architecture of which this is the language model; None: it is whole. adapter_bytes:
    of the slots that enable_lora takes without further options. adapter_problem: why there can be
    none; None: there can.
    """

    folder: Path
    architecture: str
    generates: bool
    num_weights: int
    num_active_weights: int
    num_layers: int
    kv_kinds: tuple[tuple[str, int], ...]
    max_positions: int
    has_weights: bool
    dtype: str
    kernels: str
    device_type: str
    num_tokens: int
    precisions: tuple[Precision, ...]
    problem: str | None
    tokenizer_problem: str | None
    transformers_version: str | None = None
    wrapper: str | None = None
    adapter_bytes: int = 0
    adapter_problem: str | None = None


def report_on(model: str, revision: str | None, num_tokens: int) -> ModelReport:
    """What there is to say of a folder or a hub id. num_tokens: of a sequence, to size the KV cache
    for; at most what the model takes.

    Raises QuireError with the reason for a model that is not served at all.
    """
    found = find_model(model, revision)
    options = EngineOptions(model=str(found.folder), skip_tokenizer_init=True)
    kind = choose_kind(options)
    config = kind.config
    setup = choose_setup(kind.options, config, choose_device(options.device), None)
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
        adapter_bytes=num_adapter_bytes,
        adapter_problem=adapter_problem,
    )


def kv_kinds(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """What the layers of a model remember: ("full", number of layers), and so on."""
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
    """In the dtypes, or as they are quantized already; then in the formats that round them."""
    is_quantized = kind.config.quantized is not None
    if is_quantized and not (found.has_weights or found.folder.is_file()):
        yield Precision(AS_STORED, obstacle=_NOT_FETCHED)
    elif is_quantized:
        yield _precision(AS_STORED, kind.options, kind.config, num_tokens, kind.folder)
    for dtype in () if is_quantized else DENSE:
        yield _precision(dtype, replace(kind.options, dtype=dtype), kind.config, num_tokens)
    for name in weight_format_names():
        options = replace(kind.options, quantization=name)
        yield _precision(name, options, kind.config, num_tokens)


def _precision(
    name: str,
    options: EngineOptions,
    config: ModelConfig,
    num_tokens: int,
    quantized: Path | None = None,
) -> Precision:
    """quantized: where the weights are, of a model whose weights are to be looked at."""
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
        setup.kv_dtype,
        recurrent_specs=config.recurrent_specs,
        typical_tokens=num_tokens,
    )


def _adapters(kind: ModelKind, setup: DeviceSetup) -> tuple[int, str | None]:
    """What the slots of adapters take; or why the model can have none."""
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
    """What is wrong with the weights, by their names and sizes."""
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
