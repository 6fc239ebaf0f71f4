"""Builds one rank: its part of the model, its memory, its runner.

Without tensor parallelism there is one rank, whose share is all of it. Every rank runs this file,
all in step: what depends on how much memory is free is agreed between them. Called by `build`.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from quire.assembly.device_memory_plan import (
    DeviceNeeds,
    check_weights_fit,
    graph_reserve_bytes,
    plan_on_device,
)
from quire.assembly.device_setup import DeviceSetup, choose_device, choose_setup
from quire.assembly.host_memory_plan import MemoryPlan, plan_memory, wanted_model_len
from quire.attention.interface import AttentionBackend
from quire.distributed.group import ProcessGroup
from quire.engine_client.messages import OnProgress
from quire.errors import InsufficientMemoryError
from quire.kernels.cpu.library import available_processors
from quire.kernels.cpu.sampling import NativeSampling
from quire.kernels.transfers import DeviceLink
from quire.layers.operator_module import use_operators
from quire.layers.sharded import Sharding
from quire.models.checkpoints.loader import load_model, weight_bytes
from quire.models.config import DecoderConfig
from quire.models.interface import CausalLM
from quire.models.sharding import split_config
from quire.options.engine_options import EngineOptions
from quire.runtime.batch import RowBatch
from quire.runtime.device_memory import CudaMemory
from quire.runtime.device_rows import DeviceRows
from quire.runtime.graphs import CudaGraphCapture, GraphCapture, RepeatedCalls, graph_sizes
from quire.runtime.kv_cache import KVCache, KVCacheLayout, plan_layout
from quire.runtime.model_runner import ModelRunner, StepRows
from quire.sampling.host.sampler import HostStepSampler, Sampler, SamplingRows, StepSampler

MOST_LOADING_THREADS = 8
"""That fill a GPU's memory: more don't make a file come faster."""

Facts = dict[str, int | str | None]


@dataclass(frozen=True, slots=True)
class RankBuild:
    """device: of this rank. layout: with all ranks' pages together, for the ledger. facts: about
    what computes."""

    device: torch.device
    runner: ModelRunner
    sizes: MemoryPlan
    layout: KVCacheLayout
    facts: Facts


def build_rank(
    options: EngineOptions,
    folder: Path,
    config: DecoderConfig,
    group: ProcessGroup | None,
    tell: OnProgress,
) -> RankBuild:
    """What every rank builds, all of them together. group: None where there is one.

    Raises ConfigurationError and its kinds, and what the device raises when it runs out of memory.
    """
    compute = _choose_setup(options, config, group)
    methods, specs = compute.methods, config.attention_specs
    if group is not None:
        methods = replace(methods, sharding=Sharding(group, config.vocab_size))
        specs = split_config(config, group.rank, group.size).attention_specs
        compute = replace(compute, methods=methods)
    backend = compute.new_backend()
    layout = plan_layout(specs, type(backend), options.block_size, compute.dtype)
    num_weight_bytes = weight_bytes(folder, config, compute.dtype, methods)
    builder = _Builder(options, folder, config, group, compute, layout, tell)
    if compute.device.type == "cuda":
        runner, sizes, facts = builder.build_on_gpu(num_weight_bytes)
    else:
        runner, sizes, facts = builder.build_on_cpu(num_weight_bytes)
    general: Facts = {
        "dtype": str(compute.dtype).removeprefix("torch."),
        "kernels": compute.name,
        "weight_bytes": num_weight_bytes,
        "tensor_parallel_size": builder.num_ranks,
    }
    return RankBuild(compute.device, runner, sizes, builder.whole_layout, general | facts)


def _choose_setup(
    options: EngineOptions, config: DecoderConfig, group: ProcessGroup | None
) -> DeviceSetup:
    if group is None:
        device = choose_device(options.device)
        return choose_setup(options, config, device, options.num_threads)
    device = choose_device(options.device, group.rank, group.size)
    num_threads = max(1, (options.num_threads or available_processors()) // group.size)
    return choose_setup(options, config, device, num_threads)


@dataclass(frozen=True, slots=True)
class _Builder:
    """What the parts of a share are made from. layout: of this rank's pages."""

    options: EngineOptions
    folder: Path
    config: DecoderConfig
    group: ProcessGroup | None
    compute: DeviceSetup
    layout: KVCacheLayout
    tell: OnProgress

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def whole_layout(self) -> KVCacheLayout:
        """With the pages of all ranks."""
        return self.layout.over_ranks(self.num_ranks)

    def build_on_cpu(self, num_weight_bytes: int) -> tuple[ModelRunner, MemoryPlan, Facts]:
        """Sized by what the operating system says is free, before anything is loaded."""
        sizes = plan_memory(self.options, self.config, self.whole_layout, num_weight_bytes)
        if self.group is not None:  # each has seen how much is free at another moment
            num_blocks, model_len = sizes.num_blocks, sizes.max_model_len
            sizes = MemoryPlan(self.group.least(num_blocks), self.group.least(model_len))
        model = self._load(sizes.max_model_len)
        return self._runner(model, sizes), sizes, {"num_threads": self.compute.num_threads}

    def build_on_gpu(self, num_weight_bytes: int) -> tuple[ModelRunner, MemoryPlan, Facts]:
        """Sized by what the largest steps take, once the weights are there."""
        options, device = self.options, self.compute.device
        memory = CudaMemory(device)
        model_len = wanted_model_len(self.options, self.config)
        check_weights_fit(-(-num_weight_bytes // self.num_ranks), memory, options.quantization)
        model = self._load(model_len)
        needs = DeviceNeeds(
            self.options,
            self.layout,
            model_len,
            self.config.vocab_size,
            min(options.max_logprobs, self.config.vocab_size),
            graph_reserve_bytes(len(self._graph_sizes())),
            options.quantization,
        )
        agree = {} if self.group is None else {"agree": self.group.least}
        sized = plan_on_device(needs, memory, partial(self._runner, model), **agree)
        name = torch.cuda.get_device_name(device)
        return sized.runner, sized.sizes, sized.ledger.facts() | {"device_name": name}

    def _load(self, model_len: int) -> CausalLM:
        compute = self.compute
        num_threads = compute.num_threads if compute.kernels is not None else 1
        if compute.device.type == "cuda":
            num_threads = min(available_processors(), MOST_LOADING_THREADS)
        model = load_model(
            self.folder,
            self.config,
            dtype=compute.dtype,
            device=compute.device,
            max_model_len=model_len,
            methods=compute.methods,
            num_threads=num_threads,
            on_progress=partial(self.tell, "loading the weights"),
        )
        use_operators(model, compute.operators)
        return model

    def _runner(self, model: CausalLM, sizes: MemoryPlan) -> ModelRunner:
        options, compute = self.options, self.compute
        backend = compute.new_backend()
        rows, sampler = self._rows(model, sizes, backend)
        # Attention alone by Triton, on the CPU, leaves the rows on the host.
        captures = compute.is_triton and backend.serves_graphs and not options.enforce_eager
        return ModelRunner(
            model,
            backend,
            KVCache(self.layout, sizes.num_blocks, compute.device),
            rows,
            sampler,
            # A native program has no collectives in it: with several ranks the modules are called.
            compute.kernels if self.group is None else None,
            self._capture() if captures else None,
        )

    def _rows(
        self, model: CausalLM, sizes: MemoryPlan, backend: AttentionBackend
    ) -> tuple[StepRows, StepSampler]:
        options = self.options
        try:
            rows = RowBatch(
                num_rows=options.max_num_seqs,
                max_model_len=sizes.max_model_len,
                max_num_tokens=options.max_num_batched_tokens,
                num_groups=len(self.layout.groups),
                block_size=options.block_size,
            )
        except MemoryError as error:
            raise InsufficientMemoryError(
                f"max_num_seqs={options.max_num_seqs} rows of {sizes.max_model_len} tokens, or"
                f" max_num_batched_tokens={options.max_num_batched_tokens} tokens, do not fit into"
                " memory; lower max_num_seqs, max_num_batched_tokens or max_model_len"
            ) from error
        sampling_rows = SamplingRows(options.max_num_seqs, self.config.vocab_size)
        if not self.compute.is_triton:
            kernels = self.compute.kernels
            native = None if kernels is None else NativeSampling(kernels)
            return rows, HostStepSampler(Sampler(sampling_rows, native), rows.history)
        # Triton may be missing where nobody asks for it.
        from quire.sampling.device.sampler import DeviceSampler, warm_up

        link = DeviceLink(self.compute.device)
        static_sizes = self._graph_sizes() if backend.serves_graphs else ()
        device_rows = DeviceRows(rows, link, static_sizes)
        if link.device.type == "cuda":  # else the first request with an option would compile it
            warm_up(self.config.vocab_size, device_rows.history.token_ids.shape[1], link)
        return device_rows, DeviceSampler(sampling_rows, device_rows.history, link)

    def _graph_sizes(self) -> tuple[int, ...]:
        return () if self.options.enforce_eager else graph_sizes(self.options.max_num_seqs)

    def _capture(self) -> GraphCapture:
        if self.compute.device.type == "cuda":
            return CudaGraphCapture(self.compute.device)
        return RepeatedCalls()
