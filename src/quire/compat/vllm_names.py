"""Locations of vLLM's names in quire, and alternatives to names that quire lacks.

The tables follow vLLM's releases. They are read if an import asks `quire` for an unknown name.
"""

from collections.abc import Mapping

from quire.compat.refusals import REPLICAS, TEXT_ONLY, TRANSFER

_RESULTS = "quire.engine_client.results"
_PARAMS = "quire.core.sampling_params"
_METRICS = "quire.offline.engine_metrics"
_POOLED = "quire.offline.pooling_arguments"
_STRUCTURED = "quire.core.structured_outputs"

NAMES: Mapping[str, Mapping[str, str]] = {
    "quire": {"PoolingParams": f"{_POOLED}:PoolingArguments"},
    "quire.beam_search": {
        "BeamSearchOutput": "quire.offline.beams",
        "BeamSearchSequence": "quire.offline.beams",
    },
    "quire.config": {
        "PoolerConfig": f"{_POOLED}:PoolerSettings",
        "ProfilerConfig": "quire.runtime.torch_profile:ProfilerSettings",
    },
    "quire.distributed": {"cleanup_dist_env_and_memory": "quire.offline.cleanup"},
    "quire.engine.arg_utils": {
        "AsyncEngineArgs": "quire.cli.engine_args",
        "EngineArgs": "quire.cli.engine_args",
    },
    "quire.engine.async_llm_engine": {"AsyncLLMEngine": "quire.engine_client.async_llm:AsyncLLM"},
    "quire.engine.llm_engine": {"LLMEngine": "quire.offline.llm_engine"},
    "quire.entrypoints": {},
    "quire.entrypoints.llm": {"LLM": "quire.offline.llm"},
    "quire.inputs": {
        "TextPrompt": "quire.offline.prompts",
        "TokensPrompt": "quire.offline.prompts",
    },
    "quire.logger": {"init_logger": "quire.observability.log:get_logger"},
    "quire.lora": {},
    "quire.lora.request": {"LoRARequest": "quire.core.adapters"},
    "quire.logprobs": {"Logprob": _RESULTS},
    "quire.outputs": {
        "ClassificationOutput": "quire.offline.pooling",
        "CompletionOutput": _RESULTS,
        "EmbeddingOutput": "quire.offline.pooling",
        "PoolingOutput": "quire.offline.pooling",
        "PoolingRequestOutput": "quire.offline.pooling",
        "RequestOutput": _RESULTS,
        "ScoringOutput": "quire.offline.pooling",
    },
    "quire.pooling_params": {"PoolingParams": f"{_POOLED}:PoolingArguments"},
    "quire.sampling_params": {
        "BeamSearchParams": _PARAMS,
        "GuidedDecodingParams": f"{_STRUCTURED}:StructuredOutputsParams",
        "RequestOutputKind": _PARAMS,
        "SamplingParams": _PARAMS,
        "StructuredOutputsParams": _STRUCTURED,
    },
    "quire.utils": {"FlexibleArgumentParser": "quire.cli.engine_args"},
    "quire.utils.argparse_utils": {"FlexibleArgumentParser": "quire.cli.engine_args"},
    "quire.utils.print_utils": {"print_embeddings": "quire.offline.pooling"},
    "quire.v1": {},
    "quire.v1.engine": {},
    "quire.v1.engine.async_llm": {"AsyncLLM": "quire.engine_client.async_llm"},
    "quire.v1.engine.llm_engine": {"LLMEngine": "quire.offline.llm_engine"},
    "quire.v1.metrics": {},
    "quire.v1.metrics.reader": {
        "Counter": f"{_METRICS}:CounterMetric",
        "Gauge": f"{_METRICS}:GaugeMetric",
        "Histogram": f"{_METRICS}:HistogramMetric",
        "Metric": _METRICS,
        "Vector": f"{_METRICS}:VectorMetric",
    },
}
"""Maps vLLM's modules, with "quire" in place of "vllm", to their names, and each name to the module
of quire that defines it, followed by ":" and the name there if that differs. A module that quire
has, too, gets these names in addition."""

_POOLING = "LLM.embed and LLM.score have vectors and scores; see docs/models.md"
_CODE = "the engine runs no code of a script's own; see docs/extending.md for its seams"
_WEIGHTS = "weights are read from a checkpoint, once"
_OPTIONS = "options are arguments of LLM(...) and EngineArgs(...); see docs/python.md"
_DEVICE = "LLM(device=...) says where to compute, and `quire doctor` what there is"
_ENCODED = "/v1/embeddings answers in numbers, or in base64 of little-endian fp32"
_REGISTRY = "quire.models.architectures.MODELS is the registry; docs/extending.md has an example"

ADVICE: Mapping[str, str] = {
    "ClassificationRequestOutput": _POOLING,
    "EmbeddingRequestOutput": _POOLING,
    "KVTransferConfig": TRANSFER,
    "ModelRegistry": _REGISTRY,
    "LateChunkingParams": "cut a text into chunks, and embed each",
    "PromptType": "a prompt is a text, or {'prompt_token_ids': [...]}",
    "ScoringRequestOutput": _POOLING,
    "WeightTransferConfig": _WEIGHTS,
    "get_open_port": "port 0 means any free port, for sockets and for `quire serve`",
    "initialize_ray_cluster": REPLICAS,
    "quire.assets": TEXT_ONLY,
    "quire.benchmarks": "`quire bench` has the benchmarks",
    "quire.config": _OPTIONS,
    "quire.config.kv_transfer": TRANSFER,
    "quire.distributed.kv_transfer": TRANSFER,
    "quire.distributed.weight_transfer": _WEIGHTS,
    "quire.entrypoints.openai": "`quire serve` is the server",
    "quire.entrypoints.pooling": _ENCODED,
    "quire.envs": "options take the place of environment variables; see `quire serve --help`",
    "quire.forward_context": _CODE,
    "quire.lora.layers": _CODE,
    "quire.lora.utils": _CODE,
    "quire.model_executor": _CODE,
    "quire.multimodal": TEXT_ONLY,
    "quire.platforms": _DEVICE,
    "quire.renderers": "LLM.chat renders messages with the model's chat template",
    "quire.tokenizers": "LLM.get_tokenizer() is the model's tokenizer",
    "quire.tool_parsers": "`quire serve` parses calls of tools; see docs/api.md",
    "quire.transformers_utils": "the transformers package has what a script needs of it",
    "quire.usage": "no usage is reported",
    "quire.utils.gpu_sync_debug": _CODE,
    "quire.utils.network_utils": "port 0 means any free port, for sockets and for `quire serve`",
    "quire.utils.serial_utils": _ENCODED,
    "quire.v1.core": _CODE,
    "quire.v1.executor": _CODE,
    "quire.v1.metrics.loggers": "LLM.get_metrics(), and /metrics of `quire serve`",
    "quire.v1.sample": _CODE,
    "quire.v1.worker": _CODE,
    "quire.worker": _CODE,
}
"""Name, or module including all its names -> a sentence about quire's alternative, or why quire has
none."""
