"""Options of other engines' scripts, with quire's alternatives.

These are keyword arguments of `LLM(...)`. The table follows the releases of these engines.
`compat.flags` has their flags.
"""

from collections.abc import Mapping
from typing import Any

from quire.compat.refusals import (
    EXPERT_CHOICES,
    EXPERT_KERNELS,
    EXPERTS,
    KV_FORMAT,
    REPLICAS,
    TEXT_ONLY,
    TRANSFER,
)
from quire.errors import ConfigurationError

_GENERATES = "runner and the model's folder say what a model is used for"
_ONE_ENGINE = f"tensor_parallel_size splits an engine's layers; {REPLICAS}"
_RANKS = f"the ranks of an engine are processes of one machine; {REPLICAS}"
_GRAPHS = "enforce_eager switches CUDA graphs off; they have no other settings"
_HERE = "cpu_layers and cpu_experts leave layers or experts to the CPU, which computes them"
_PARTS = "kernels are chosen for the machine; attention_backend chooses those of attention"
_CODE = "no code of a script's own runs in the engine; see docs/extending.md for its seams"
_PROFILER = "LLM takes it; other engines run under a profiler, such as py-spy"
_FORMATS = "a model's files say whether they are safetensors or GGUF; pickles are never read"
_ROPE = "hf_overrides takes rope_parameters"
_DRAFTS = "speculation names the proposer of drafts, and num_draft_tokens bounds them"
_SLEEP = "LLM.sleep() needs no option"
_LOGS = "LLM.get_metrics() has the engine's numbers"
COMPAT_OPTIONS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "additional_config": (({},), _CODE),
    "aggregate_engine_logging": ((False,), _LOGS),
    "all2all_backend": ((), EXPERTS),
    "attention_config": (({},), "attention_backend names the backend"),
    "code_revision": ((), "code from a model's folder is never run"),
    "compilation_config": ((0, {}), _GRAPHS),
    "config_format": (
        ("auto", "hf"),
        "a config is read from Hugging Face's config.json or from a GGUF file",
    ),
    "convert": (("auto", "none"), _GENERATES),
    "cpu_offload_gb": ((0,), _HERE),
    "cpu_offload_params": ((), _HERE),
    "cudagraph_capture_sizes": ((), _GRAPHS),
    "data_parallel_address": ((), _ONE_ENGINE),
    "data_parallel_backend": (("mp",), _ONE_ENGINE),
    "data_parallel_rank": ((0,), _ONE_ENGINE),
    "data_parallel_rpc_port": ((), _ONE_ENGINE),
    "data_parallel_size": ((1,), _ONE_ENGINE),
    "data_parallel_size_local": ((1,), _ONE_ENGINE),
    "decode_context_parallel_size": ((1,), _ONE_ENGINE),
    "default_mm_loras": ((), TEXT_ONLY),
    "disable_cascade_attn": ((), _PARTS),
    "disable_chunked_mm_input": ((False, True), TEXT_ONLY),
    "disable_custom_all_reduce": ((False, True), "ranks reduce through torch.distributed"),
    "disable_hybrid_kv_cache_manager": ((False,), "layers of each kind have a group of their own"),
    "disable_sliding_window": ((False,), "a model's windows are what it was trained with"),
    "distributed_executor_backend": (("mp",), _RANKS),
    "download_dir": ((), "models are kept where HF_HOME says"),
    "enable_chunked_prefill": ((True,), "a prompt is always computed in chunks"),
    "enable_cumem_allocator": ((False,), _SLEEP),
    "enable_dbo": ((False,), EXPERTS),
    "enable_eplb": ((False,), EXPERTS),
    "enable_expert_parallel": ((False,), EXPERTS),
    "enable_log_requests": ((False,), "prompts are never logged"),
    "enable_mm_embeds": ((False,), TEXT_ONLY),
    "enable_prompt_embeds": ((False,), "a prompt is text or token ids"),
    "enable_return_routed_experts": ((False,), EXPERT_CHOICES),
    "enable_sleep_mode": ((False, True), _SLEEP),
    "enable_trace_replay": ((False,), "generated tokens can't be prescribed"),
    "fully_sharded_loras": ((False,), "adapters are served by one rank in this version"),
    "generation_config": (("auto",), "the model's own generation_config.json is used"),
    "hf_config_path": ((), "a model's folder has its config"),
    "hf_token": ((False,), "the environment's HF_TOKEN is read"),
    "ignore_patterns": ((), _FORMATS),
    "interleave_mm_strings": ((False,), "the chat template places images where their parts stand"),
    "io_processor_plugin": ((), _CODE),
    "kernel_config": (({},), _PARTS),
    "kv_cache_metrics": ((False, True), _LOGS),
    "kv_events_config": ((), TRANSFER),
    "kv_offloading_backend": (("native",), "there is one backend; host_cache_size sets its size"),
    "kv_offloading_size": ((), "host_cache_size sets it, in bytes or as '8GiB'"),
    "kv_sharing_fast_prefill": ((False,), _PARTS),
    "kv_transfer_config": ((), TRANSFER),
    "linear_backend": (("auto",), _PARTS),
    "load_format": (("auto", "safetensors"), _FORMATS),
    "logits_processors": (([],), _CODE),
    "logprobs_mode": (
        ("raw_logprobs",),
        "log-probabilities are of the model's own distribution, before any option applies",
    ),
    "long_prefill_token_threshold": ((0,), "max_num_batched_tokens bounds a step's tokens"),
    "lora_dtype": (("auto",), "adapters are computed in the model's dtype"),
    "max_cudagraph_capture_size": ((), _GRAPHS),
    "max_num_scheduled_tokens": ((), "max_num_batched_tokens bounds a step's tokens"),
    "max_parallel_loading_workers": ((), "num_threads says how many threads load"),
    "max_seq_len_to_capture": ((), _GRAPHS),
    "media_io_kwargs": (({},), "images become RGB, over white where they are transparent"),
    "mm_encoder_attn_backend": ((), _PARTS),
    "mm_encoder_only": ((False,), "an engine encodes images for its own language model only"),
    "mm_encoder_tp_mode": ((), "rank 0 encodes the images of all ranks"),
    "mm_processor_cache_gb": ((0, 4), "encoder_cache_memory bounds what is kept of images"),
    "model_loader_extra_config": (({},), _FORMATS),
    "moe_backend": (("auto",), EXPERT_KERNELS),
    "nnodes": ((1,), _RANKS),
    "node_rank": ((0,), _RANKS),
    "num_lookahead_slots": ((0,), _DRAFTS),
    "num_scheduler_steps": ((1,), "each step is planned by itself"),
    "num_speculative_tokens": ((), _DRAFTS),
    "observability_config": ((), _LOGS),
    "offload_backend": (("auto",), _HERE),
    "optimization_level": ((), _GRAPHS),
    "otlp_traces_endpoint": ((), "`quire serve --otlp-endpoint` sends spans"),
    "override_generation_config": (
        ({},),
        "SamplingParams says what a request wants; get_default_sampling_params() is the model's",
    ),
    "pipeline_parallel_size": ((1,), _ONE_ENGINE),
    "pooler_config": ((), "LLM takes it; else pooling_type and the model's folder say it"),
    "preemption_mode": (
        ("recompute",),
        "preempted sequences are computed anew, or loaded where host_cache_size or cache_dir kept"
        " them and that is faster",
    ),
    "prefill_context_parallel_size": ((1,), _ONE_ENGINE),
    "profiler_config": ((), _PROFILER),
    "quantization_config": ((), "quantization names the format"),
    "quantization_param_path": ((), KV_FORMAT),
    "reasoning_parser": (
        (),
        "`quire serve` separates reasoning from answers; LLM.chat returns the raw text",
    ),
    "renderer_num_workers": ((1,), "one process renders and tokenizes"),
    "rope_scaling": ((), _ROPE),
    "rope_theta": ((), _ROPE),
    "scheduler_cls": ((), "scheduling_policy names the policy; docs/extending.md adds one"),
    "served_model_name": ((), "`quire serve --served-model-name` names it for clients"),
    "skip_mm_profiling": ((False, True), TEXT_ONLY),
    "speculative_config": ((), _DRAFTS),
    "stream_interval": ((1,), "a stream brings each token as it comes"),
    "structured_outputs_config": (({},), "SamplingParams(structured_outputs=...) says the form"),
    "swap_space": (
        (0, 4),
        "preempted sequences are computed anew; on a GPU host_cache_size gives them room",
    ),
    "task": (("auto", "generate"), _GENERATES),
    "tokenizer_mode": (("auto",), "there is one kind of tokenizer, the fast one"),
    "tokenizer_revision": ((), "revision is that of model and tokenizer"),
    "trust_remote_code": ((False, True), "code from a model's folder is never run, nor needed"),
    "use_tqdm_on_load": ((False, True), "the log says what is loaded"),
    "watermark_config": ((), "texts are not watermarked"),
    "weight_transfer_config": ((), "weights are read from a checkpoint, once"),
    "worker_cls": (("auto",), _CODE),
    "worker_extension_cls": (("",), _CODE),
}
"""vLLM's option -> the values that are accepted, since they ask for what quire always does, and why
other values are refused. swap_space also accepts vLLM's default, which vLLM itself ignores. None is
always accepted, since it sets nothing. The command line has these options as flags.
`compat.speculative_config` reads speculative_config before this table is asked."""

ALIASES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
}
"""Another engine's name of an option -> quire's name."""


def check_compat_options(name: str, value: Any) -> None:
    """Raises ConfigurationError for a value that quire can't obey."""
    harmless, why = COMPAT_OPTIONS[name]
    # True == 1 in Python, but as option values they differ.
    if value is None or any(
        value == same and isinstance(value, bool) == isinstance(same, bool) for same in harmless
    ):
        return
    wanted = " or ".join(map(repr, harmless)) or "left out"
    raise ConfigurationError(f"{name} is {value!r:.80}, but must be {wanted}: {why}")
