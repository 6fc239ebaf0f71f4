"""Methods of vLLM's `LLM` and engines, with quire's alternatives.

The table follows vLLM's releases.
"""

from collections.abc import Mapping

from quire.compat.refusals import TEXT_ONLY

_ADAPTERS = "each request names its adapter, as generate(..., lora_request=LoRARequest(...))"
_CODE = "no code is run inside the engine; LLM.engine is the engine of this process"
_PROFILE = "LLM has it; other engines run under a profiler, such as py-spy"
_POOLING = "see docs/models.md for the models that give vectors and scores"
_WEIGHTS = "weights are read once; make another LLM for others"

COMPAT_METHODS: Mapping[str, str] = {
    "add_lora": _ADAPTERS,
    "apply_model": _CODE,
    "collective_rpc": _CODE,
    "enqueue": "LLM.start begins a request and steps it; the async engine has many under way",
    "enqueue_chat": "LLM.stream_chat brings text as it comes",
    "finish_weight_update": _WEIGHTS,
    "get_world_size": "it is the option tensor_parallel_size",
    "init_weight_transfer_engine": _WEIGHTS,
    "input_processor": "prompts are texts, or {'prompt_token_ids': [...]}",
    "list_loras": _ADAPTERS,
    "llm_engine": "LLM.engine is the engine; LLMEngine has add_request and step",
    "model_config": "LLM.engine.limits and LLM.engine.facts say what the model is",
    "pause_generation": "AsyncLLM has it; BranchHandle.step goes on only when it is called",
    "pin_lora": _ADAPTERS,
    "preprocess_chat": "get_tokenizer() and the model's chat template make a prompt's tokens",
    "release_kv_cache_memory": "use sleep()",
    "remove_lora": _ADAPTERS,
    "renderer": "LLM.chat renders messages with the model's chat template",
    "reset_encoder_cache": TEXT_ONLY,
    "reset_mm_cache": TEXT_ONLY,
    "resume_generation": "AsyncLLM has it; BranchHandle.step goes on when it is called",
    "reward": _POOLING,
    "set_tokenizer": "LLM(tokenizer=...) says which it is",
    "start_profile": _PROFILE,
    "start_weight_update": _WEIGHTS,
    "stop_profile": _PROFILE,
    "supported_tasks": _POOLING,
    "update_weights": _WEIGHTS,
    "vllm_config": "LLM.engine.facts describes the engine",
    "wait_for_completion": "LLM.generate returns when all have ended",
}
"""Method or attribute of vLLM -> a sentence about quire's alternative."""
