"""All options of an engine in one checked object.

Components declare their options with `option_fields`; this module declares those of `assembly`.
`EngineOptions` joins all of them under flat names. It imports no torch, so that the command line
and the API server can check options. Used by the command line, benchmarks, `LLM`, the server's
start and `assembly`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from quire.attention.backends import AttentionOptions
from quire.compat.llm_options import ALIASES, COMPAT_OPTIONS, check_compat_options
from quire.compat.speculative_config import with_speculative_config
from quire.core.adapter_options import AdapterOptions
from quire.core.content_options import ContentOptions
from quire.core.memory.cache_options import CacheOptions
from quire.core.scheduling.options import PolicyOptions, SchedulerConfig
from quire.errors import ConfigurationError, did_you_mean
from quire.formats.format_registry import FormatOptions
from quire.images.image_options import ImageOptions
from quire.kernels.options import KernelOptions
from quire.numa.numa_options import NumaOptions
from quire.option_fields import (
    Bytes,
    Flag,
    JsonObject,
    OneOf,
    Options,
    Pattern,
    Share,
    Switch,
    Text,
    Tokens,
    Whole,
    option,
)
from quire.options.pooling_options import PoolingOptions
from quire.plugins import PluginOptions
from quire.speculation.speculation_options import OFF, SpeculationOptions
from quire.tiers.tier_options import TierOptions

DTYPES = ("auto", "float32", "bfloat16", "float16")
OTHER_DTYPES = (("half", "float16"), ("float", "float32"))

MODEL_IMPLEMENTATIONS = ("auto", "native", "transformers")

LEAST_KV_BYTES = 1024
"""A smaller number of bytes probably lacks its unit, since any block of a KV cache is larger."""

_PLACE = "a folder, a GGUF file or a hub id"


@dataclass(frozen=True)
class ModelOptions(Options):
    """The model to load, its number format, and limits of requests."""

    model: str | None = option(
        None,
        Text(_PLACE, is_path=True),
        help="folder, GGUF file or hub id of a model (the embedded model)",
        doc="a local folder or a hub id in Hugging Face format, a GGUF file, or a hub id with one,"
        " such as org/repo-GGUF:Q4_K_M; None: the embedded model.",
    )
    tokenizer: str | None = option(
        None,
        Text(_PLACE, is_path=True),
        group="model",
        help="folder, GGUF file or hub id of the tokenizer",
        doc="another folder, GGUF file or hub id to take the tokenizer from.",
        flag=Flag(metavar="PATH", shown="the model's"),
    )
    revision: str | None = option(
        None,
        Text(_PLACE),
        group="model",
        help="branch, tag or commit of the hub id",
        doc="branch, tag or commit of the hub id.",
        flag=Flag(metavar="NAME", shown="main"),
    )
    skip_tokenizer_init: bool = option(
        False,
        Switch(),
        help="have no tokenizer",
        doc="have no tokenizer; prompts and outputs are token ids only.",
    )
    dtype: str = option(
        "auto",
        OneOf(DTYPES, others=OTHER_DTYPES),
        group="model",
        help=f"number format: {', '.join(DTYPES)}; also"
        f" {', '.join(name for name, _ in OTHER_DTYPES)}",
        doc='"auto": the checkpoint\'s own. On a CPU, float32 instead of float16, and instead of'
        " bfloat16 if torch computes and the processor can't multiply it."
        ' "half" and "float" are float16 and float32.',
        flag=Flag(metavar="DTYPE"),
    )
    max_model_len: int | None = option(
        None,
        Tokens(2),
        group="model",
        help="tokens of one sequence, such as 4k",
        doc="tokens of prompt and output together; None: the model's limit, or what fits into the"
        " KV cache.",
        flag=Flag(shown="the model's limit, or what fits"),
    )
    max_logprobs: int = option(
        20,
        Whole(-1),
        group="model",
        help="highest logprobs that a request may ask for; -1: no bound",
        doc="the highest logprobs or prompt_logprobs that a request may ask for; -1 allows the"
        " whole vocabulary.",
    )
    model_impl: str = option(
        "auto",
        OneOf(MODEL_IMPLEMENTATIONS, others=(("vllm", "native"),)),
        group="model",
        help="implementation of the model: {names}",
        doc='implementation of the model. "native": quire\'s own. "transformers": the class'
        " of the package transformers that config.json names, with quire's memory, attention and"
        ' linears. "auto": quire\'s own where there is one, else that class.',
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        JsonObject(),
        group="model",
        help="fields that replace those of the model's config.json, as JSON",
        doc="fields that replace those of the model's config.json, such as rope_parameters for a"
        " longer context. As in vLLM's scripts, max_model_len and classifier_from_token (two tokens"
        " to score by) may stand here, too.",
    )
    allow_special_tokens: bool = option(
        False,
        Switch(),
        group="model",
        help="let special tokens that are written out in chat messages take effect",
        doc='special tokens that are written out in chat messages ("<|im_end|>") take effect;'
        " otherwise they are encoded as ordinary characters. In text prompts they always take"
        " effect.",
    )

    def bound_of_logprobs(self, vocab_size: int) -> int:
        """max_logprobs, limited to the size of the vocabulary."""
        return vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, vocab_size)

    def _check_together(self) -> None:
        super()._check_together()
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigurationError(
                f"tokenizer is {self.tokenizer!r}, but skip_tokenizer_init says to have none; give"
                " one of them"
            )


@dataclass(frozen=True)
class SizeOptions(Options):
    """The size of the KV cache. At most one of these options is given.

    Without any, `host_memory_plan` or `device_memory_plan` chooses the size.
    """

    kv_cache_memory: int | str | None = option(
        None,
        Bytes(LEAST_KV_BYTES, usual_unit="GiB"),
        group="memory",
        help="size of the KV cache, such as 2GiB",
        doc='bytes of the KV cache, or text such as "2GiB". If neither this nor'
        " num_blocks nor gpu_memory_utilization is given: on a GPU, gpu_memory_utilization is 0.9;"
        " on the CPU, the size is that of max_num_seqs full-length sequences, but at most 30% of"
        " the free memory.",
    )
    num_blocks: int | None = option(
        None,
        Whole(1),
        group="memory",
        help="number of KV blocks, instead of a size",
        doc="the size of the KV cache in blocks, instead of kv_cache_memory.",
    )
    gpu_memory_utilization: float | None = option(
        None,
        Share(),
        group="memory",
        help="share of the GPU's memory (on a CPU: of the machine's) for weights and KV cache"
        " together, instead of a size",
        doc="share, above 0 and at most 1, of the device's memory (on the CPU: of the machine's)"
        " that weights and KV cache fill together; instead of kv_cache_memory and num_blocks.",
    )

    @property
    def kv_cache_bytes(self) -> int | None:
        """kv_cache_memory in bytes. The checks have converted text to a number."""
        assert not isinstance(self.kv_cache_memory, str)
        return self.kv_cache_memory

    def _check_together(self) -> None:
        super()._check_together()
        given = [each.name for each in fields(SizeOptions) if getattr(self, each.name) is not None]
        if len(given) > 1:
            raise ConfigurationError(
                f"{given[0]} and {given[1]} both set the size of the KV cache; give one of them"
            )


@dataclass(frozen=True)
class ComputeOptions(Options):
    """The device of an engine, the number of its processes, and how it runs steps."""

    device: str = option(
        "auto",
        Pattern(
            r"auto|cpu|cuda(:\d+)?",
            "'auto', 'cpu', 'cuda' or a GPU by its number, like 'cuda:1'",
        ),
        group="computation",
        help="auto, cpu, cuda or cuda:N",
        doc='"cpu", "cuda" or "cuda:1"; "auto": the GPU if torch can use one.',
        flag=Flag(metavar="DEVICE"),
    )
    tensor_parallel_size: int = option(
        1,
        Whole(1),
        group="computation",
        help="processes that share every layer, each on its own GPU, or on cores of the CPU",
        doc="number of processes that compute a step together. Each holds a share of every layer,"
        " on its own GPU or on the CPU.",
        flag=Flag(others=("-tp",)),
    )
    batch_invariant: bool = option(
        False,
        Switch(),
        group="computation",
        help="make answers on a GPU bitwise independent of other requests; slower. With CPU kernels"
        " they always are",
        doc="on a GPU, tokens and log-probabilities are bitwise independent of other requests. With"
        " the native kernels of the CPU they always are.",
    )
    async_scheduling: bool | None = option(
        None,
        Switch(),
        group="computation",
        help="plan a step while the previous one runs",
        doc="plan a step while the previous one runs; None: on a GPU only, and not with"
        " cpu_experts or cpu_layers. On the CPU steps then"
        " run on a thread of their own, but with tiers, adapters, images or several ranks they"
        " don't overlap.",
        flag=Flag(shown="yes on a GPU, no on a CPU"),
    )
    enforce_eager: bool = option(
        False,
        Switch(),
        group="computation",
        help="don't use CUDA graphs: less memory, slower steps",
        doc="never capture CUDA graphs: less memory, slower steps. On the CPU, which has none,"
        " it is accepted and changes nothing; the log says so.",
    )


@dataclass(frozen=True)
class EngineOptions(
    PluginOptions,
    AttentionOptions,
    KernelOptions,
    ComputeOptions,
    NumaOptions,
    PolicyOptions,
    SpeculationOptions,
    SchedulerConfig,
    TierOptions,
    CacheOptions,
    AdapterOptions,
    ContentOptions,
    SizeOptions,
    FormatOptions,
    ModelOptions,
    ImageOptions,
    PoolingOptions,
):
    """All options of an engine."""

    seed: int = option(
        0,
        Whole(0),
        group="server",
        help="makes the seeds of unseeded requests the same after each start",
        doc="seed of the random numbers from which requests without a seed draw their own.",
        flag=Flag(metavar="SEED", shown="random seeds"),
    )
    disable_log_stats: bool = option(
        True,
        Switch(is_one_way=True),
        group="logging",
        help="don't log throughput and memory use every ten seconds",
        doc="don't log throughput and memory use every ten seconds.",
        flag=Flag(shown="", served=False),
    )

    engines_here: int = option(
        1,
        Whole(1),
        group="memory",
        help="engines that are started on this machine and share its memory; --replicas sets it",
        doc="number of engines with these options on this machine. If no size of the KV cache is"
        " given, each takes its share of the free memory. A fleet sets it.",
        flag=Flag(metavar="N"),
    )
    engines_on_nodes: int = option(
        1,
        Whole(1),
        group="memory",
        help="engines that use the same memory nodes as this one; --replicas sets it",
        doc="number of engines, this one included, whose memory is on the nodes that `numa` names."
        " A fleet sets it.",
        flag=Flag(metavar="N"),
    )
    tells_fingerprint: bool = option(
        False,
        Switch(),
        group="computation",
        help="compute the fingerprint by which the engines of a fleet are compared; --replicas"
        " sets it",
        doc="report in `facts` a fingerprint that must be equal for engines which take over each"
        " other's requests. A fleet sets it.",
    )

    @property
    def fetches_encoder(self) -> bool:
        """Whether the encoder of images of a hub's GGUF model is fetched with the model."""
        return not self.language_model_only and self.mmproj is None

    def _check_together(self) -> None:
        super()._check_together()
        for name, value in self.given_tiers.items():
            if not self.enable_prefix_caching:
                raise ConfigurationError(
                    f"{name} is {value}, but no prefixes are cached that could be kept there"
                    " (enable_prefix_caching is False); leave one of them out"
                )
        if self.speculation == OFF and self.num_draft_tokens != SchedulerConfig.num_draft_tokens:
            raise ConfigurationError(
                f"num_draft_tokens is {self.num_draft_tokens}, but it has no effect without"
                " speculation; set speculation, or leave it out"
            )
        if self.enable_lora and self.tensor_parallel_size > 1:
            raise ConfigurationError(
                f"enable_lora is set, but tensor_parallel_size is {self.tensor_parallel_size}:"
                " adapters are not served over several ranks in this version; leave one of them out"
            )
        self._check_host_part()
        if self.host_cache_size is not None and self.tensor_parallel_size > 1:
            raise ConfigurationError(
                f"host_cache_size is {self.host_cache_size}, but tensor_parallel_size is"
                f" {self.tensor_parallel_size}: a tier in the host's memory is not served for"
                " several ranks in this version; leave one of them out"
            )

    def _check_host_part(self) -> None:
        """Raises ConfigurationError for options that exclude a model with a part on the CPU."""
        if self.host_part is None:
            return
        name, value = self.host_part
        excluded = []
        if self.tensor_parallel_size > 1:
            excluded.append(f"tensor_parallel_size is {self.tensor_parallel_size}")
        if self.cpu_layers is not None:
            excluded += [f"{tier} is {given}" for tier, given in self.given_tiers.items()]
            if self.enable_lora:
                excluded.append("enable_lora is set")
        if excluded:
            raise ConfigurationError(
                f"{name} is {value!r}, but {excluded[0]}, which is not served with a model on two"
                " devices in this version; leave one of them out"
            )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Check names, types and bounds. Raises ConfigurationError, also for unknown names."""
        known = {each.name: each.default for each in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in with_speculative_config(options, known).items():
            target = ALIASES.get(name, name)
            if name in COMPAT_OPTIONS and name not in known:
                check_compat_options(name, value)
                continue
            if target not in known:
                raise ConfigurationError(_unknown_option(name, {*known, *ALIASES}))
            if value is None and known[target] is not None:
                continue  # None means the same as leaving the option out
            if target in values:
                raise ConfigurationError(f"{name} is given twice, also as {target}; give it once")
            values[target] = value
        cls.complete(values)
        return cls(**values)

    def as_mapping(self) -> dict[str, Any]:
        """The options by name, as plain data that `from_mapping` reads in another process."""
        return self.part(type(self))


def _unknown_option(name: str, known: Collection[str]) -> str:
    """The error message for an unknown option, with the nearest known name."""
    hint = did_you_mean(name, known) or "."
    return f"unknown option {name}{hint} Known options: {', '.join(sorted(known))}"
