"""`quire bench serve`: loads a running server, and measures throughput, latencies and goodput.

The flags have the names of vLLM's `bench serve`. The command line calls `add_arguments` and `main`.
"""

import argparse
import asyncio
import datetime
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigurationError
from quire.replay.against_server import ServedModel, find_model, replay_to_server
from quire.replay.call_kinds import CallKind, ChatCalls, TokenCalls
from quire.replay.completion_client import ServerAddress
from quire.replay.figures import ReplayFigures
from quire.replay.script import ModelBounds
from quire.replay.served_load import (
    DATASETS,
    DEFAULT_NUM_PROMPTS,
    RANDOM,
    ServedLoadSpec,
    make_load,
)
from quire.replay.served_results import ServedResults, parse_goodput, write_results
from quire.traces.trace import Trace

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
BACKENDS: Mapping[str, Callable[[bool], CallKind]] = {
    "openai": lambda _: TokenCalls(),
    "vllm": lambda _: TokenCalls(),
    "openai-chat": ChatCalls,
}
"""Backend -> the function that makes its kind of calls, given the value of --ignore-eos."""
USUAL_BOUNDS = ModelBounds(vocab_size=1000, max_model_len=1 << 20)
"""Bounds for a server that does not report its own. Every vocabulary has these token ids."""
PERCENTILES = "90,99"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.description = "Load a running server with OpenAI's API, and measure its answers."
    spec = ServedLoadSpec()
    parser.add_argument("url", nargs="?", metavar="URL", help=f"the server ({DEFAULT_URL})")
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="the same as URL")
    server.add_argument("--host", metavar="HOST", help="the server's host, instead of a URL")
    server.add_argument(
        "--port", type=int, metavar="PORT", help="the server's port, instead of a URL"
    )
    server.add_argument("--model", metavar="NAME", help="the model to ask for (the server's first)")
    server.add_argument(
        "--served-model-name", metavar="NAME", help="the model to ask for, before --model"
    )
    server.add_argument("--api-key", metavar="KEY", help="for the server (none)")
    server.add_argument(
        "--backend",
        "--endpoint-type",
        choices=tuple(BACKENDS),
        default="openai",
        help="openai: token ids at /v1/completions, answers of exact lengths (quire, vLLM,"
        " SGLang); vllm: the same; openai-chat: words at /v1/chat/completions (any server)"
        " (%(default)s)",
    )
    server.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"token ids are below N (what the server reports, or {USUAL_BOUNDS.vocab_size})",
    )
    _add_load(parser.add_argument_group("load"), spec)
    _add_results(parser.add_argument_group("results"))


def _add_load(group: Any, spec: ServedLoadSpec) -> None:
    # First, the data set and its size.
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default=RANDOM,
        help="random lengths, lengths as of ShareGPT, or a trace's lengths, prefixes and times"
        " (%(default)s)",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help="the trace (Mooncake's, Azure's, or a recording), or a file of ShareGPT, whose lengths"
        " are estimated from characters (lengths are drawn)",
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"requests ({DEFAULT_NUM_PROMPTS}, or all of a trace)",
    )
    # Then the arrivals.
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests per second, at random times (inf: all at once; or the times of a trace)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=spec.burstiness,
        metavar="X",
        help="shape of the intervals' gamma distribution; 1: a Poisson process (%(default)g)",
    )
    group.add_argument(
        "--max-concurrency",
        "--concurrency",
        type=int,
        metavar="N",
        help="most requests that are open at once (no bound)",
    )
    # Last, the flags for lengths, and those that apply to all loads.
    _add_lengths(group, spec)
    group.add_argument(
        "--seed", type=int, default=spec.seed, help="seed of the draws (%(default)s)"
    )
    group.add_argument(
        "--num-warmups",
        type=int,
        default=1,
        metavar="N",
        help="requests before the measurement (%(default)s)",
    )


def _add_lengths(group: Any, spec: ServedLoadSpec) -> None:
    for flag, default, text in (
        ("input-len", spec.input_len, "tokens of a prompt of random length"),
        ("output-len", spec.output_len, "tokens of an answer of random length"),
        ("prefix-len", spec.prefix_len, "first tokens that all prompts share, in addition"),
    ):
        group.add_argument(
            f"--random-{flag}",
            f"--{flag}",
            type=int,
            default=default,
            metavar="N",
            help=f"{text} (%(default)s)",
        )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=spec.range_ratio,
        metavar="X",
        help="draw lengths from (1 - X) to (1 + X) times these (%(default)g)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="chats, too, ask for answers of exact lengths; token ids always do",
    )


def _add_results(group: Any) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        default=[],
        help="also count the requests per second that keep these bounds, such as ttft:500 tpot:50;"
        " e2el bounds the whole answer",
    )
    group.add_argument(
        "--metric-percentiles",
        default=PERCENTILES,
        metavar="P,P",
        help="percentiles of latencies (%(default)s)",
    )
    group.add_argument(
        "-o",
        "--output",
        "--result-filename",
        metavar="FILE",
        help="write the results, in the form of vLLM's benchmark",
    )
    group.add_argument(
        "--save-result",
        action="store_true",
        help="write the results to a file that is named after rate, model and time",
    )
    group.add_argument(
        "--result-dir", metavar="DIR", default="", help="folder of the file of results (this one)"
    )
    group.add_argument(
        "--save-detailed",
        action="store_true",
        help="write the times of each request to the file of results, too",
    )
    group.add_argument("--json", action="store_true", help="print the results as JSON instead")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark, print its results, and write the requested file. Returns the exit code: 1
    if no request was answered. Raises ConfigurationError."""
    # First, check everything, so that nothing fails after the measurement.
    address = _address(args)
    _check_counts(args)
    goodput, percentiles = parse_goodput(args.goodput), _percentiles(args.metric_percentiles)
    for name in ("save_detailed", "result_dir"):
        if getattr(args, name) and not (args.save_result or args.output):
            raise ConfigurationError(f"{name} alone writes no file; set save_result, too")
    if args.output is not None and not Path(args.result_dir, args.output).parent.is_dir():
        raise ConfigurationError(
            f"output is {args.output!r}, but there is no such folder; make it first"
        )
    if not Path(args.result_dir).is_dir():
        raise ConfigurationError(f"result_dir is {args.result_dir!r}, but there is no such folder")
    load = make_load(_spec(args))
    # Then run the load.
    model, figures = asyncio.run(_run(load, address, args))
    if not figures.replies:
        reasons = ", ".join(f"{count} {why}" for why, count in figures.left_out.items())
        raise ConfigurationError(f"no request was sent, since none fits the model: {reasons}")
    # Last, report.
    results = ServedResults(_setting(args, load, model), figures, goodput, percentiles)
    path = args.output or (_default_name(results.setting) if args.save_result else None)
    if path is not None:
        write_results(results, Path(args.result_dir, path), is_detailed=args.save_detailed)
    if args.json:
        print(json.dumps(results.data(is_detailed=args.save_detailed), indent=1))
    else:
        print("\n".join(results.lines()))
    return 0 if results.answered else 1


def _address(args: argparse.Namespace) -> ServerAddress:
    """The address of the server. Raises ConfigurationError if two are named."""
    urls = [each for each in (args.url, args.base_url) if each is not None]
    if (args.host, args.port) != (None, None):
        port = DEFAULT_PORT if args.port is None else args.port
        host = args.host or DEFAULT_HOST
        urls.append(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    if len(set(urls)) > 1:
        raise ConfigurationError(f"two servers are named: {urls[0]} and {urls[-1]}")
    return ServerAddress.of(urls[0] if urls else DEFAULT_URL, args.api_key)


def _check_counts(args: argparse.Namespace) -> None:
    least = {
        "num_prompts": 1,
        "max_concurrency": 1,
        "vocab_size": 2,
        "random_input_len": 1,
        "random_output_len": 1,
        "random_prefix_len": 0,
        "num_warmups": 0,
        "seed": 0,
    }
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigurationError(f"{name} is {value}, but must be at least {low}")


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= each <= 100 for each in found):
        raise ConfigurationError(
            f"metric_percentiles is {text!r:.80}, but must be numbers from 0 to 100 with commas"
            f" between, such as {PERCENTILES}"
        )
    return found


def _spec(args: argparse.Namespace) -> ServedLoadSpec:
    return ServedLoadSpec(
        dataset=args.dataset_name,
        path=None if args.dataset_path is None else Path(args.dataset_path),
        num_prompts=args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        rate=args.request_rate,
        burstiness=args.burstiness,
        seed=args.seed,
    )


async def _run(
    load: Trace, address: ServerAddress, args: argparse.Namespace
) -> tuple[ServedModel, ReplayFigures]:
    """Send the warm-up, then the load."""
    kind = BACKENDS[args.backend](args.ignore_eos)
    name = args.served_model_name or args.model
    model = await find_model(address, name, args.vocab_size, USUAL_BOUNDS)
    for _ in range(args.num_warmups):
        found = await replay_to_server(load.first(1), address, model, kind=kind)
        for reply in found.replies:
            if reply.first_s is None:
                raise ConfigurationError(
                    f"the server does not answer the first request: {reply.refused}"
                )
    shows, num_ended, total = sys.stderr.isatty(), 0, len(load.requests)

    def on_reply(_: object) -> None:
        nonlocal num_ended
        num_ended += 1
        if shows:
            print(f"\r{num_ended} of {total} requests", end="", file=sys.stderr)

    figures = await replay_to_server(
        load, address, model, on_reply=on_reply, kind=kind, most_open=args.max_concurrency
    )
    if shows:
        print(file=sys.stderr)
    return model, figures


def _setting(args: argparse.Namespace, load: Trace, model: ServedModel) -> dict[str, Any]:
    """Facts about the run under the key names of vLLM's benchmark."""
    rate = "trace" if args.dataset_name == "trace" else "inf"
    if args.request_rate is not None and math.isfinite(args.request_rate):
        rate = args.request_rate
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": None,
        "model_id": model.name,
        "tokenizer_id": model.name,
        "dataset_name": args.dataset_name,
        "num_prompts": len(load.requests),
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
    }


def _default_name(setting: Mapping[str, Any]) -> str:
    """The file's name, in the form of vLLM's benchmark."""
    bound = setting["max_concurrency"]
    at_once = "" if bound is None else f"-concurrency{bound}"
    model = str(setting["model_id"]).rpartition("/")[2]
    rate = setting["request_rate"]
    return f"{setting['backend']}-{rate}qps{at_once}-{model}-{setting['date']}.json"
