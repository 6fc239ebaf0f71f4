"""The composition root: builds an engine from its options.

Only this file, `device_setup` and `rank_build` import the classes of all packages. `device_setup`
and `rank_build` build one rank.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch

from quire.assembly.device_setup import choose_device
from quire.assembly.draft_model_build import with_draft_model
from quire.assembly.host_memory_plan import MemoryPlan
from quire.assembly.model_kind import (
    ModelKind,
    choose_kind,
    log_unexpected_properties,
    tokenizer_folder,
)
from quire.assembly.rank_build import RankBuild, bind_threads, build_rank
from quire.assembly.reports.machine_rates import measure_rates
from quire.assembly.scheduler_build import answer_facts, make_scheduler
from quire.assembly.start_costs import StartCostFile, StartCosts, start_facts
from quire.assembly.tier_build import (
    build_ranked_tiers,
    build_tiers,
    cache_folder,
    check_host_tier,
    secret_of,
)
from quire.child_process import python_command
from quire.core.memory.growth import Growth
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVManagerFactory, paged_manager
from quire.core.memory.tiers.contract import Tiers
from quire.core.sampling_params import ModelLimits
from quire.core.scheduling.cost_model import StepCostModel
from quire.core.scheduling.pacing import LearningPacer, PacingConfig, StepPacer
from quire.core.scheduling.policy import POLICIES, Policy
from quire.core.step import Runner
from quire.distributed.group import ProcessGroup
from quire.engine.adapter_work import AdapterWork
from quire.engine.background_runner import BackgroundRunner
from quire.engine.content_work import ContentWork
from quire.engine.engine import Engine
from quire.engine.grammar_work import GrammarWork
from quire.engine.stats import StatsLog
from quire.engine_client.device_ledger import TYPICAL_REQUEST_TOKENS
from quire.engine_client.grammars import SharedCompiler
from quire.engine_client.messages import OnProgress
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.models.checkpoints.readers import open_checkpoint
from quire.models.generation_config import GenerationConfig, load_generation_config
from quire.models.sharding import check_split
from quire.numa.binding import unbind_threads
from quire.numa.stragglers import Stragglers
from quire.observability import nvml
from quire.observability.log import get_logger
from quire.observability.machine_processors import usable_processors
from quire.options.engine_options import EngineOptions
from quire.options.pooling_options import GENERATE, POOLING
from quire.runtime.calibration import (
    LARGEST_CHUNK,
    RunnerShape,
    calibrated_model,
    still_holds,
)
from quire.runtime.device_memory import is_out_of_memory
from quire.runtime.executor import DistributedRunner, Workers, first_rank
from quire.runtime.page_layout import KVCacheLayout
from quire.runtime.worker import Join
from quire.text.tokenizer import Tokenizer
from quire.tiers.disk.folder import CacheFolder

logger = get_logger(__name__)

MAX_MASK_THREADS = 8
"""Maximum number of threads that compute grammar masks. With more, distributing the work takes as
long as computing the masks."""

WORKER_COMMAND = python_command("quire.engine_process.worker_main")
"""The command that starts the process of a rank beyond the first."""


def build_engine(
    options: EngineOptions | Mapping[str, Any],
    on_progress: OnProgress | None = None,
    kv_allocator: KVManagerFactory | None = None,
    tokenizer: Tokenizer | None = None,
    watch: Callable[[Runner], Runner] | None = None,
) -> Engine:
    """Build an engine that is ready to step. `options` may also map option names to values.

    `kv_allocator` makes the manager of KV memory, for comparisons; None makes the paged manager.
    With a `kv_allocator`, there is a prefix cache only if the options ask for it. `tokenizer` is
    for grammars. None reads the options' tokenizer when the first grammar comes. `watch` wraps the
    runner, to observe its calls.

    Raises ConfigurationError and its subclasses if options can't be obeyed, the model is unknown or
    can't be read, or memory is insufficient.
    """
    # First, check the options, before a model is fetched.
    if isinstance(options, EngineOptions):
        checked = options
    else:
        if kv_allocator is not None and options.get("enable_prefix_caching") is None:
            options = {**options, "enable_prefix_caching": False}
        checked = EngineOptions.from_mapping(options)
    policy = POLICIES.make(checked.scheduling_policy)
    check_host_tier(checked)
    with _named_out_of_memory(checked):
        # Then find the model.
        kind = choose_kind(checked, on_progress)
        log_unexpected_properties(kind)
        _check_adapters(kind)
        kind = with_draft_model(kind, on_progress)
        generation = load_generation_config(kind.folder)
        compiler = None
        if not checked.skip_tokenizer_init:
            compiler = _compiler(kind, generation, tokenizer)
        # Last, build the engine.
        with cache_folder(checked) as folder:
            engine = _build(
                policy,
                kind,
                generation,
                compiler,
                on_progress or _ignore_progress,
                kv_allocator or paged_manager,
                folder,
                watch or _unwatched,
            )
    # If the caller doesn't close the tiers, this closes them when the engine or the process ends.
    weakref.finalize(engine, engine.tier_work.close)
    return engine


def _check_adapters(kind: ModelKind) -> None:
    if kind.options.enable_lora and not kind.generates:
        raise ConfigurationError(
            "enable_lora is set, but the model embeds or scores, and adapters are served only for"
            " models that generate text; leave it out"
        )


def build_worker(join: Join, tell_joining: Callable[[], None]) -> tuple[EngineOptions, RankBuild]:
    """Build a rank beyond the first. Returns the options and the rank; see
    `runtime.worker.Build`."""
    checked = EngineOptions.from_mapping(join.options)
    device = choose_device(checked.device, join.rank, join.size)
    binding = bind_threads(checked, device, join.rank, join.size)
    tell_joining()
    group = ProcessGroup(
        Path(join.rendezvous),
        join.rank,
        join.size,
        device,
        fixed_order=checked.batch_invariant,
    )
    with _named_out_of_memory(checked):
        kind = with_draft_model(choose_kind(checked), _ignore_progress)
        rank = build_rank(
            kind.options,
            kind.folder,
            kind.config,
            group,
            binding,
            _ignore_progress,
            kind.draft,
            kind.tower,
        )
    return kind.options, rank


def _do_nothing() -> None:
    """A `wake_up` that does nothing, for tiers of one rank: their callers and the idle engine poll
    the tiers."""


def _unwatched(runner: Runner) -> Runner:
    """A `watch` that returns the runner itself."""
    return runner


def _ignore_progress(text: str, done: int, total: int) -> None:
    """An `OnProgress` for builds whose progress is not shown."""


def _build(
    policy: Policy,
    kind: ModelKind,
    generation: GenerationConfig,
    compiler: SharedCompiler | None,
    on_progress: OnProgress,
    make_memory: KVManagerFactory,
    cache: CacheFolder | None,
    watch: Callable[[Runner], Runner],
) -> Engine:
    checked, config = kind.options, kind.config
    rank, own_runner, tiers = _build_ranks(kind, on_progress, cache)
    # First, collect the limits of requests and the facts that the engine reports.
    memory_plan, layout = rank.memory_plan, rank.layout
    limits = ModelLimits(
        vocab_size=config.vocab_size,
        max_model_len=memory_plan.max_model_len,
        end_token_ids=generation.end_token_ids,
        defaults=generation.defaults,
        max_logprobs=checked.bound_of_logprobs(config.vocab_size),
        reads_priority=policy.reads_priority,
        reads_deadline=policy.reads_deadline,
        generates=kind.generates,
        num_token_types=config.num_token_types,
        max_content_tokens=0 if rank.contents is None else rank.contents.max_content_tokens,
        pooling=kind.pooling,
    )
    facts = _model_facts(kind, layout, memory_plan)
    # Then make the scheduler and the runner. Scheduling may overlap with the runner's steps.
    memory = make_memory(
        _memory_config(checked, layout, memory_plan, cache, tiers), memory_plan.max_model_len
    )
    is_on_gpu = rank.device.type == "cuda"
    scheduler = make_scheduler(kind, memory, policy, rank)
    may_overlap = may_overlap_on_cpu(checked) and rank.contents is None
    background = _background(rank) if may_overlap and not is_on_gpu else None
    # A step that waits for experts on the host would only delay the previous step's tokens.
    is_async = checked.async_scheduling
    if is_async is None:
        is_async = is_on_gpu and rank.setup.methods.host is None
    engine = Engine(
        scheduler,
        watch(background or own_runner),
        limits,
        timing=(background or rank.runner).timing,
        facts=facts | rank.facts | ({} if is_on_gpu else answer_facts(scheduler)),
        # On other devices nothing overlaps: each result would come a step later without any gain.
        overlap=is_async and (is_on_gpu or background is not None or rank.setup.is_triton),
    )
    # Last, connect the engine's optional parts, and measure steps for pacing.
    engine.adapters = AdapterWork(scheduler, rank.adapters)
    engine.contents = ContentWork(scheduler, rank.contents)
    _set_up_utilization(engine, rank, checked)
    if checked.tensor_parallel_size == 1:
        engine.kv_memory = rank.runner
    if rank.binding is not None and rank.binding.leaves_nodes:
        engine.on_idle = Stragglers(rank.binding).search_when_idle
    if checked.max_itl_ratio and not kind.generates:  # it has no decodes to pace
        engine.utilization.rates = measure_rates(rank.setup, checked.quantization)
    elif checked.max_itl_ratio:
        on_progress("measuring what steps take", 0, 0)
        _measure_steps(engine, rank, own_runner, kind)
    elif scheduler.drafting is not None:
        scheduler.pacer = LearningPacer()
    if checked.enforce_eager and not is_on_gpu:
        logger.info("enforce_eager changes nothing here: a CPU captures no CUDA graphs")
    if compiler is not None:
        engine.grammars = _grammar_work(compiler, limits)
    return engine


def may_overlap_on_cpu(options: EngineOptions) -> bool:
    """Whether steps on the CPU run on their own thread, while the engine's thread schedules.

    The options must ask for it. Several ranks don't support it. Neither do tiers or adapters, since
    the engine's thread copies blocks and loads adapters, during which no step may run. Neither do
    models that take images, which that thread encodes; the caller checks this.
    """
    has_tiers = options.cache_dir is not None or options.host_cache_size is not None
    is_alone = options.tensor_parallel_size == 1
    return bool(options.async_scheduling) and is_alone and not (has_tiers or options.enable_lora)


def _background(rank: RankBuild) -> BackgroundRunner | None:
    """A runner that runs the rank's steps on its own thread. None with Triton's kernels, since
    their runner only queues work and returns.
    """
    if rank.setup.is_triton:
        return None
    background = BackgroundRunner(rank.runner, rank.runner.timing)
    rank.runner.on_forward = background.on_forward
    return background


def _use_pacer(engine: Engine, pacer: StepPacer, checked: EngineOptions) -> None:
    """Pace steps by `pacer`. Its present cost model becomes the reference to which later step times
    are compared."""
    engine.scheduler.pacer, engine.facts["step_costs"] = pacer, pacer.model.coefficients
    engine.utilization.expected = StepCostModel(pacer.model.coefficients)
    engine.tier_work.expect(
        pacer.model,
        min(checked.max_num_batched_tokens, LARGEST_CHUNK),
        engine.limits.max_model_len,
    )


def _set_up_utilization(engine: Engine, rank: RankBuild, checked: EngineOptions) -> None:
    """Give the engine its step log, and `engine.utilization` the least work of steps."""
    if not checked.disable_log_stats:
        engine.stats_log = StatsLog()
    utilization = engine.utilization
    utilization.work = rank.work
    if rank.device.type == "cuda":
        uuid = torch.cuda.get_device_properties(rank.device).uuid
        utilization.monitor = nvml.watch(f"GPU-{uuid}")


def _compiler(
    kind: ModelKind, generation: GenerationConfig, tokenizer: Tokenizer | None
) -> SharedCompiler:
    def find_tokenizer() -> Tokenizer:
        if tokenizer is not None:
            return tokenizer
        return Tokenizer.from_folder(tokenizer_folder(kind.options))

    return SharedCompiler(find_tokenizer, kind.config.vocab_size, generation.end_token_ids)


def _grammar_work(compiler: SharedCompiler, limits: ModelLimits) -> GrammarWork:
    num_threads = max(1, min(MAX_MASK_THREADS, usable_processors() // 2))
    return GrammarWork(compiler, limits.end_token_ids, num_threads=num_threads)


def _build_ranks(
    kind: ModelKind, on_progress: OnProgress, cache: CacheFolder | None
) -> tuple[RankBuild, Runner, Tiers | None]:
    """Build all ranks. Returns rank 0, which is in this process, the runner that drives all ranks,
    and the cache tiers below the KV pool, if any."""
    checked, folder, config, draft = kind.options, kind.folder, kind.config, kind.draft
    size = checked.tensor_parallel_size
    unbind_threads()  # else the other ranks' processes would inherit the binding
    if size == 1:
        binding = bind_threads(checked, choose_device(checked.device), 0, 1)
        rank = build_rank(checked, folder, config, None, binding, on_progress, draft, kind.tower)
        return rank, rank.runner, build_tiers(cache, checked, rank, _do_nothing)
    check_split(config, size)
    device = choose_device(checked.device, 0, size)
    if device.type == "cpu":
        _warn_of_shared_processors(size, usable_processors())
    lock = None if cache is None else cache.lock_descriptor
    workers = Workers(WORKER_COMMAND, checked.as_mapping(), size, lock)
    binding = bind_threads(checked, device, 0, size)  # after the workers' processes have started
    with first_rank(workers, device, fixed_order=checked.batch_invariant) as group:
        rank = build_rank(checked, folder, config, group, binding, on_progress, draft, kind.tower)
    runner = DistributedRunner(rank.runner, workers)
    if cache is None:
        return rank, runner, None
    try:
        tiers = build_ranked_tiers(cache, checked, rank, workers.moves, lambda: runner.num_calls)
    except BaseException:
        workers.end()  # the workers hold the folder's lock, too
        raise
    return rank, runner, tiers


def _warn_of_shared_processors(num_ranks: int, num_processors: int) -> None:
    if num_ranks > num_processors:
        logger.warning(
            "--tensor-parallel-size is %d, but this process may use only %d of the machine's"
            " processors: ranks take turns on them and wait for each other in every layer. On 2"
            " processors, 3 ranks took 6 times as long for a token as 1 (135 M parameters), and 4"
            " ranks 26 to 75 times as long (3.8 M); lower it",
            *(num_ranks, num_processors),
        )


@contextmanager
def _named_out_of_memory(options: EngineOptions) -> Iterator[None]:
    """Turn out-of-memory errors of Python and torch into InsufficientMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        slots = ""
        if options.enable_lora:
            slots = f" max_loras ({options.num_lora_slots}), max_lora_rank ({options.lora_rank}),"
        raise InsufficientMemoryError(
            "memory ran out while the engine was built; give the KV cache less of it"
            f" (kv_cache_memory, num_blocks, gpu_memory_utilization), lower{slots} max_num_seqs"
            f" ({options.max_num_seqs}), max_num_batched_tokens ({options.max_num_batched_tokens})"
            " or max_model_len, or choose a smaller model or quantization"
        ) from error


def _model_facts(
    kind: ModelKind, layout: KVCacheLayout, memory_plan: MemoryPlan
) -> dict[str, int | str | None]:
    options = kind.options
    num_tokens = min(TYPICAL_REQUEST_TOKENS, memory_plan.max_model_len)
    growth = Growth(layout.groups, options.block_size)
    return {
        "architecture": kind.config.architecture,
        "runner": GENERATE if kind.generates else POOLING,
        "num_parameters": _num_parameters(kind.folder),
        "hidden_size": kind.config.hidden_size,
        "quantization": options.quantization,
        "kv_cache_bytes": memory_plan.num_blocks * layout.bytes_per_block,
        "num_blocks": memory_plan.num_blocks,
        "block_size": options.block_size,
        "num_kv_groups": len(layout.groups),
        "num_request_blocks": growth.most_blocks(num_tokens),
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": memory_plan.max_model_len,
    }


def _num_parameters(folder: Path) -> int:
    """The number of elements of all tensors in the checkpoint."""
    checkpoint = open_checkpoint(folder)
    return sum(prod(checkpoint.shape(name)) for name in checkpoint.names)


def _measure_steps(engine: Engine, rank: RankBuild, runner: Runner, kind: ModelKind) -> None:
    """Pace the engine's steps by measured costs, or by those of an earlier start if they still
    hold. `runner` drives all ranks."""
    options, is_on_gpu = kind.options, rank.device.type == "cuda"
    shape = RunnerShape(
        num_rows=options.max_num_seqs,
        max_num_tokens=options.max_num_batched_tokens,
        max_model_len=rank.memory_plan.max_model_len,
        groups=rank.layout.groups,
        num_blocks=rank.memory_plan.num_blocks,
        block_size=options.block_size,
        vocab_size=kind.config.vocab_size,
    )
    file = None
    if options.start_costs is not None and not is_on_gpu:  # measured steps capture CUDA graphs, too
        file = StartCostFile(options.start_costs, start_facts(options, rank.setup, engine.facts))
    costs = None if file is None else file.find()
    if costs is None or not still_holds(costs.model, runner, shape):
        model = calibrated_model(runner, shape, options.max_itl_ratio, warms_up=is_on_gpu)
        costs = StartCosts(model, measure_rates(rank.setup, options.quantization))
        if file is not None:
            file.store(costs)
    engine.utilization.rates = costs.rates
    _use_pacer(engine, StepPacer(PacingConfig(options.max_itl_ratio), costs.model), options)


def _memory_config(
    options: EngineOptions,
    layout: KVCacheLayout,
    memory_plan: MemoryPlan,
    folder: CacheFolder | None,
    tiers: Tiers | None,
) -> KVCacheConfig:
    return KVCacheConfig(
        groups=layout.groups,
        num_blocks=memory_plan.num_blocks,
        block_size=options.block_size,
        enable_prefix_caching=bool(options.enable_prefix_caching),
        secret=secret_of(folder),
        eviction=options.eviction,
        tiers=tiers,
    )
