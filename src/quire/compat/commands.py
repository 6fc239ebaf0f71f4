"""Commands of other engines, with a sentence about quire's command for the same purpose.

`cli.parser` refuses such a command with its sentence.
"""

_LIFE = "`quire serve MODEL` loads one model and ends with Ctrl-C"

COMMANDS: dict[str, str] = {
    "collect-env": "`quire doctor` reports on this machine",
    "complete": "`quire generate PROMPT` continues a text",
    "convert": "a model is read as it is: safetensors, GGUF, AWQ, GPTQ, FP8 or MXFP4",
    "cp": "`quire serve MODEL --served-model-name NAME` gives a model another name",
    "create": "quire reads no Modelfile; `quire serve --config FILE` holds the options of a server",
    "embed": "`quire serve MODEL` has /v1/embeddings, and `LLM.embed` is for Python",
    "env": "`quire doctor` reports on this machine",
    "launch": "`quire serve MODEL` serves a model",
    "launch-server": "`quire serve MODEL` serves a model",
    "load": _LIFE,
    "login": "the environment's HF_TOKEN is read",
    "ls": "`quire list` lists the models on this machine",
    "push": "models are published with the hub's own client (`hf upload`)",
    "remove": "`quire rm MODEL` removes a model from this machine",
    "run-batch": "`quire batch FILE` answers a file of calls",
    "server": "`quire serve MODEL` serves a model",
    "signin": "the environment's HF_TOKEN is read",
    "start": "`quire serve MODEL` serves a model",
    "stop": _LIFE,
    "unload": _LIFE,
    "update": "`quire pull MODEL` fetches what has changed of a model",
}
"""Command -> what to type instead."""

_STEPS = (
    "`quire plan MODEL --load LOAD --measure` measures the times of steps, and `quire bench serve`"
    " the latencies of a running server"
)

BENCHMARKS: dict[str, str] = {
    "latency": _STEPS,
    "mm-processor": "models take text here",
    "offline": "`quire bench throughput` measures the engine without a server",
    "one-batch": _STEPS,
    "one_batch": _STEPS,
    "serving": "`quire bench serve URL` loads a running server",
    "sweep": "`quire plan MODEL --load LOAD` compares configurations",
}
"""Sub-command of `bench` -> what to type instead."""
