"""Chooses a rank's device, number formats and kernels.

    on the CPU     native kernels; else torch; or Triton's interpreter if an option asks for it
    on a GPU       Triton kernels and torch's matrix products

Options that the device can't obey are refused before a model is read. Called by `rank_build`.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from quire.adapters.linear_slots import AdapterKernels, TorchAdapterKernels
from quire.adapters.native_slots import NativeAdapterKernels
from quire.attention.backends import select
from quire.attention.interface import AttentionBackend
from quire.attention.kv_format import KVFormat
from quire.attention.kv_registry import AUTO, load_kv_format
from quire.attention.split_layers import SplitAttention
from quire.errors import ConfigurationError
from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods
from quire.formats.format_registry import load_weight_format
from quire.formats.weight_format import TritonLinears
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.selection import select_kernels, set_torch_threads
from quire.kernels.operators import TORCH_OPERATORS, Operators
from quire.kernels.options import ALL_LAYERS, FITTING_LAYERS
from quire.layers.sharded import HostPart, LinearMethods
from quire.models.config import ModelConfig
from quire.observability.log import get_logger
from quire.options.engine_options import EngineOptions
from quire.runtime.page_layout import HostLayers

TRITON, TORCH = "triton", "torch"

BFLOAT16_CAPABILITY = (8, 0)
"""The lowest compute capability of a GPU that multiplies bfloat16."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """The device, number formats and kernels that one rank computes with."""

    device: torch.device
    #: The dtype of activations.
    dtype: torch.dtype
    kv_format: KVFormat
    #: The native kernels; None if Triton's kernels or torch's operators compute; see `is_triton`.
    kernels: NativeKernels | None
    is_triton: bool
    #: The operators between the model's linears.
    operators: Operators
    #: The methods that store and multiply the weights of the model's linears.
    methods: LinearMethods
    #: The name of the attention backend; None chooses one by the device, kernels and KV format.
    attention_backend: str | None
    batch_invariant: bool

    @property
    def name(self) -> str:
        """The kernels' name: "triton", "torch", or the instruction set of native kernels."""
        if self.is_triton:
            return TRITON
        return TORCH if self.kernels is None else self.kernels.isa

    @property
    def num_threads(self) -> int:
        """The number of threads that compute on the CPU."""
        return torch.get_num_threads() if self.kernels is None else self.kernels.num_threads

    def new_backend(self) -> AttentionBackend:
        """A new attention backend, which is not bound to a KV cache yet."""
        own = select(
            self.device.type,
            self.attention_backend or (TRITON if self.is_triton else None),
            self.kernels,
            kv_format=self.kv_format.name,
            batch_invariant=self.batch_invariant,
        )
        host = self.methods.host
        if host is None or host.has_experts_only:
            return own
        there = select(
            "cpu",
            None,
            host.kernels,
            kv_format=self.kv_format.name,
            batch_invariant=self.batch_invariant,
        )
        return SplitAttention(own, there, host.num_layers)

    def page_sides(self) -> tuple[type[AttentionBackend], HostLayers | None]:
        """The backend whose pages are on the device, and the layers whose pages are on the host."""
        backend = self.new_backend()
        if not isinstance(backend, SplitAttention):
            return type(backend), None
        return type(backend.device), HostLayers(backend.num_host_layers, type(backend.host))

    def new_adapter_kernels(self, max_num_tokens: int, *, captures: bool) -> AdapterKernels:
        """New kernels for adapters, which are not attached to linears yet.

        `max_num_tokens` bounds the tokens of a step. `captures` says whether steps are captured as
        CUDA graphs.
        """
        if self.kernels is not None:
            return NativeAdapterKernels()
        if self.is_triton:
            # Triton may be missing where it is not used.
            from quire.adapters.triton_slots import TritonAdapterKernels

            return TritonAdapterKernels(self.device, max_num_tokens, captures=captures)
        return TorchAdapterKernels(self.device)


def choose_device(name: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """The device of one rank. A GPU becomes the current GPU of this thread.

    Raises ConfigurationError for a device that does not exist.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus and torch.version.hip is not None:  # torch calls the GPUs of ROCm "cuda", too
        if name != AUTO and not name.startswith("cpu"):
            raise ConfigurationError(
                f"device is {name!r}, but torch {torch.__version__} computes on AMD GPUs (ROCm),"
                " and quire's kernels have instructions of NVIDIA GPUs; device='cpu' computes"
                " without a GPU"
            )
        logger.warning("quire computes on the CPU: its kernels are not for AMD GPUs (ROCm)")
        return torch.device("cpu")
    if name == AUTO:
        name = "cuda" if num_gpus else "cpu"
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if num_gpus == 0:
        raise ConfigurationError(
            f"device is {name!r}, but torch {torch.__version__} sees no GPU; `quire doctor` says"
            " what it sees, and device='cpu' computes without one"
        )
    if num_ranks > 1 and number:
        raise ConfigurationError(
            f"device is {name!r}, but tensor_parallel_size is {num_ranks}, which takes GPUs 0 to"
            f" {num_ranks - 1}; say 'cuda', and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    if num_ranks > num_gpus:
        raise ConfigurationError(
            f"tensor_parallel_size is {num_ranks}, but torch sees {num_gpus} GPUs; lower it"
        )
    index = rank if num_ranks > 1 else int(number or torch.cuda.current_device())
    if index >= num_gpus:
        raise ConfigurationError(f"device is {name!r}, but torch sees {num_gpus} GPUs, from 0 on")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """A device's name: "cpu", or a GPU's model, compute capability and number of
    multiprocessors."""
    if device.type != "cuda":
        return device.type
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count}"


def choose_setup(
    options: EngineOptions, config: ModelConfig, device: torch.device, num_threads: int | None
) -> DeviceSetup:
    """The setup of one rank with `num_threads` threads; None chooses their number.

    Raises ConfigurationError for options that the device can't obey.
    """
    # First, choose the dtype and the kernels.
    dtype = choose_dtype(options, config, device)
    is_triton = options.kernels == TRITON or device.type == "cuda"
    if is_triton:
        _check_triton(options, device)
        kernels = None
    else:
        kernels = select_kernels(
            options.kernels, num_threads, dtype, takes_fewer=options.num_threads is None
        )
    if options.dtype == AUTO and kernels is None and device.type == "cpu":
        dtype = _computed_by_torch(dtype)
    set_torch_threads(kernels, num_threads)
    if kernels is not None and options.host_part is not None:
        _refuse_host_part(options, "the CPU computes the whole model; leave it out")
    linears = _triton_linears(options) if is_triton else None
    # Then check that the weight format suits the model, the dtype and the device.
    weight_format = load_weight_format(options.quantization)
    if options.quantization is not None and config.quantized is not None:
        raise ConfigurationError(
            f"quantization is {options.quantization!r}, but the model's weights are quantized by"
            f" {config.quantized.method} already; leave quantization out, or name the original"
            " checkpoint, before it was quantized"
        )
    reason = weight_format.why_not(dtype, device)
    if reason is not None:
        raise ConfigurationError(f"quantization is {options.quantization!r}, but {reason}")
    method = weight_format.method(kernels, linears)
    if is_triton and config.num_experts_per_token and not method.groups_experts:
        raise ConfigurationError(
            f"quantization is {options.quantization!r}, but on a GPU this format has no product of"
            " many experts at once; leave quantization out"
        )
    return DeviceSetup(
        device=device,
        dtype=dtype,
        kv_format=load_kv_format(options.kv_cache_dtype, dtype),
        kernels=kernels,
        is_triton=is_triton,
        operators=TORCH_OPERATORS if linears is None else linears.operators,
        methods=LinearMethods(
            method,
            dense=load_weight_format(None).method(kernels, linears),
            head=weight_format.head_method(kernels, linears),
            block_quantized=BlockQuantizedMethods(kernels, linears),
            groups_experts=is_triton,
            host=_host_part(options, config, device, dtype, num_threads),
        ),
        attention_backend=options.attention_backend,
        batch_invariant=options.batch_invariant,
    )


def dense_methods(setup: DeviceSetup) -> LinearMethods:
    """The methods of the weights of a model beside the setup's own, which drafts or encodes images:
    dense ones, and those of quantized checkpoints. One rank has the whole model."""
    dense = setup.methods.dense
    assert dense is not None, "a setup has a method for dense weights"
    return replace(setup.methods, method=dense, head=None, sharding=None, host=None)


def _host_part(
    options: EngineOptions,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int | None,
) -> HostPart | None:
    """The part of the model that the CPU computes for `device`; None if the options name none.
    "auto" counts as no layers until `host_part` has chosen their number.

    Raises ConfigurationError.
    """
    # First, refuse what can't be computed by two devices.
    if options.host_part is None:
        return None
    _, wanted = options.host_part
    has_experts_only = options.cpu_layers is None
    if has_experts_only and not config.num_experts_per_token:
        _refuse_host_part(options, "the model has no experts; leave it out")
    if wanted == FITTING_LAYERS and device.type == "cpu":
        _refuse_host_part(options, "the device is 'cpu', which has no memory of its own")
    if dtype is torch.float16:
        _refuse_host_part(
            options,
            "the dtype is float16, and the CPU's kernels compute bfloat16 and float32; set"
            " dtype='bfloat16'",
        )
    # Then choose the CPU's kernels and methods.
    native = select_kernels(AUTO, num_threads, dtype, takes_fewer=options.num_threads is None)
    weight_format = load_weight_format(options.quantization)
    methods = LinearMethods(
        weight_format.method(native),
        dense=load_weight_format(None).method(native),
        block_quantized=BlockQuantizedMethods(native),
    )
    num_layers = wanted if isinstance(wanted, int) else 0
    if wanted == ALL_LAYERS:
        num_layers = config.num_layers
    return HostPart(methods, native, num_layers, has_experts_only)


def _refuse_host_part(options: EngineOptions, reason: str) -> NoReturn:
    assert options.host_part is not None
    name, wanted = options.host_part
    raise ConfigurationError(f"{name} is {wanted!r}, but {reason}")


def _check_triton(options: EngineOptions, device: torch.device) -> None:
    if options.kernels not in (AUTO, TRITON):
        raise ConfigurationError(
            f"kernels is {options.kernels!r}, which compute on the CPU, but the device is"
            f" {str(device)!r}; leave kernels out, or say device='cpu'"
        )
    # Imported here: it imports Triton, which an engine on the CPU does not need.
    from quire.kernels.triton.support import why_not

    reason = why_not(device.type)
    if reason is not None:
        raise ConfigurationError(
            f"kernels is {options.kernels!r}, but the Triton kernels can't run on {device.type}:"
            f" {reason}"
        )


def _triton_linears(options: EngineOptions) -> TritonLinears:
    # Triton may be missing, and takes a while to load.
    from quire.kernels.triton.operators import TritonOperators

    # Otherwise torch may sum partial products in 16 bits if it splits the K dimension.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return TritonLinears(TritonOperators(), batch_invariant=options.batch_invariant)


def choose_dtype(options: EngineOptions, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that the options name. "auto" means the checkpoint's dtype, or one that the device
    computes with: float16 instead of bfloat16 on old GPUs, float32 instead of float16 on the CPU.

    `choose_setup`, which knows the kernels, may still replace bfloat16 by float32 on the CPU.
    """
    if options.dtype != AUTO:
        dtype = getattr(torch, options.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    own = config.dtype or torch.float32
    if device.type == "cuda":
        if own is torch.bfloat16 and torch.cuda.get_device_capability(device) < BFLOAT16_CAPABILITY:
            logger.warning("this GPU only emulates %s; computing in float16", own)
            return torch.float16
        return own
    if own is torch.float16:
        logger.info("this processor only emulates %s; computing in float32", own)
        return torch.float32
    return own


def _computed_by_torch(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's operators, or Triton's interpreter, compute on this processor.

    They round each product of bfloat16 in software where the processor can't multiply it. The
    native kernels widen the weights as they read them, which takes less time than reading float32.
    """
    if dtype is torch.bfloat16 and not _has_bfloat16():
        logger.info("this processor only emulates %s; computing in float32", dtype)
        return torch.float32
    return dtype


def _has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 (AVX-512 BF16, AMX, Arm's bf16).

    False on systems that have no list of the processor's features, such as macOS.
    """
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return False
    flags = listing.read_text().lower().split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
