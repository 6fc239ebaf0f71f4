"""Builds one rank: its part of the model, its memory, its runner.

Without tensor parallelism there is one rank, which has the whole model. All ranks run this code at
the same time and agree on sizes that depend on free memory. Called by `build`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from quire.adapters.linear_slots import AdapterKernels
from quire.adapters.model_adapters import ModelAdapters, adapter_bytes, build_adapters
from quire.adapters.row_adapters import RowAdapters
from quire.adapters.store import AdapterStore
from quire.assembly.device_memory_plan import (
    DeviceNeeds,
    check_weights_fit,
    graph_reserve_bytes,
    plan_on_device,
)
from quire.assembly.device_setup import DeviceSetup, choose_device, choose_setup
from quire.assembly.draft_head_build import TargetFiles, prepare_target
from quire.assembly.draft_model_build import add_draft_model, draft_specs, draft_weight_bytes
from quire.assembly.format_checks.compensated_rounding import compensate_rounding
from quire.assembly.format_checks.kv_format_check import check_keys
from quire.assembly.format_checks.weight_format_check import (
    CheckedSetup,
    check_weights,
    rounding_of,
)
from quire.assembly.format_checks.wide_inputs import split_wide_inputs
from quire.assembly.host_memory_plan import MemoryPlan, plan_memory, wanted_model_len
from quire.assembly.host_part import PlacedWeights, host_blocks, place_weights
from quire.assembly.model_kind import DraftSource, tokenizer_folder
from quire.assembly.reports.model_work import model_work
from quire.assembly.tier_identity import PageIdentity, answer_digest
from quire.assembly.vision_build import (
    check_backend,
    make_contents,
    most_step_tokens,
    plan_vision,
)
from quire.attention.interface import AttentionBackend
from quire.attention.kv_registry import AUTO
from quire.core.scheduling.model_drafts import ModelDrafts
from quire.distributed.group import ProcessGroup
from quire.engine.step_work import StepWork
from quire.engine_client.messages import OnProgress
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.kernels.cpu.sampling import NativeSampling
from quire.kernels.transfers import DeviceLink
from quire.layers.operator_module import use_operators
from quire.layers.sharded import Sharding
from quire.models.checkpoints.loader import Reading, load_again, load_model
from quire.models.config import ModelConfig
from quire.models.interface import CausalLM, TextModel
from quire.models.sharding import split_config
from quire.models.vision.towers import TowerSource
from quire.numa.binding import Binding, choose_binding
from quire.observability.machine_processors import usable_processors
from quire.options.engine_options import EngineOptions
from quire.recurrence.backends import select as select_recurrence
from quire.runtime.batch import RowBatch
from quire.runtime.contents.content_slots import StepContents
from quire.runtime.contents.content_store import ContentStore
from quire.runtime.device_memory import CudaMemory
from quire.runtime.device_rows import DeviceRows
from quire.runtime.graphs import (
    CudaGraphCapture,
    GraphCapture,
    RepeatedCalls,
    graph_sizes,
    mixed_graph_sizes,
)
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner, StepRows
from quire.runtime.page_layout import KVCacheLayout, plan_layout
from quire.sampling.host.sampler import HostStepSampler, Sampler, SamplingRows, StepSampler
from quire.tiers.fingerprint import Fingerprint

MOST_LOADING_THREADS = 8
"""Maximum number of threads that load weights to a GPU; more threads don't read a file faster."""

Facts = dict[str, int | str | None]


@dataclass(frozen=True, slots=True)
class RankBuild:
    """One rank that is built and ready to run steps."""

    setup: DeviceSetup
    runner: ModelRunner
    memory_plan: MemoryPlan
    #: The layout with the pages of all ranks together, used to account for memory.
    layout: KVCacheLayout
    #: The layout of this rank's pages.
    own_layout: KVCacheLayout
    #: Reported facts about kernels, formats and memory.
    facts: Facts
    #: Everything that determines the bytes of the rank's pages; None if no option needs it.
    fingerprint: Fingerprint | None
    #: The adapters that fill the rank's slots; None if it has no slots.
    adapters: AdapterStore | None
    #: Encodes the contents that rows read; None if the model takes text only, and in ranks above 0.
    contents: ContentStore | None
    #: The least work that steps need on this rank.
    work: StepWork
    #: The part of a machine with several memory nodes that the rank is bound to; None if unbound.
    binding: Binding | None
    #: Plans the drafts of the runner's drafter; None if it has none.
    model_drafts: ModelDrafts | None = None

    @property
    def device(self) -> torch.device:
        return self.setup.device


def build_rank(
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    group: ProcessGroup | None,
    binding: Binding | None,
    on_progress: OnProgress,
    draft: DraftSource | None = None,
    tower: TowerSource | None = None,
) -> RankBuild:
    """Build one rank. All ranks must call this at the same time.

    `group` is None without tensor parallelism. `binding` is the result of `bind_threads`. `draft`
    is the model that drafts; None without one. `tower` encodes images; None without one.
    Raises ConfigurationError and its subclasses, and the device's error if it runs out of memory.
    """
    setup = _choose_setup(options, config, group, binding)
    methods, share = setup.methods, config
    if group is not None:
        methods = replace(methods, sharding=Sharding(group, config.vocab_size))
        share = split_config(config, group.rank, group.size)
        setup = replace(setup, methods=methods)
    # First, check the checkpoint's sizes. Then plan pages; this takes long for many layers.
    placed = place_weights(options, folder, config, setup)
    setup = placed.setup
    pages, host_layers = setup.page_sides()
    if host_layers is not None:
        _check_host_layers(options, draft, tower)
    layout = plan_layout(
        (*share.attention_specs, *draft_specs(draft)),
        pages,
        options.block_size,
        setup.kv_format,
        recurrent_specs=share.recurrent_specs,
        typical_tokens=max(1, wanted_model_len(options, config) // 2),
        host=host_layers,
    )
    # Then load the model and make the runner.
    is_named = options.tells_fingerprint or options.cache_dir is not None
    identity = PageIdentity() if is_named else None
    builder = _Builder(
        options, folder, config, group, setup, layout, on_progress, identity, binding, draft, tower
    )
    if setup.device.type == "cuda":
        built = builder.build_on_gpu(placed.device_bytes)
    else:
        built = builder.build_on_cpu(placed.device_bytes + placed.host_bytes)
    # Last, collect the facts and the fingerprint.
    runner, adapters = built.runner, built.adapters
    general = builder.facts(placed, adapters)
    fingerprint = builder.fingerprint(runner)
    if fingerprint is not None:
        general["fingerprint"] = fingerprint.digest.hex()
    if options.tells_fingerprint:
        tokenizer = None if options.skip_tokenizer_init else tokenizer_folder(options)
        general["answers"] = answer_digest(config, tokenizer)
    return RankBuild(
        setup,
        runner,
        built.memory_plan,
        builder.whole_layout,
        layout,
        general | built.facts,
        fingerprint,
        None if adapters is None else adapters.store,
        built.contents,
        built.work,
        binding,
        built.model_drafts,
    )


def _check_host_layers(
    options: EngineOptions, draft: DraftSource | None, tower: TowerSource | None
) -> None:
    """Raises ConfigurationError for what a model with layers on two devices doesn't serve."""
    reason = None
    if draft is not None:
        reason = "a model drafts for it (speculation), which reads layers of one device"
    elif tower is not None:
        reason = "the model takes images, which are not served with layers on two devices; set"
        reason += " language_model_only=True"
    if reason is not None:
        raise ConfigurationError(f"cpu_layers is {options.cpu_layers!r}, but {reason}")


def _choose_setup(
    options: EngineOptions,
    config: ModelConfig,
    group: ProcessGroup | None,
    binding: Binding | None,
) -> DeviceSetup:
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    device = choose_device(options.device, rank, size)
    num_threads = _own_threads(options, size) if binding is None else binding.num_threads
    if group is not None and num_threads is None:
        num_threads = max(1, usable_processors() // size)
    return choose_setup(options, config, device, num_threads)


def _own_threads(options: EngineOptions, size: int) -> int | None:
    """The number of threads of one of `size` ranks; None means as many as are useful."""
    if size == 1 or options.num_threads is None:
        return options.num_threads
    return max(1, options.num_threads // size)


def bind_threads(
    options: EngineOptions, device: torch.device, rank: int, size: int
) -> Binding | None:
    """Bind the calling thread, and threads that it starts later, to the rank's part of the machine.

    Must be called before threads for computation or collectives are started. Returns None if the
    thread is not bound. Raises ConfigurationError.
    """
    binding = choose_part_of_host(options, device, rank, size)
    if binding is not None:
        binding.bind_threads()
    return binding


def choose_part_of_host(
    options: EngineOptions, device: torch.device, rank: int = 0, size: int = 1
) -> Binding | None:
    """The part of the machine that `bind_threads` binds to. Raises ConfigurationError."""
    if device.type != "cpu":
        if options.numa_nodes is not None:
            raise ConfigurationError(
                f"numa is {options.numa!r}, but the device is {str(device)!r}, and nodes can be"
                " named for the CPU only; leave numa out, and bind the process by numactl"
            )
        return None
    return choose_binding(
        options,
        rank,
        size,
        num_threads=_own_threads(options, size),
        most_threads=max(1, usable_processors() // size),
        num_engines=options.engines_on_nodes,
    )


@dataclass(frozen=True, slots=True)
class _Built:
    runner: ModelRunner
    memory_plan: MemoryPlan
    facts: Facts
    adapters: ModelAdapters | None
    work: StepWork
    model_drafts: ModelDrafts | None = None
    contents: ContentStore | None = None


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds the model, rows, KV cache and runner of one rank."""

    options: EngineOptions
    folder: Path
    #: The config of the whole model.
    config: ModelConfig
    #: The collectives between ranks; None if there is one rank.
    group: ProcessGroup | None
    setup: DeviceSetup
    #: The layout of this rank's pages.
    layout: KVCacheLayout
    on_progress: OnProgress
    #: Collects everything that determines the bytes of pages; None if no fingerprint is needed.
    identity: PageIdentity | None
    #: The part of the machine that this rank is bound to; None if it is unbound.
    binding: Binding | None
    #: The model that drafts, whose layers are the last ones of the layout; None without one.
    draft: DraftSource | None
    #: The encoder of images; None without one.
    tower: TowerSource | None

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def target(self) -> TargetFiles | None:
        """The files of the model, if ranks have shards of it; None if this rank has it whole."""
        return None if self.group is None else TargetFiles(self.folder, self.config)

    def facts(self, placed: PlacedWeights, adapters: ModelAdapters | None) -> Facts:
        """The facts that are reported on every device."""
        found: Facts = {
            "dtype": str(self.setup.dtype).removeprefix("torch."),
            "kernels": self.setup.name,
            "weight_bytes": placed.device_bytes,
            "tensor_parallel_size": self.num_ranks,
            **placed.facts(),
        }
        if self.draft is not None:
            found["speculative_model"] = self.draft.name
            found["draft_weight_bytes"] = draft_weight_bytes(self.draft, self.setup, self.target)
        if adapters is not None:
            found["adapter_bytes"] = adapters.slots.num_bytes
            found["max_loras"] = self.options.num_lora_slots
            found["max_lora_rank"] = self.options.lora_rank
        return found

    def fingerprint(self, runner: ModelRunner) -> Fingerprint | None:
        """Everything that determines the bytes of the rank's pages; None if no option needs it."""
        if self.identity is None:
            return None
        return self.identity.fingerprint(
            self.options,
            self.setup,
            self.config,
            self.layout,
            rank=0 if self.group is None else self.group.rank,
            num_ranks=self.num_ranks,
            # torch computes what a tower does between its linears.
            is_native=runner.is_native and self.tower is None,
            draft_config=None if self.draft is None else self.draft.config,
        )

    @property
    def whole_layout(self) -> KVCacheLayout:
        """The layout with the pages of all ranks together."""
        return self.layout.over_ranks(self.num_ranks)

    def build_on_cpu(self, num_weight_bytes: int) -> _Built:
        """Choose the sizes by the memory that the operating system reports as free, then load."""
        options, setup, config = self.options, self.setup, self.config
        kernels = self._adapter_kernels()
        num_adapter_bytes = adapter_bytes(options, config, setup.methods, kernels, setup.dtype)
        binding = self.binding
        free_bytes = None if binding is None else binding.free_bytes
        vision = plan_vision(options, self.tower, setup)
        num_weight_bytes += draft_weight_bytes(self.draft, setup, self.target) + vision.total_bytes
        memory_plan = plan_memory(
            options,
            config,
            self.whole_layout,
            num_weight_bytes,
            num_adapter_bytes,
            None if free_bytes is None else free_bytes * self.num_ranks,
        )
        if self.group is not None:  # ranks may have measured different free memory
            num_blocks, model_len = memory_plan.num_blocks, memory_plan.max_model_len
            memory_plan = MemoryPlan(self.group.least(num_blocks), self.group.least(model_len))
        if binding is not None:
            num_kv_bytes = memory_plan.num_blocks * self.whole_layout.bytes_per_block
            num_bytes = num_weight_bytes + num_adapter_bytes + num_kv_bytes
            binding.expect(num_bytes // self.num_ranks)
        with nullcontext() if binding is None else binding.memory_of_part():
            model = self._load(memory_plan.max_model_len)
            adapters = self._adapters(model)
            if self.group is None or self.group.rank == 0:  # the others keep nothing for a head
                prepare_target(model, self.draft, self._most_step_tokens)
            runner = self._runner(model, adapters, memory_plan)
            model_drafts = self._add_drafter(runner, memory_plan.max_model_len)
            contents, runner.contents = self._contents(model)
        facts: Facts = {"num_threads": setup.num_threads, **vision.facts()}
        if binding is not None:
            storage = runner.kv_storage  # bound here, since any thread may write it first
            binding.place(storage.data_ptr(), storage.nbytes)
            binding.log()
            facts["numa"] = binding.where
        work = self._work(model)
        return _Built(runner, memory_plan, facts, adapters, work, model_drafts, contents)

    def build_on_gpu(self, num_weight_bytes: int) -> _Built:
        """Load the weights, then choose the sizes by the memory that the largest steps take."""
        options, device = self.options, self.setup.device
        memory = CudaMemory(device)
        model_len = wanted_model_len(self.options, self.config)
        rank = 0 if self.group is None else self.group.rank
        vision = plan_vision(options, self.tower, self.setup).of_rank(rank, self.num_ranks)
        num_own_bytes = -(-num_weight_bytes // self.num_ranks) + vision.weight_bytes
        is_mixture = bool(self.config.num_experts_per_token)
        check_weights_fit(num_own_bytes, memory, options, has_experts=is_mixture)
        model = self._load(model_len)
        adapters = self._adapters(model)
        contents, step_contents = self._contents(model)
        encoding_bytes = 0 if contents is None else _encoding_bytes(contents, model_len, memory)
        backend = self.setup.new_backend()
        needs = DeviceNeeds(
            self.options,
            self.layout,
            model_len,
            self.config.vocab_size,
            options.bound_of_logprobs(self.config.vocab_size),
            _reserve_bytes(model, backend, *self._graph_sizes(model, backend)),
            options.quantization,
            isinstance(model, CausalLM),
            0 if adapters is None else adapters.slots.num_bytes,
            vision,
            encoding_bytes,
            self._most_step_tokens - options.max_num_batched_tokens,
        )
        agree: dict[str, Callable[[int], int]] = {}
        if self.group is not None:
            agree["agree"] = self.group.least
        elif self.layout.num_host_layers:
            agree["agree"] = partial(host_blocks, options, self.layout)
        sized = plan_on_device(needs, memory, partial(self._runner, model, adapters), **agree)
        runner, work = sized.runner, self._work(model)
        runner.contents = step_contents
        facts: Facts = {"device_name": torch.cuda.get_device_name(device), **sized.ledger.facts()}
        return _Built(runner, sized.memory_plan, facts, adapters, work, contents=contents)

    def _work(self, model: TextModel) -> StepWork:
        return model_work(model, self.setup.dtype, self.layout)

    def _load(self, model_len: int) -> TextModel:
        setup = self.setup
        num_threads = setup.num_threads if setup.kernels is not None else 1
        if setup.device.type == "cuda":
            num_threads = min(usable_processors(), MOST_LOADING_THREADS)
        model = load_model(
            self.folder,
            self.config,
            dtype=setup.dtype,
            device=setup.device,
            max_model_len=model_len,
            methods=setup.methods,
            reading=Reading(
                num_threads,
                partial(self.on_progress, "loading the weights"),
                None if self.identity is None else self.identity.weights,
            ),
        )
        use_operators(model, setup.operators)
        model.check_loaded()
        self._compensate(model, model_len, num_threads)
        if model.recurrent_specs:
            states = select_recurrence(setup.device.type, setup.kernels, is_triton=setup.is_triton)
            model.use_states(states)
        elif self.options.kv_cache_dtype != AUTO:  # the check can't run with states
            check_keys(model, setup.kv_format, model_len)
        rounding = rounding_of(self.options.quantization, self.config)
        if rounding is not None:
            checked = CheckedSetup(self.folder, self.config, setup.dtype, self.num_ranks)
            check_weights(model, checked, rounding, model_len)
        if self.identity is not None:
            self.identity.record_model(model, model_len)
        if self.tower is not None:
            self.tower.prepare(model, self._most_step_tokens)
        return model

    def _add_drafter(self, runner: ModelRunner, max_model_len: int) -> ModelDrafts | None:
        """Give the runner its model that drafts. Only rank 0 drafts."""
        if self.draft is None or (self.group is not None and self.group.rank > 0):
            return None
        on_progress = partial(self.on_progress, "loading the model that drafts")
        digest = None if self.identity is None else self.identity.draft_weights
        return add_draft_model(
            runner,
            self.draft,
            self.setup,
            max_model_len,
            Reading(1, on_progress, digest),
            self.target,
        )

    def _contents(self, model: TextModel) -> tuple[ContentStore | None, StepContents | None]:
        """See `make_contents`; None without a tower."""
        if self.tower is None:
            return None, None
        digest = None
        if self.identity is not None:
            self.identity.tower, digest = self.tower.config, self.identity.weights
        on_progress = partial(self.on_progress, "loading the encoder of images")
        num_threads = 1 if self.setup.kernels is None else self.setup.num_threads
        # The digest of the weights must include the tower's, all ranks load it together, and on a
        # GPU the memory that it takes is measured.
        is_alone = self.identity is None and self.group is None
        may_wait = is_alone and self.setup.device.type == "cpu"
        loads_now = self.options.load_encoder_at_start or not may_wait
        reading = Reading(num_threads, on_progress, digest) if loads_now else None
        return make_contents(self.options, self.tower, self.setup, model, reading, self.group)

    def _compensate(self, model: TextModel, model_len: int, num_threads: int) -> None:
        """Make up for rounding errors of a loaded model's weights and activations, as far as its
        formats can."""
        reload = partial(
            load_again,
            model=model,
            folder=self.folder,
            config=self.config,
            methods=self.setup.methods,
            reading=Reading(num_threads, partial(self.on_progress, "rounding the weights")),
        )
        digest = None if self.identity is None else self.identity.rounding
        compensate_rounding(model, model_len, reload, digest)
        split_wide_inputs(model, model_len, digest)

    @property
    def _most_step_tokens(self) -> int:
        return most_step_tokens(self.options, self.tower, self.config)

    def _adapters(self, model: TextModel) -> ModelAdapters | None:
        kernels = self._adapter_kernels()
        return build_adapters(
            self.options,
            model,
            self.config,
            kernels,
            self.setup.dtype,
            encodes_images=self.tower is not None,
        )

    def _adapter_kernels(self) -> AdapterKernels:
        options = self.options
        most = max(self._most_step_tokens, options.max_num_seqs)
        return self.setup.new_adapter_kernels(most, captures=self._may_capture)

    def _runner(
        self, model: TextModel, adapters: ModelAdapters | None, memory_plan: MemoryPlan
    ) -> ModelRunner:
        options, setup = self.options, self.setup
        backend = setup.new_backend()
        check_backend(self.tower, self.config, backend)
        rows, sampler = self._rows(model, memory_plan, backend)
        # If Triton only computes attention, on the CPU, rows are on the host and nothing is
        # captured.
        serves_graphs = _serves_graphs(model, backend)
        captures = setup.is_triton and serves_graphs and self._may_capture
        return ModelRunner(
            model,
            backend,
            KVCache(self.layout, memory_plan.num_blocks, setup.device),
            rows,
            sampler,
            # A native program has no collectives. With several ranks, the model's modules run
            # instead.
            setup.kernels if self.group is None else None,
            self._capture() if captures else None,
            None
            if adapters is None
            else RowAdapters(adapters.slots, adapters.store.pop_ready, options.max_num_seqs),
        )

    def _rows(
        self, model: TextModel, memory_plan: MemoryPlan, backend: AttentionBackend
    ) -> tuple[StepRows, StepSampler]:
        options, state_sizes = self.options, self.layout.state_sizes
        try:
            rows = RowBatch(
                num_rows=options.max_num_seqs,
                max_model_len=memory_plan.max_model_len,
                max_num_tokens=self._most_step_tokens,
                num_groups=len(self.layout.groups) - len(state_sizes),
                block_size=options.block_size,
                state_sizes=state_sizes,
                axes=model.axis_rotations,
                content_token_id=model.content_token_id,
            )
        except MemoryError as error:
            raise InsufficientMemoryError(
                f"max_num_seqs={options.max_num_seqs} rows of {memory_plan.max_model_len} tokens,"
                f" or max_num_batched_tokens={options.max_num_batched_tokens} tokens, do not fit"
                " into memory; lower max_num_seqs, max_num_batched_tokens or max_model_len"
            ) from error
        sampling_rows = SamplingRows(options.max_num_seqs, self.config.vocab_size)
        if not self.setup.is_triton:
            kernels = self.setup.kernels
            native = None if kernels is None else NativeSampling(kernels)
            return rows, HostStepSampler(Sampler(sampling_rows, native), rows.history)
        # Triton may be missing where it is not used.
        from quire.sampling.device.sampler import DeviceSampler, warm_up

        link = DeviceLink(self.setup.device)
        device_rows = DeviceRows(rows, link, *self._graph_sizes(model, backend), backend)
        if link.device.type == "cuda":  # compile kernels now, not during a request
            warm_up(self.config.vocab_size, device_rows.history.token_ids.shape[1], link)
        return device_rows, DeviceSampler(sampling_rows, device_rows.history, link)

    def _graph_sizes(
        self, model: TextModel, backend: AttentionBackend
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The static sizes of decode steps, and those of mixed steps."""
        if not (self._may_capture and _serves_graphs(model, backend)):
            return (), ()
        decode_sizes = graph_sizes(self.options.max_num_seqs)
        if not backend.serves_mixed_graphs or model.recurrence is not None:
            return decode_sizes, ()
        return decode_sizes, mixed_graph_sizes(self._most_step_tokens)

    @property
    def _may_capture(self) -> bool:
        """Whether steps may be captured as CUDA graphs: no step waits for experts on the host."""
        return not self.options.enforce_eager and self.setup.methods.host is None

    def _capture(self) -> GraphCapture:
        if self.setup.device.type == "cuda":
            return CudaGraphCapture(self.setup.device)
        return RepeatedCalls()


def _encoding_bytes(contents: ContentStore, model_len: int, memory: CudaMemory) -> int:
    """The memory that the largest content of a prompt takes while it is encoded."""
    memory.release_and_reset_peak()
    contents.encode_largest(model_len)
    peak = memory.peak_bytes()
    memory.release_and_reset_peak()
    return max(0, peak - memory.held_bytes())


def _reserve_bytes(
    model: TextModel,
    backend: AttentionBackend,
    decode_sizes: Sequence[int],
    mixed_sizes: Sequence[int],
) -> int:
    """Bytes to reserve for CUDA graphs of these sizes."""
    num_mixed = len(mixed_sizes)
    if num_mixed:
        num_mixed *= backend.most_plan_variants(model.attention_specs)
    return graph_reserve_bytes(len(decode_sizes), num_mixed)


def _serves_graphs(model: TextModel, backend: AttentionBackend) -> bool:
    """Whether the backends of attention and states allow decode steps to be captured as CUDA
    graphs."""
    return backend.serves_graphs and (model.recurrence is None or model.recurrence.serves_graphs)
