"""Flags of other engines: translated to quire's flags, or refused with advice.

Six tables list such flags. The parser refuses a flag that is neither in a table nor quire's own,
and suggests the nearest name. `cli.words` calls `translate_flags` before it parses.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

from quire.compat.llm_options import COMPAT_OPTIONS
from quire.compat.refusals import EXPERTS, KV_FORMAT, REPLICAS, TEXT_ONLY
from quire.compat.speculative_config import flags_of_config, flags_of_spec_type
from quire.errors import ConfigurationError

SAME: Mapping[str, str] = {
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--context-length": "--max-model-len",
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-overlap-schedule": "--no-async-scheduling",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--draft": "--num-draft-tokens",
    "--draft-max": "--num-draft-tokens",
    "--draft-n": "--num-draft-tokens",
    "--draft-n-max": "--num-draft-tokens",
    "--hostname": "--host",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--max-concurrent-requests": "--max-queued-requests",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--model-draft": "--speculative-model",
    "-md": "--speculative-model",
    "--speculative-draft-model-path": "--speculative-model",
    "--model-id": "--model",
    "--model-path": "--model",
    "-m": "--model",
    "--num-gpu-blocks-override": "--num-blocks",
    "--num-shard": "--tensor-parallel-size",
    "--page-size": "--block-size",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "-q": "--quantization",
    "--random-seed": "--seed",
    "--threads": "--num-threads",
    "-t": "--num-threads",
    "--tokenizer-path": "--tokenizer",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--watchdog-timeout": "--heartbeat-timeout-s",
}
"""Flag -> quire's flag of equal meaning."""

TRANSLATED: Mapping[str, Callable[[str], list[str]]] = {
    "--spec-type": flags_of_spec_type,
    "--speculative-config": flags_of_config,
}
"""Flag with a value -> the function that converts the value to --speculation and other flags of
quire. It raises ConfigurationError."""

_NAMED = {
    "--" + name.replace("_", "-"): entry
    for name, entry in COMPAT_OPTIONS.items()
    # options of the server, and one that is translated
    if name not in ("reasoning_parser", "served_model_name", "speculative_config")
}


def _switches(flag: str, harmless: Sequence[Any]) -> Mapping[str, bool]:
    """The flags --x and --no-x of a boolean option. True means that the flag's value is
    accepted."""
    if not any(isinstance(value, bool) for value in harmless):
        return {}
    opposite = flag.replace("--", "--no-", 1)
    return {flag: True in harmless, opposite: False in harmless}


_SWITCHES = {
    flag: (is_taken, why)
    for name, (harmless, why) in _NAMED.items()
    for flag, is_taken in _switches(name, harmless).items()
}

ALWAYS = frozenset(
    {
        *(flag for flag, (is_taken, _) in _SWITCHES.items() if is_taken),
        "--cont-batching",
        "-cb",
        "--disable-log-requests",
        "--enable-auto-tool-choice",
        "--enable-metrics",
        "--enable-prompt-tokens-details",
        "--enable-reasoning",
        "--enable-request-id-headers",
        "--enable-tokenizer-info-endpoint",
        "--jinja",
        "--metrics",
        "--no-enable-log-requests",
    }
)
"""Flags without a value that are accepted, since they ask for what quire always does."""

_FLAGS_WITH_VALUES = {
    flag: (tuple(map(str, harmless)), why)
    for flag, (harmless, why) in _NAMED.items()
    if harmless and flag not in _SWITCHES
}

FIXED: Mapping[str, tuple[tuple[str, ...], str]] = {
    **_FLAGS_WITH_VALUES,
    "--api-server-count": (("1",), "one process serves HTTP"),
    "--chat-template-content-format": (("auto",), "the template tells the content format"),
    "-dp": _FLAGS_WITH_VALUES["--data-parallel-size"],
    "--guided-decoding-backend": (
        ("auto", "guidance", "lm-format-enforcer", "outlines", "xgrammar"),
        "llguidance makes all masks",
    ),
    "--response-role": (("assistant",), "answers are the assistant's"),
    "-pp": _FLAGS_WITH_VALUES["--pipeline-parallel-size"],
}
"""Flag with a value -> the values that are accepted, since they ask for what quire does, and why
other values are refused."""

_WHOLE = "--device says where the whole model computes; no layer is split off"
_TLS = "put a reverse proxy that speaks TLS in front"
_SERVED_ADAPTERS = "`quire serve` serves adapters, and LLM(enable_lora=True) in Python"
_LOG = "--log-level sets how much is logged, HTTP calls included"
_CTX = (
    "--max-model-len bounds one sequence; --kv-cache-memory or --num-blocks bound all of them"
    " together"
)

_ONE = f"--tensor-parallel-size splits an engine's layers; {REPLICAS}"
_MEMORY = "all weights are in the memory of the device that computes"
_NUMBERS = "/metrics has the server's numbers, and --otlp-endpoint takes spans"
_PLUGIN = "a dialect is a file of data, which a --plugin may register: see docs/extending.md"
_STATES = "the kernels and the pages of recurrent states are chosen by the device and the model"
_DRAFTS = "--speculation names the proposers of drafts, and --num-draft-tokens bounds them"
_ORIGIN = "--allowed-origins names the sites that may call; methods and headers are fixed"

REFUSED: Mapping[str, str] = {
    "--collect-detailed-traces": _NUMBERS,
    "--device-memory-utilization": "--gpu-memory-utilization is the share of the device's memory",
    "--disable-access-log-for-endpoints": _LOG,
    "--disable-fastapi-docs": "/docs shows what /openapi.json has; a reverse proxy can hide both",
    "--enable-log-outputs": "answers are never logged",
    "--enable-log-deltas": "answers are never logged",
    "--enable-server-load-tracking": "/metrics has the load",
    "--disable-frontend-multiprocessing": "the engine has a process of its own, so that it can be"
    " replaced",
    "--headless": "`LLM` in Python is the engine without a server",
    "--io-processor-plugin": TEXT_ONLY,
    "--log-error-stack": "--debug shows the traceback of an error",
    "--long-prefill-token-threshold-adaptive": "--max-num-batched-tokens bounds a step's tokens",
    "--override-pooler-config": "--pooling-type says how a model's vectors are made",
    "--performance-mode": "--max-itl-ratio says how much a step may delay other answers",
    "--shutdown-timeout": "--drain-timeout-s is the time for open answers",
    "--skip-tokenizer-init": "the server takes and gives text; `LLM` has skip_tokenizer_init",
    "--sse-keep-alive-interval": "--keep-alive-s is the interval",
    "--reasoning-parser-plugin": _PLUGIN,
    "--tool-parser-plugin": _PLUGIN,
    "--trust-request-chat-template": "--chat-template sets the server's; a call's chat_template is"
    " refused, since a template is a program",
    "--tokens-only": "/tokenize and prompts as lists of token ids are always there",
    **{flag: why for flag, (harmless, why) in _NAMED.items() if not harmless},
    **{flag: why for flag, (is_taken, why) in _SWITCHES.items() if not is_taken},
    "--allow-credentials": "keys travel in the Authorization header, never in cookies",
    "--batch-size": "--max-num-batched-tokens bounds a step's tokens, --max-num-seqs its sequences",
    "-b": "--max-num-batched-tokens bounds a step's tokens, --max-num-seqs its sequences",
    "--cache-type-k": KV_FORMAT,
    "--cache-type-v": KV_FORMAT,
    "--chunked-prefill-size": "--max-num-batched-tokens bounds the tokens of a step",
    "--ctx-size": _CTX,
    "-c": _CTX,
    "--disable-access-log": _LOG,
    "--disable-uvicorn-access-log": _LOG,
    "--enable-log-requests": "prompts are never logged; calls are, at --log-level info",
    "--gpu-layers": _WHOLE,
    "--hf-token": "the environment's HF_TOKEN is read, where other processes can't see it",
    "--log-disable": "--log-level error logs errors only",
    "--max-input-length": _CTX,
    "--max-input-tokens": _CTX,
    "--max-total-tokens": _CTX,
    "--n-gpu-layers": _WHOLE,
    "-ngl": _WHOLE,
    "--no-enable-chunked-prefill": "a prompt is always computed in chunks, within a step's budget",
    "--otlp-traces-endpoint": "--otlp-endpoint takes spans, over HTTP rather than gRPC",
    "--root-path": "a reverse proxy in front can strip its prefix",
    "--schedule-policy": "--scheduling-policy has other names: see --help",
    "--ssl-ca-certs": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--timeout": "--default-deadline-s ends a call, --keep-alive-s keeps a silent stream open",
    "--uds": "--host and --port say where to listen",
    "--uvicorn-log-level": _LOG,
    "--workers": "one process serves HTTP",
}
"""Flag -> a sentence about quire's alternative, or why quire has none."""

FAMILIES: Mapping[str, str] = {
    "--allowed-headers": _ORIGIN,
    "--allowed-methods": _ORIGIN,
    "--cudagraph-": "--enforce-eager switches CUDA graphs off; they have no other settings",
    "--custom-histogram-buckets": _NUMBERS,
    "--data-parallel-": _ONE,
    "--dbo-": EXPERTS,
    "--dcp-": _ONE,
    "--dp-": _ONE,
    "--enable-layerwise-nvtx-tracing": _NUMBERS,
    "--enable-mamba-": _STATES,
    "--enable-mfu-metrics": _NUMBERS,
    "--enable-lora": _SERVED_ADAPTERS,
    "--enable-moe-": "adapters of experts are not served",
    "--enable-ssl-": _TLS,
    "--enable-tower-connector-lora": TEXT_ONLY,
    "--expert-": EXPERTS,
    "--h11-max-": "a call's head has up to 32 KiB; --max-body-bytes bounds its body",
    "--show-hidden-metrics": _NUMBERS,
    "--gdn-": _STATES,
    "--grpc": "the server speaks HTTP only",
    "--jit-monitor-": _NUMBERS,
    "--kda-": _STATES,
    "--kv-cache-dtype-": KV_FORMAT,
    "--kv-cache-metrics-": _NUMBERS,
    "--kv-offloading-": "--host-cache-size says how much of the host's memory, such as 8GiB",
    "--log-config-file": _LOG,
    "--logging-config": _LOG,
    "--lora-modules": _SERVED_ADAPTERS,
    "--lora-": "adapters are computed in the model's dtype, and have no tokens of their own",
    "--mamba-": _STATES,
    "--master-": f"the ranks of an engine are processes of one machine; {REPLICAS}",
    "--max-log-len": "prompts are never logged",
    "--max-cpu-loras": _SERVED_ADAPTERS,
    "--max-lora": _SERVED_ADAPTERS,
    "--max-num-active-seqs": "--max-num-seqs bounds the sequences of a step",
    "--max-num-queued-reqs": "--max-queued-requests bounds the generations that are open",
    "--max-num-queued-tokens": "--max-queued-requests bounds the generations that are open",
    "--media-io-": TEXT_ONLY,
    "--middleware": "a reverse proxy in front can change calls and answers",
    "--mm-": TEXT_ONLY,
    "--numa-": "--numa names an engine's nodes, which are divided among its ranks",
    "--offload-": _MEMORY,
    "--prefix-": "prefixes are found by a keyed hash of each block, and evicted as --eviction says",
    "--ray-": "--ray-address places replicas; the ranks of an engine are processes of one machine",
    "--replayssm-": _STATES,
    "--safetensors-": "a checkpoint is read a few MiB at a time, on --num-threads threads",
    "--sleep-mode-": "POST /sleep and LLM.sleep() need no flag",
    "--draft-": _DRAFTS,
    "--spec-": _DRAFTS,
    "--speculative-": _DRAFTS,
    "--ssl-": _TLS,
    "--video-": TEXT_ONLY,
    "--watermark": "texts are not watermarked",
}
"""Prefix -> the sentence for all flags with this prefix that are in no other table."""

KNOWN = frozenset(chain(SAME, TRANSLATED, ALWAYS, FIXED, REFUSED))


def translate_flags(
    words: Sequence[str], ours: Collection[str], refuse: Callable[[str], NoReturn]
) -> list[str]:
    """Replace the flags of other engines in a command line. Flags that change nothing in quire are
    dropped.

    `ours` are the command's own flags. `refuse` raises an error with the given sentence.
    """
    settled: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*settled, word, *rest]
        flag, equals, value = word.partition("=")
        if flag in ours:
            settled.append(word)
        elif flag not in KNOWN:
            why = next((FAMILIES[start] for start in FAMILIES if flag.startswith(start)), None)
            if why is not None:
                refuse(f"there is no option {flag}: {why}")
            settled.append(word)
        elif flag in SAME:
            # If this command lacks quire's flag, too, the parser reports the original flag as
            # unknown.
            name = SAME[flag] if SAME[flag] in ours else flag
            settled.append(f"{name}{equals}{value}")
        elif flag in TRANSLATED and "--speculation" not in ours:
            settled.append(word)
        elif flag in TRANSLATED:
            settled += _translated(flag, value if equals else next(rest, None), refuse)
        elif flag in FIXED:
            _check_fixed(flag, value if equals else next(rest, None), refuse)
        elif flag in REFUSED:
            refuse(f"there is no option {flag}: {REFUSED[flag]}")
        elif equals:
            refuse(f"{flag} takes no value, but got {value!r}")
    return settled


def _translated(flag: str, value: str | None, refuse: Callable[[str], NoReturn]) -> list[str]:
    if value is None:
        refuse(f"{flag} is missing its value")
    try:
        return TRANSLATED[flag](value)
    except ConfigurationError as error:
        refuse(str(error).replace(flag[2:].replace("-", "_"), flag, 1))


def _check_fixed(flag: str, value: str | None, refuse: Callable[[str], NoReturn]) -> None:
    known, why = FIXED[flag]
    if value not in known:
        refuse(
            f"{flag} is {'missing its value' if value is None else repr(value)}, but must be"
            f" {' or '.join(known)}: {why}"
        )
