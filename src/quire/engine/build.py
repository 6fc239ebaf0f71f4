"""The composition root: the one file that knows every class. Options in, an engine out."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from quire.attention.interface import AttentionBackend
from quire.attention.registry import select
from quire.config import EngineOptions
from quire.core.contiguous import make_memory
from quire.core.eviction import find_order
from quire.core.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.pacing import StepPacer
from quire.core.policy import find_policy
from quire.core.sampling_params import ModelLimits
from quire.core.scheduler import Scheduler, SchedulerConfig
from quire.engine.engine import Engine
from quire.engine.stats import StatsLog
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.sampling import NativeSampling
from quire.kernels.cpu.selection import select_kernels, settle_torch_threads
from quire.layers.methods import choose_methods
from quire.models.checkpoint import Checkpoint
from quire.models.config import DecoderConfig
from quire.models.generation_config import load_generation_config
from quire.models.hub import resolve_model_folder
from quire.models.interface import CausalLM
from quire.models.loader import load_model, weight_bytes
from quire.models.registry import load_config
from quire.observability.log import get_logger
from quire.runtime.batch import RowBatch
from quire.runtime.calibration import RunnerShape, calibrated_pacer
from quire.runtime.kv_cache import KVCache, KVCacheLayout, plan_layout
from quire.runtime.memory import available_memory_bytes, total_memory_bytes
from quire.runtime.model_runner import ModelRunner
from quire.sampling.sampler import Sampler, SamplingRows

# With no size given, the KV cache takes at most this share of the memory that is free.
DEFAULT_FREE_SHARE = 0.3

logger = get_logger(__name__)


OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much (0: not known)."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """num_blocks: KV blocks in the pool. max_model_len: tokens of the longest sequence."""

    num_blocks: int
    max_model_len: int


def build_engine(options: Mapping[str, Any], on_progress: OnProgress | None = None) -> Engine:
    """An engine that is ready to step.

    Raises ConfigurationError and its kinds: options that can't be obeyed, a model that is not
    understood or can't be read, not enough memory.
    """
    checked = EngineOptions.from_mapping(options)
    with _named_out_of_memory(checked):
        return _build(checked, on_progress or (lambda text, done, total: None))


def _build(checked: EngineOptions, tell: OnProgress) -> Engine:
    scheduler_config = SchedulerConfig(
        checked.max_num_seqs, checked.max_num_batched_tokens, checked.num_lookahead_blocks
    )
    policy = find_policy(checked.scheduling_policy)
    find_order(checked.eviction)  # refused here, before the model is loaded
    device = torch.device("cpu")
    folder = resolve_model_folder(checked.model, checked.revision)
    config = load_config(folder)
    generation = load_generation_config(folder)
    dtype = choose_dtype(checked, config)
    kernels = select_kernels(checked.kernels, checked.num_threads, dtype)
    settle_torch_threads(kernels, checked.num_threads)
    backend = select(device.type, kernels=kernels)
    layout = plan_layout(config.attention_specs, type(backend), checked.block_size, dtype)
    methods = choose_methods(kernels, checked.quantization)
    num_weight_bytes = weight_bytes(folder, config, dtype, methods)
    sizes = _choose_sizes(checked, config, layout, num_weight_bytes)
    model = load_model(
        folder,
        config,
        dtype=dtype,
        device=device,
        max_model_len=sizes.max_model_len,
        methods=methods,
        num_threads=1 if kernels is None else kernels.num_threads,
        on_progress=partial(tell, "loading the weights"),
    )
    runner = _build_runner(checked, model, layout, sizes, backend, kernels)
    limits = ModelLimits(
        vocab_size=config.vocab_size,
        max_model_len=sizes.max_model_len,
        end_token_ids=generation.end_token_ids,
        defaults=generation.defaults,
        max_logprobs=min(checked.max_logprobs, config.vocab_size),
    )
    facts = _size_facts(checked, layout, sizes) | {
        "architecture": config.architecture,
        "num_parameters": _num_parameters(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": "torch" if kernels is None else kernels.isa,
        "num_threads": torch.get_num_threads() if kernels is None else kernels.num_threads,
        "weight_bytes": num_weight_bytes,
    }
    scheduler = Scheduler(scheduler_config, _build_memory(checked, layout, sizes), policy)
    engine = Engine(scheduler, runner, limits, timing=runner.timing, facts=facts)
    if checked.max_itl_ratio:
        tell("measuring what steps take", 0, 0)
        engine.scheduler.pacer = _build_pacer(checked, runner, layout, sizes, config.vocab_size)
    if not checked.disable_log_stats:
        engine.stats_log = StatsLog()
    return engine


@contextmanager
def _named_out_of_memory(options: EngineOptions) -> Iterator[None]:
    """Python's word for too little memory, and torch's, become ours."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise InsufficientMemoryError(
            "memory ran out while the engine was built; give the KV cache less of it"
            f" (kv_cache_memory, num_blocks), lower max_num_seqs ({options.max_num_seqs}) or"
            " max_model_len, or choose a smaller model or quantization"
        ) from error


def _size_facts(
    options: EngineOptions, layout: KVCacheLayout, sizes: _Sizes
) -> dict[str, int | str | None]:
    return {
        "quantization": options.quantization,
        "kv_cache_bytes": sizes.num_blocks * layout.bytes_per_block,
        "num_blocks": sizes.num_blocks,
        "block_size": options.block_size,
        "num_kv_groups": len(layout.groups),
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": sizes.max_model_len,
    }


def _num_parameters(folder: Path) -> int:
    """As the checkpoint holds them."""
    checkpoint = Checkpoint(folder)
    return sum(prod(checkpoint.shape(name)) for name in checkpoint.names)


def _build_pacer(
    options: EngineOptions,
    runner: ModelRunner,
    layout: KVCacheLayout,
    sizes: _Sizes,
    vocab_size: int,
) -> StepPacer:
    shape = RunnerShape(
        num_rows=options.max_num_seqs,
        max_num_tokens=options.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        num_groups=len(layout.groups),
        num_blocks=sizes.num_blocks,
        block_size=options.block_size,
        vocab_size=vocab_size,
    )
    return calibrated_pacer(runner, shape, options.max_itl_ratio)


def _build_memory(options: EngineOptions, layout: KVCacheLayout, sizes: _Sizes) -> KVCacheManager:
    config = KVCacheConfig(
        groups=layout.groups,
        num_blocks=sizes.num_blocks,
        block_size=options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        secret=secrets.token_bytes(16),
        eviction=options.eviction,
    )
    return make_memory(options.kv_allocator, config, sizes.max_model_len)


def _build_runner(
    options: EngineOptions,
    model: CausalLM,
    layout: KVCacheLayout,
    sizes: _Sizes,
    backend: AttentionBackend,
    kernels: NativeKernels | None,
) -> ModelRunner:
    device = torch.device("cpu")
    try:
        rows = RowBatch(
            num_rows=options.max_num_seqs,
            max_model_len=sizes.max_model_len,
            max_num_tokens=options.max_num_batched_tokens,
            num_groups=len(layout.groups),
            block_size=options.block_size,
        )
    except MemoryError as error:
        raise InsufficientMemoryError(
            f"max_num_seqs={options.max_num_seqs} rows of {sizes.max_model_len} tokens do not fit"
            " into memory; lower max_num_seqs or max_model_len"
        ) from error
    kv_cache = KVCache(layout, sizes.num_blocks, device)
    native_sampling = None if kernels is None else NativeSampling(kernels)
    sampler = Sampler(SamplingRows(options.max_num_seqs, model.vocab_size), native_sampling)
    return ModelRunner(model, backend, kv_cache, rows, sampler, kernels)


def choose_dtype(options: EngineOptions, config: DecoderConfig) -> torch.dtype:
    """The dtype asked for; on "auto" the checkpoint's own, where the processor computes with it."""
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    own = config.dtype or torch.float32
    if own is torch.float16 or (own is torch.bfloat16 and not _has_bfloat16()):
        logger.info("this processor only emulates %s; computing in float32", own)
        return torch.float32
    return own


def _has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 (AVX-512 BF16, AMX, Arm's bf16)."""
    flags = Path("/proc/cpuinfo").read_text().lower().split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _choose_sizes(
    options: EngineOptions, config: DecoderConfig, layout: KVCacheLayout, weight_bytes: int
) -> _Sizes:
    """How many blocks, and how long a sequence may be. The rules stand in EngineOptions."""
    longest = config.max_supported_positions
    if options.max_model_len is not None and options.max_model_len > longest:
        rope, factor = type(config.rope).__name__, longest / config.max_position_embeddings
        how = f"which its {rope} stretches {factor:g} times"
        raise ConfigurationError(
            f"max_model_len is {options.max_model_len}, but the model was made for at most"
            f" {longest} positions (max_position_embeddings is {config.max_position_embeddings},"
            f" {how if factor > 1 else f'and its {rope} does not stretch it'}); lower max_model_len"
        )
    wanted_len = options.max_model_len or config.max_position_embeddings
    num_blocks = _choose_num_blocks(options, layout, wanted_len, weight_bytes)
    fitting_len = num_blocks // len(layout.groups) * options.block_size
    if fitting_len >= wanted_len:
        return _Sizes(num_blocks, wanted_len)
    there = (
        f"{num_blocks} KV blocks of {layout.bytes_per_block} bytes hold {fitting_len} tokens"
        f" of one sequence"
    )
    if options.max_model_len is not None or fitting_len < 2:
        raise InsufficientMemoryError(
            f"{there}, but max_model_len is {wanted_len}; raise kv_cache_memory (or num_blocks) to"
            f" {_blocks_for(wanted_len, options, layout) * layout.bytes_per_block} bytes or more,"
            " or lower max_model_len"
        )
    logger.warning("%s, so max_model_len is %d instead of %d", there, fitting_len, wanted_len)
    return _Sizes(num_blocks, fitting_len)


def _choose_num_blocks(
    options: EngineOptions, layout: KVCacheLayout, model_len: int, weight_bytes: int
) -> int:
    page = layout.bytes_per_block
    total, available = total_memory_bytes(), available_memory_bytes()
    if options.num_blocks is not None:
        num_blocks, source = options.num_blocks, f"num_blocks={options.num_blocks}"
    elif options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // page
        source = f"kv_cache_memory={options.kv_cache_memory}"
    elif options.gpu_memory_utilization is not None:
        share = int(total * options.gpu_memory_utilization)
        num_blocks = max(0, share - weight_bytes) // page
        source = f"gpu_memory_utilization={options.gpu_memory_utilization}"
    else:
        enough = _blocks_for(model_len, options, layout) * options.max_num_seqs
        room = max(0, available - weight_bytes)
        num_blocks = min(enough, int(room * DEFAULT_FREE_SHARE) // page)
        source = f"{available} bytes of available memory"
    if num_blocks * page + weight_bytes > available:
        raise InsufficientMemoryError(
            f"{source} asks for {num_blocks * page / 2**30:.1f} GiB of KV cache beside"
            f" {weight_bytes / 2**30:.1f} GiB of weights, but the machine has"
            f" {available / 2**30:.1f} GiB available now of {total / 2**30:.1f} GiB in all; lower"
            " num_blocks, kv_cache_memory or gpu_memory_utilization, or free memory"
        )
    if num_blocks < len(layout.groups):
        raise InsufficientMemoryError(
            f"{source} leaves no room for one KV block of each of the model's"
            f" {len(layout.groups)} KV groups ({page} bytes each); give the KV cache more memory"
        )
    return num_blocks


def _blocks_for(num_tokens: int, options: EngineOptions, layout: KVCacheLayout) -> int:
    return -(-num_tokens // options.block_size) * len(layout.groups)
