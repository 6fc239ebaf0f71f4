"""Commands of other engines, with a sentence about quire's command for the same purpose.

`cli.parser` refuses such a command, or a flag of such a command, with its sentence.
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
    "startup": "`quire serve MODEL` prints how long each stage of its start takes",
    "sweep": "`quire plan MODEL --load LOAD` compares configurations",
}
"""Sub-command of `bench` -> what to type instead."""

_TOKEN_IDS = (
    "no tokenizer is needed, since prompts are random token ids below --vocab-size, or words with"
    " --backend openai-chat"
)
_SAMPLING = "no call sets how its answer is sampled, so the server's defaults decide"
_RATE = "--request-rate and --burstiness set the arrivals, or a trace with --dataset-name trace"
_PLOTS = "-o FILE writes the results, and --save-detailed the times of each request, as JSON"

FLAGS_OF_BENCH_SERVE: dict[str, str] = {
    "--append-result": "each run writes its own file",
    "--disable-tqdm": "progress is shown on a terminal only",
    "--endpoint": "--backend openai asks /v1/completions, openai-chat asks /v1/chat/completions",
    "--frequency-penalty": _SAMPLING,
    "--label": "--result-filename names the file",
    "--metadata": "--result-filename names the file",
    "--min-p": _SAMPLING,
    "--percentile-metrics": "TTFT, TPOT, ITL and E2EL are all printed",
    "--plot-dataset-stats": _PLOTS,
    "--plot-timeline": _PLOTS,
    "--presence-penalty": _SAMPLING,
    "--ramp-up-end-rps": _RATE,
    "--ramp-up-start-rps": _RATE,
    "--ramp-up-strategy": _RATE,
    "--repetition-penalty": _SAMPLING,
    "--sharegpt-output-len": "the data set has the lengths of its answers",
    "--temperature": _SAMPLING,
    "--tokenizer": _TOKEN_IDS,
    "--tokenizer-mode": _TOKEN_IDS,
    "--top-k": _SAMPLING,
    "--top-p": _SAMPLING,
    "--trust-remote-code": _TOKEN_IDS,
    "--use-beam-search": _SAMPLING,
}
"""Flag of vLLM's `bench serve` -> what to do instead, or why it is not needed."""
