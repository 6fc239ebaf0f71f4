"""Options of other engines' scripts, and what quire has in their place.

These are keyword arguments of `LLM(...)`. Data that ages with those engines' releases.
`cli.foreign_flags` has their flags.
"""

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigurationError

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
"""Option of scripts for vLLM -> the values that describe what quire always does (swap_space has
vLLM's default, too, which vLLM itself no longer reads), and why it has no others. None is always
taken: it sets nothing. The command line has them as flags."""

ALIASES = {"kv_cache_memory_bytes": "kv_cache_memory"}
"""Other name of an option -> ours."""


def check_foreign(name: str, value: Any) -> None:
    """Raises ConfigurationError for a value that quire can't obey."""
    harmless, why = FOREIGN_OPTIONS[name]
    # True equals 1 in Python, and is another answer.
    if value is None or any(
        value == same and isinstance(value, bool) == isinstance(same, bool) for same in harmless
    ):
        return
    wanted = " or ".join(map(repr, harmless)) or "left out"
    raise ConfigurationError(f"{name} is {value!r:.80}, but must be {wanted}: {why}")
