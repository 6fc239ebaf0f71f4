"""User options -> one validated object, once. Read by the command line, the benchmarks, `LLM`, the
server's start and the composition root: every other component declares what it needs itself.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, TypedDict

from quire.attention.registry import backend_names
from quire.core.scheduling.pacing import LEAST_MAX_ITL_RATIO
from quire.errors import ConfigurationError, did_you_mean
from quire.formats.registry import weight_format_names

DTYPES = ("auto", "float32", "bfloat16", "float16")
NATIVE_KERNELS = ("avx512_bf16", "avx512", "avx2", "portable")
KERNELS = ("auto", "torch", "triton", *NATIVE_KERNELS)
MAX_NUM_THREADS = 1024
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_EVICTION = "hit_density"
_GENERATES = "models generate text here"
_ONE_PROCESS = "one engine computes here; tensor_parallel_size splits its layers"
FOREIGN_OPTIONS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "config_format": (("auto", "hf"), "a model's config is in Hugging Face's format"),
    "convert": (("auto", "none"), _GENERATES),
    "cpu_offload_gb": ((0,), "weights are in the memory that computes"),
    "data_parallel_size": ((1,), _ONE_PROCESS),
    "distributed_executor_backend": (("mp",), "ranks are processes of this machine"),
    "download_dir": ((), "models are kept where HF_HOME says"),
    "enable_chunked_prefill": ((True,), "a prompt is always computed in chunks"),
    "enable_lora": ((False,), "adapters are not served in this version"),
    "generation_config": (("auto",), "the model's own generation_config.json is used"),
    "hf_overrides": (({},), "a model's config is read as it is"),
    "kv_cache_dtype": (("auto",), "keys and values have the model's dtype"),
    "load_format": (("auto", "safetensors"), "only safetensors are read, never pickles"),
    "num_scheduler_steps": ((1,), "each step is planned by itself"),
    "pipeline_parallel_size": ((1,), _ONE_PROCESS),
    "runner": (("auto", "generate"), _GENERATES),
    "speculative_config": ((), "there is no speculative decoding in this version"),
    "swap_space": ((0, 4), "preempted sequences are computed anew; there is no swap space"),
    "task": (("auto", "generate"), _GENERATES),
    "tokenizer_mode": (("auto",), "there is one kind of tokenizer, the fast one"),
    "trust_remote_code": ((False,), "code from a model's folder is never run"),
}
"""Options that scripts for vLLM bring: the values that say what is so here anyway (its default for
swap_space among them, which it reads no more itself), and why there are no others. None is always
taken: it asks for nothing. The command line has them as flags."""
ALIASES = {"kv_cache_memory_bytes": "kv_cache_memory"}
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_DEVICE = r"auto|cpu|cuda(:\d+)?"
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}


class EngineOptionsDict(TypedDict, total=False):
    """The options beside `model` by name; see EngineOptions for their meaning."""

    tokenizer: str | None
    revision: str | None
    skip_tokenizer_init: bool
    allow_special_tokens: bool
    device: str
    dtype: str
    max_model_len: int | None
    block_size: int
    kv_cache_memory: int | str | None
    kv_cache_memory_bytes: int | str | None
    num_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool | None
    scheduling_policy: str
    num_lookahead_blocks: int
    eviction: str
    max_itl_ratio: float
    quantization: str | None
    kernels: str
    attention_backend: str | None
    num_threads: int | None
    tensor_parallel_size: int
    batch_invariant: bool
    async_scheduling: bool | None
    max_logprobs: int
    seed: int
    gpu_memory_utilization: float | None
    enforce_eager: bool
    disable_log_stats: bool


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything a user may say about an engine.

    model: a local folder or a hub id in Hugging Face format; None: the embedded model.
    tokenizer: another folder or hub id to take the tokenizer from. revision: branch, tag or commit
        of the hub id.
    skip_tokenizer_init: have no tokenizer; prompts and outputs are token ids only.
    allow_special_tokens: special tokens that are written out in chat messages ("<|im_end|>") take
        effect; otherwise they are encoded as ordinary characters. In text prompts they always take
        effect.
    device: "cpu", "cuda" or "cuda:1"; "auto": the GPU if torch can use one.
    dtype: "auto": the checkpoint's own, or float32 if this processor only emulates that; "half" and
        "float" are float16 and float32.
    max_model_len: tokens of prompt and output together; None: the model's limit, or what fits into
        the KV cache.
    block_size: tokens per KV block, a power of two from 8 to 2048.
    kv_cache_memory: bytes of the KV cache, or text such as "2GiB". num_blocks: the same in blocks.
        Without all three: on a GPU, gpu_memory_utilization is 0.9; on the CPU, what max_num_seqs
        full-length sequences need, but at most 30% of the free memory.
    gpu_memory_utilization: share, above 0 and at most 1, of the device's memory (on the CPU: of the
        machine's) that weights and KV cache fill together; instead of the two options above.
    enable_prefix_caching: share the KV blocks of equal prefixes; None: yes.
    max_num_seqs: the most sequences that run at once. max_num_batched_tokens: the most tokens that
        a step computes; None: 2048, or max_num_seqs if that is more.
    scheduling_policy: fcfs, priority, fair, longest_prefix or deadline.
    num_lookahead_blocks: KV blocks that a growing sequence reserves in advance beside the one that
        it needs, while more than a quarter of the memory is free.
    eviction: order in which cached prefixes are evicted: "hit_density", by frequency and recency,
        or "lru", by recency alone.
    max_itl_ratio: prompts that are computed beside running sequences may make a step at most this
        many times as long, according to a cost model that is measured at start-up (for at most
        about 1.5 s) and adjusted to later steps. 0: no limit, for the highest throughput.
    quantization: rounds the weights of linear layers during loading, from any checkpoint: to int8,
        with a scale per output, or to int4, with a scale per group of 32 inputs. Both multiply with
        activations of eight bits, with a scale per token. Norms, biases and the embedding are not
        rounded. None: nothing is.
    kernels: on the CPU, "auto": the native kernels for the best instruction set of this processor,
        or torch if they were not built or don't support the dtype (the log says so);
        "avx512_bf16", "avx512", "avx2" or "portable": exactly these; "torch". On a GPU, "auto" and
        "triton" are the Triton kernels. "triton" on the CPU runs them in Triton's interpreter
        (TRITON_INTERPRET=1), thousands of times slower, as a check.
    attention_backend: "native", "triton", "flashinfer" or "torch"; None: the best for the kernels.
    num_threads: computing threads; None: one per processor that this process may use, or torch's
        own number with kernels="torch".
    tensor_parallel_size: number of processes that compute a step together. Each holds a share of
        every layer, on its own GPU or on the CPU.
    batch_invariant: on a GPU, tokens and log-probabilities don't depend on what else runs, to the
        bit. With the native kernels of the CPU they never do.
    async_scheduling: plan a step while the previous one runs; None: on a GPU only, since on the CPU
        the two don't overlap.
    max_logprobs: the highest logprobs or prompt_logprobs that a request may ask for.
    enforce_eager: never capture CUDA graphs: less memory, slower decoding. The CPU has none.
    disable_log_stats: don't log throughput and memory use every ten seconds.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    skip_tokenizer_init: bool = False
    allow_special_tokens: bool = False
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    enable_prefix_caching: bool | None = None
    scheduling_policy: str = "fcfs"
    num_lookahead_blocks: int = 1
    eviction: str = DEFAULT_EVICTION
    max_itl_ratio: float = 0.0
    quantization: str | None = None
    kernels: str = "auto"
    attention_backend: str | None = None
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    batch_invariant: bool = False
    async_scheduling: bool | None = None
    max_logprobs: int = 20
    seed: int = 0
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    disable_log_stats: bool = True

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> "EngineOptions":
        """Check names, types and bounds; every name that is not known is refused."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in options.items():
            target = ALIASES.get(name, name)
            if name in FOREIGN_OPTIONS:
                _check_foreign(name, value)
                continue
            if target not in known:
                raise ConfigurationError(unknown_option(name, known | set(ALIASES)))
            if target in values:
                raise ConfigurationError(f"{name} is given twice, also as {target}; give it once")
            is_path = target in ("model", "tokenizer") and isinstance(value, os.PathLike)
            values[target] = os.fspath(value) if is_path else value
        if isinstance(dtype := values.get("dtype"), str):
            values["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
        if values.get("kv_cache_memory") is not None:
            values["kv_cache_memory"] = parse_bytes("kv_cache_memory", values["kv_cache_memory"])
        if values.get("max_num_batched_tokens") is None:
            values.pop("max_num_batched_tokens", None)
            max_num_seqs = values.get("max_num_seqs")
            if isinstance(max_num_seqs, int) and max_num_seqs > DEFAULT_BATCHED_TOKENS:
                values["max_num_batched_tokens"] = max_num_seqs
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigurationError(f"{name} is {value!r}, but must be a folder or a hub id")
        for name in (
            "skip_tokenizer_init",
            "allow_special_tokens",
            "enforce_eager",
            "batch_invariant",
            "disable_log_stats",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)!r}, but must be True or False"
                )
        self._check_choices()
        self._check_numbers()
        self._check_sizes()
        self._check_tokenizer()
        self._settle_prefix_caching()

    def _check_sizes(self) -> None:
        names = ("kv_cache_memory", "num_blocks", "gpu_memory_utilization")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigurationError(
                f"{given[0]} and {given[1]} both set the size of the KV cache; give one of them"
            )

    def _check_tokenizer(self) -> None:
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigurationError(
                f"tokenizer is {self.tokenizer!r}, but skip_tokenizer_init says to have none; give"
                " one of them"
            )

    def _settle_prefix_caching(self) -> None:
        asked: object = self.enable_prefix_caching
        if asked is not None and not isinstance(asked, bool):
            raise ConfigurationError(
                f"enable_prefix_caching is {asked!r}, but must be True, False or None"
            )
        settled = asked is not False
        object.__setattr__(self, "enable_prefix_caching", settled)  # frozen: the dataclass's way
        if self.eviction != DEFAULT_EVICTION and not settled:
            raise ConfigurationError(
                f"eviction is {self.eviction!r}, but nothing is cached that could be evicted"
                " (enable_prefix_caching is False); leave it out"
            )

    def _check_choices(self) -> None:
        device: object = self.device
        if not isinstance(device, str) or not re.fullmatch(_DEVICE, device):
            raise ConfigurationError(
                f"device is {self.device!r}, but must be 'auto', 'cpu', 'cuda' or a GPU by its"
                " number, like 'cuda:1'"
            )
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype is {self.dtype!r}, but must be one of {DTYPES}")
        quantizations = weight_format_names()
        if self.quantization is not None and self.quantization not in quantizations:
            raise ConfigurationError(
                f"quantization is {self.quantization!r}, but must be None or one of {quantizations}"
            )
        if self.kernels not in KERNELS:
            raise ConfigurationError(f"kernels is {self.kernels!r}, but must be one of {KERNELS}")
        if self.attention_backend not in (None, *backend_names()):
            raise ConfigurationError(
                f"attention_backend is {self.attention_backend!r}, but must be None or one of"
                f" {backend_names()}"
            )
        overlap: object = self.async_scheduling
        if overlap is not None and not isinstance(overlap, bool):
            raise ConfigurationError(
                f"async_scheduling is {self.async_scheduling!r}, but must be True, False or None"
            )

    def _check_numbers(self) -> None:
        _whole("max_model_len", self.max_model_len, 2, optional=True)
        _whole("num_blocks", self.num_blocks, 1, optional=True)
        _whole("kv_cache_memory", self.kv_cache_memory, 1, optional=True)
        _whole("max_num_seqs", self.max_num_seqs, 1)
        _whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _whole("tensor_parallel_size", self.tensor_parallel_size, 1)
        _whole("num_lookahead_blocks", self.num_lookahead_blocks, 0)
        _whole("seed", self.seed, 0)
        _whole("max_logprobs", self.max_logprobs, 0)
        _check_ratio(self.max_itl_ratio)
        _whole("num_threads", self.num_threads, 1, optional=True)
        if self.num_threads is not None and self.num_threads > MAX_NUM_THREADS:
            raise ConfigurationError(
                f"num_threads is {self.num_threads}, but must be at most {MAX_NUM_THREADS}"
            )
        _whole("block_size", self.block_size, 8)
        if self.block_size > 2048 or self.block_size & (self.block_size - 1):
            raise ConfigurationError(
                f"block_size is {self.block_size}, but must be a power of two from 8 to 2048"
            )
        share: object = self.gpu_memory_utilization
        if share is None:
            return
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization is {share!r}, but must be above 0 and at most 1"
            )


def _check_foreign(name: str, value: Any) -> None:
    harmless, why = FOREIGN_OPTIONS[name]
    # True equals 1 in Python, and is another answer.
    if value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
    ):
        return
    wanted = " or ".join(map(repr, harmless)) or "left out"
    raise ConfigurationError(f"{name} is {value!r:.80}, but must be {wanted}: {why}")


def unknown_option(name: str, known: set[str]) -> str:
    """The sentence for an option that does not exist, with the nearest that does."""
    hint = did_you_mean(name, known) or "."
    return f"unknown option {name}{hint} Known options: {', '.join(sorted(known))}"


def parse_bytes(name: str, value: Any) -> int:
    """2147483648, "2GiB", "500 MB" -> bytes. Raises ConfigurationError naming the option."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(found[2].lower(), 0) if found else 0
        if found and unit and not (unit == 1 and "." in found[1]):
            return int(Fraction(found[1]) * unit)
    raise ConfigurationError(
        f'{name} is {value!r:.80}, but must be a number of bytes or text like "2GiB" or "500MB"'
    )


def _check_ratio(ratio: object) -> None:
    is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    if not is_number or not (ratio == 0 or LEAST_MAX_ITL_RATIO <= ratio < math.inf):  # type: ignore[operator]
        raise ConfigurationError(
            f"max_itl_ratio is {ratio!r}, but must be 0 (no limit) or a number from"
            f" {LEAST_MAX_ITL_RATIO} up"
        )


def _whole(name: str, value: Any, low: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{name} is {value!r}, but must be a whole number")
    if value < low:
        raise ConfigurationError(f"{name} is {value}, but must be at least {low}")
