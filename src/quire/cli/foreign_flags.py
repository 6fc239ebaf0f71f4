"""Flags of other engines: translated to ours, or refused with advice.

Four tables by flag. A flag that is neither in one of them nor ours is unknown, and gets the nearest
name of ours. Knows no parser; `parser` calls `settle` before it parses.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import NoReturn

from quire.options.foreign_options import FOREIGN_OPTIONS

SAME: Mapping[str, str] = {
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--context-length": "--max-model-len",
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-overlap-schedule": "--no-async-scheduling",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--hostname": "--host",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--max-concurrent-requests": "--max-queued-requests",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
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
"""Flag -> ours of equal meaning."""

_SWITCHES = {
    f"--{'' if harmless[0] else 'no-'}{name.replace('_', '-')}"
    for name, (harmless, _) in FOREIGN_OPTIONS.items()
    if harmless and isinstance(harmless[0], bool)
}

ALWAYS = frozenset(
    {
        *_SWITCHES,
        "--cont-batching",
        "-cb",
        "--disable-log-requests",
        "--enable-metrics",
        "--enable-request-id-headers",
        "--jinja",
        "--metrics",
        "--no-enable-log-requests",
    }
)
"""Flags without a value that name what quire always does."""

_FLAGS_WITH_VALUES = {
    "--" + name.replace("_", "-"): (tuple(map(str, harmless)), why)
    for name, (harmless, why) in FOREIGN_OPTIONS.items()
    if harmless and isinstance(harmless[0], (str, int)) and not isinstance(harmless[0], bool)
}

FIXED: Mapping[str, tuple[tuple[str, ...], str]] = {
    **_FLAGS_WITH_VALUES,
    "--api-server-count": (("1",), "one process serves HTTP"),
    "-dp": _FLAGS_WITH_VALUES["--data-parallel-size"],
    "-pp": _FLAGS_WITH_VALUES["--pipeline-parallel-size"],
}
"""Flag with a value -> the values that describe what quire does, and why there are no others."""

_WHOLE = "--device says where the whole model computes; no layer is split off"
_TLS = "put a reverse proxy that speaks TLS in front"
_LATER = "this version has no tool calls and no reasoning parsers"
_TEMPLATE = "the template of the model's folder is used, or that of --tokenizer's"
_LORA = "adapters are not served in this version"
_LOG = "--log-level sets how much is logged, HTTP calls included"
_CTX = (
    "--max-model-len bounds one sequence; --kv-cache-memory or --num-blocks bound all of them"
    " together"
)

REFUSED: Mapping[str, str] = {
    "--allow-credentials": "keys travel in the Authorization header, never in cookies",
    "--batch-size": "--max-num-batched-tokens bounds a step's tokens, --max-num-seqs its sequences",
    "-b": "--max-num-batched-tokens bounds a step's tokens, --max-num-seqs its sequences",
    "--cache-type-k": "keys and values have the model's dtype",
    "--cache-type-v": "keys and values have the model's dtype",
    "--chat-template": _TEMPLATE,
    "--chunked-prefill-size": "--max-num-batched-tokens bounds the tokens of a step",
    "--ctx-size": _CTX,
    "-c": _CTX,
    "--disable-access-log": _LOG,
    "--disable-uvicorn-access-log": _LOG,
    "--download-dir": "models are kept where HF_HOME says",
    "--enable-auto-tool-choice": _LATER,
    "--enable-log-requests": "prompts are never logged; calls are, at --log-level info",
    "--enable-lora": _LORA,
    "--gpu-layers": _WHOLE,
    "--hf-token": "the environment's HF_TOKEN is read, where other processes can't see it",
    "--log-disable": "--log-level error logs errors only",
    "--lora-modules": _LORA,
    "--max-input-length": _CTX,
    "--max-input-tokens": _CTX,
    "--max-total-tokens": _CTX,
    "--n-gpu-layers": _WHOLE,
    "-ngl": _WHOLE,
    "--no-enable-chunked-prefill": "a prompt is always computed in chunks, within a step's budget",
    "--otlp-traces-endpoint": "--otlp-endpoint takes spans, over HTTP rather than gRPC",
    "--reasoning-parser": _LATER,
    "--root-path": "a reverse proxy in front can strip its prefix",
    "--schedule-policy": "--scheduling-policy has other names: see --help",
    "--speculative-config": "there is no speculative decoding in this version",
    "--ssl-ca-certs": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--timeout": "--default-deadline-s ends a call, --keep-alive-s keeps a silent stream open",
    "--tool-call-parser": _LATER,
    "--trust-remote-code": "code from a model's folder is never run",
    "--uds": "--host and --port say where to listen",
    "--uvicorn-log-level": _LOG,
    "--workers": "one process serves HTTP",
}
"""Flag -> what to use instead, or why there is no such thing."""

KNOWN = frozenset(chain(SAME, ALWAYS, FIXED, REFUSED))


def settle(
    words: Sequence[str], ours: Collection[str], refuse: Callable[[str], NoReturn]
) -> list[str]:
    """The words with others' flags made ours, taken out if quire always does so, or refused.

    ours: the flags of the command. refuse: is called with a sentence and does not return.
    """
    settled: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*settled, word, *rest]
        flag, equals, value = word.partition("=")
        if flag in ours or flag not in KNOWN:
            settled.append(word)
        elif flag in SAME:
            # Where this command has no such flag, the parser reports it as unknown.
            name = SAME[flag] if SAME[flag] in ours else flag
            settled.append(f"{name}{equals}{value}")
        elif flag in FIXED:
            _check_fixed(flag, value if equals else next(rest, None), refuse)
        elif flag in REFUSED:
            refuse(f"there is no option {flag}: {REFUSED[flag]}")
        elif equals:
            refuse(f"{flag} takes no value, but got {value!r}")
    return settled


def _check_fixed(flag: str, value: str | None, refuse: Callable[[str], NoReturn]) -> None:
    known, why = FIXED[flag]
    if value not in known:
        refuse(
            f"{flag} is {'missing its value' if value is None else repr(value)}, but must be"
            f" {' or '.join(known)}: {why}"
        )
