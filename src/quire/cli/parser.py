"""The command-line parser: every command and its flags.

Reads no environment variables; `main` runs the parsed commands. Imports no slow modules, because
`--help` and `--version -v` import this module.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from quire.bench.quality.quality_file import DEFAULT_QUALITY_FILE
from quire.cli.config_file import ConfiguredParser
from quire.cli.flags import (
    MODEL_HELP,
    Once,
    add_debug,
    add_engine,
    add_model_by_place,
    add_model_flag,
    add_sampling,
    add_serve,
    check_served,
    positive,
    seconds_between,
)
from quire.cli.words import Parser
from quire.cluster.machines.agent_arguments import add_arguments as add_agent_arguments
from quire.compat import commands as foreign
from quire.server.config import ServerConfig

COMMANDS = {
    "generate": "continue a text",
    "run": "fetch a model if it is not here, and talk with it",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model over HTTP with OpenAI's API",
    "pull": "fetch a model, after a report on it",
    "list": "list the models on this machine",
    "rm": "remove a model from this machine",
    "show": "report on a model, with its memory and speed here",
    "ps": "list the models that a running server has in memory",
    "top": "watch a running server: its requests, steps and memory",
    "batch": "answer a file of calls in OpenAI's batch format",
    "replay": "replay a recorded load, against a server or a simulated engine",
    "bench": "measure a server, an engine beside baselines, or quality",
    "plan": "say how to serve a load here: what fits, what to expect, and what is best",
    "doctor": "report on this machine, or on a model with its memory and speed here",
    "cluster": "run replicas on several machines: agents, and a server over a Ray cluster",
    "cache": "inspect, verify or empty a folder of cached prefixes",
}
BENCHMARKS = {
    "serve": "latencies and goodput of a running server, under a load",
    "throughput": "tokens per second and latencies, beside static batches and Hugging Face",
    "perplexity": "what a dtype or a quantization costs in quality",
}
MOVED_BENCHMARKS = foreign.BENCHMARKS | {
    name: f"run `python -m benchmarks.{name}` in a checkout of quire"
    for name in ("claims", "memory")
}
"""For each benchmark that is not in the package, what to type instead."""
CACHE_ACTIONS = {
    "inspect": "say what a cache folder holds, also while an engine uses it",
    "verify": "read all records and check every byte; exit code 1 if any is damaged",
    "empty": "remove all cached prefixes; the folder's secret stays",
}
CLUSTER_ACTIONS = {
    "agent": "start and watch the engine of one replica on this machine, for a server elsewhere",
    "serve": "as `quire serve`, with the replicas on the nodes of a Ray cluster",
}
SHELLS = ("bash", "zsh", "fish", "tcsh")
_USAGES = {
    "generate": "%(prog)s [options] PROMPT ...",
    "chat": "%(prog)s [options] [MODEL]",
    "run": "%(prog)s [options] MODEL [PROMPT]",
    "serve": "%(prog)s [options] [MODEL]",
    "batch": "%(prog)s [options] FILE -o ANSWERS",
    "replay": "%(prog)s [options] FILE [MODEL]",
    "plan": "%(prog)s [options] [MODEL] --load LOAD",
    "doctor": "%(prog)s [options] [MODEL]",
}

DEFAULT_GENERATE_TOKENS = 128
DEFAULT_PORT = 8000
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
DEFAULT_DOCTOR_TOKENS = 4096
DEFAULT_MEASURE_S = 10.0
DEFAULT_COSTS = "~/.cache/quire/step_costs.json"

_REVISION = "branch, tag or commit of MODEL"
_NAMED_MODEL = "a hub id, or a name of Ollama's library such as qwen3:0.6b"
_DESCRIPTION = "An inference engine for large language models."


_EPILOG = (
    "Each flag may also be given in the environment: QUIRE_MAX_NUM_SEQS=32 stands for"
    " --max-num-seqs 32. --help=WORD shows the options with this word,"
    " or one group, such as memory."
)


def build_parser(
    add_bench_arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Parser:
    """Build the parser of all commands.

    `add_bench_arguments` maps each benchmark to a function that adds its arguments to a parser. The
    functions are in `quire.bench`, which is not imported for other commands. None leaves `bench`
    empty. `environment` has the variables that stand for flags of commands with an engine.
    """
    # First, the flags of `quire` itself.
    parser = Parser(
        prog="quire", description=_DESCRIPTION, commands=COMMANDS, moved=foreign.COMMANDS
    )
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="with --version: show Python, torch and kernels, too",
    )
    parser.add_argument(
        "--print-completion",
        choices=SHELLS,
        metavar="SHELL",
        help=f"print a completion script for {', '.join(SHELLS)}",
    )
    add_debug(parser, default=False)
    # Then the commands without sub-commands.
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=ConfiguredParser
    )
    _add_plain_commands(commands, environment or {})
    # Last, the commands with sub-commands: bench, cluster and cache.
    benchmarks = add_bench_arguments or {}
    bench = commands.add_parser(
        "bench", help=COMMANDS["bench"], commands=benchmarks, moved=MOVED_BENCHMARKS
    )
    if benchmarks:
        kinds = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", parser_class=Parser)
        for name, add_arguments in benchmarks.items():
            moved = foreign.FLAGS_OF_BENCH_SERVE if name == "serve" else None
            kind = kinds.add_parser(name, help=BENCHMARKS.get(name), moved=moved)
            add_arguments(kind)
            add_debug(kind, default=argparse.SUPPRESS)
    _add_model_commands(commands)
    _add_top(commands)
    _add_cluster(commands, environment or {})
    cache = commands.add_parser("cache", help=COMMANDS["cache"], commands=CACHE_ACTIONS)
    actions = cache.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)
    for name, text in CACHE_ACTIONS.items():
        action = actions.add_parser(name, help=text)
        action.add_argument("folder", metavar="FOLDER", help="the folder that --cache-dir names")
        action.add_argument("--json", action="store_true", help="print one object in JSON")
        add_debug(action, default=argparse.SUPPRESS)
    return parser


def _add_plain_commands(commands: Any, environment: Mapping[str, str]) -> None:
    """Add the commands that have no sub-commands."""
    adders = {
        "generate": _add_generate,
        "chat": _add_chat,
        "run": _add_run,
        "serve": add_serve,
        "batch": _add_batch,
        "replay": _add_replay,
        "plan": _add_plan,
        "doctor": _add_doctor,
    }
    for name, adder in adders.items():
        text = COMMANDS[name]
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            usage=_USAGES[name],
            takes_foreign=name != "doctor",
            epilog=_EPILOG if name != "doctor" else None,
        )
        if name != "doctor":
            command.environment = environment
        adder(command)
        if name == "serve":
            _check_as_served(command)
        add_debug(command, default=argparse.SUPPRESS)


def _check_as_served(command: ConfiguredParser) -> None:
    command.check, command.refuses_misspelt = check_served, True


def _add_cluster(commands: Any, environment: Mapping[str, str]) -> None:
    cluster = commands.add_parser("cluster", help=COMMANDS["cluster"], commands=CLUSTER_ACTIONS)
    actions = cluster.add_subparsers(dest="action", metavar="ACTION", parser_class=ConfiguredParser)
    agent = actions.add_parser("agent", help=CLUSTER_ACTIONS["agent"])
    add_agent_arguments(agent)
    add_debug(agent, default=argparse.SUPPRESS)
    over_ray = actions.add_parser(
        "serve",
        help=CLUSTER_ACTIONS["serve"],
        usage=_USAGES["serve"],
        takes_foreign=True,
        epilog=_EPILOG,
    )
    over_ray.environment = environment
    add_serve(over_ray)
    over_ray.set_defaults(ray_address="auto")
    _check_as_served(over_ray)
    add_debug(over_ray, default=argparse.SUPPRESS)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to continue; - reads standard input"
    )
    parser.add_argument(
        "-p",
        "--prompt",
        dest="prompt",
        action="append",
        metavar="PROMPT",
        help="the same as PROMPT; may be repeated",
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    add_sampling(parser, max_tokens=DEFAULT_GENERATE_TOKENS)
    add_engine(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="ask this question only, then exit"
    )
    _add_talk(parser)


def _add_talk(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the commands `chat` and `run`."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--verbose",
        dest="stats",
        action="store_true",
        help="show tokens per second after each answer",
    )
    parser.add_argument(
        "--plain", action="store_true", help="print answers as they are, without Markdown's styles"
    )
    parser.add_argument("--url", metavar="URL", help=f"talk with a running server: {DEFAULT_URL}")
    parser.add_argument("--api-key", metavar="KEY", help="for the server (none)")
    add_sampling(parser, max_tokens=None)
    add_engine(parser)


def _add_model_commands(commands: Any) -> None:
    """Add the commands for the models on this machine, with the words of Ollama."""
    for name in ("pull", "list", "rm", "show", "ps"):
        command = commands.add_parser(name, help=COMMANDS[name])
        if name in ("pull", "rm", "show"):
            command.add_argument("model", metavar="MODEL", help=_NAMED_MODEL)
        if name in ("pull", "show"):
            command.add_argument("--revision", metavar="REVISION", help=_REVISION)
        if name == "ps":
            text = f"the server ({DEFAULT_URL})"
            command.add_argument("--url", metavar="URL", default=DEFAULT_URL, help=text)
            command.add_argument("--api-key", metavar="KEY", help="for the server (none)")
        add_debug(command, default=argparse.SUPPRESS)


def _add_top(commands: Any) -> None:
    command = commands.add_parser("top", help=COMMANDS["top"])
    text = f"the server ({DEFAULT_URL})"
    command.add_argument("--url", metavar="URL", default=DEFAULT_URL, help=text)
    command.add_argument(
        "--api-key", metavar="KEY", help="the operator's key, if the server wants keys (none)"
    )
    command.add_argument(
        "--model", metavar="NAME", help="which of the server's models to show (the first)"
    )
    command.add_argument(
        "--interval",
        type=seconds_between,
        metavar="S",
        default=0.5,
        help="seconds between two pictures, from 0.25 to 10 (0.5)",
    )
    command.add_argument("--once", action="store_true", help="print one picture, then exit")
    add_debug(command, default=argparse.SUPPRESS)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    add_model_by_place(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="ask this question only, then exit")
    add_model_flag(parser)
    _add_talk(parser)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        nargs="?",
        action=Once,
        metavar="FILE",
        help="calls, one JSON object a line: custom_id, method, url, body",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "-i", "--input-file", dest="input", action=Once, metavar="FILE", help="the same as FILE"
    )
    parser.add_argument(
        "-o",
        "--output-file",
        dest="output",
        metavar="ANSWERS",
        help="file for the answers, one a line (FILE's name with _output.jsonl at its end); calls"
        " that an earlier run answered there are not made again",
    )
    parser.add_argument(
        "--max-open-calls",
        type=positive,
        metavar="N",
        help="calls under way at once (twice --max-num-seqs)",
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    add_engine(parser, beside=ServerConfig)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a recording of `quire serve --record`, or a trace in Mooncake's or Azure's format",
    )
    add_model_by_place(parser)
    # How the recorded load is changed and replayed.
    group = parser.add_argument_group("replay", "Without --url: a simulated engine of MODEL.")
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="replay X times as fast (%(default)g)"
    )
    group.add_argument(
        "--first", type=positive, metavar="N", help="only the first requests (all of them)"
    )
    group.add_argument(
        "--copies",
        type=positive,
        default=1,
        metavar="N",
        help="replay the load of N times as many users, who share no prefixes (%(default)s)",
    )
    group.add_argument(
        "--open-loop",
        action="store_true",
        help="send later turns at their recorded times, even if the previous answer has not ended",
    )
    group.add_argument(
        "--measure",
        action="store_true",
        help="first load MODEL and measure the times of its steps; the results are kept",
    )
    group.add_argument(
        "--costs",
        default=DEFAULT_COSTS,
        metavar="FILE",
        help="file with the measured times (%(default)s)",
    )
    group.add_argument("--json", action="store_true", help="print one object in JSON")
    # Conversion to another format, instead of a replay.
    group.add_argument(
        "--convert",
        choices=("mooncake", "azure"),
        metavar="FORMAT",
        help="write the trace in this format (%(choices)s), and do nothing else",
    )
    group.add_argument(
        "-o", "--output", metavar="NEW", help="with --convert: the file, which must be new"
    )
    # The server that answers, instead of a simulation.
    server = parser.add_argument_group("server")
    server.add_argument("--url", metavar="URL", help="a running server, as http://127.0.0.1:8000")
    server.add_argument("--api-key", metavar="KEY", help="for the server (none)")
    server.add_argument(
        "--served-model-name", metavar="NAME", help="the model to ask for (the server's first)"
    )
    server.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="token ids of prompts are below N (a quire server reports its own)",
    )
    add_model_flag(group)
    add_engine(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_model_by_place(parser)
    add_model_flag(parser)
    # The load, the objectives, and how the answer is priced.
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--load",
        metavar="LOAD",
        help="a trace's file, or lengths such as prompt=1024,output=128,rate=4, with at_once in"
        " place of a rate; also requests=N and shared=N",
    )
    group.add_argument(
        "--slo",
        metavar="TIMES",
        help="bounds on 99th percentiles, such as ttft=500ms,itl=50ms (none)",
    )
    group.add_argument(
        "--price", type=float, metavar="P", help="price of a replica per hour; prints costs as well"
    )
    group.add_argument(
        "--replicas",
        type=positive,
        metavar="N",
        help="engines that share the load (as many as needed)",
    )
    # How step times are measured, and where they are stored.
    group.add_argument(
        "--measure",
        nargs="?",
        const="own",
        metavar="PRECISION",
        help="first load the model, in its own precision or in PRECISION from the table, and"
        " measure the times of its steps; the results are kept",
    )
    group.add_argument(
        "--measure-time",
        type=float,
        default=DEFAULT_MEASURE_S,
        metavar="S",
        help="seconds that --measure takes, without loading (%(default)g)",
    )
    group.add_argument(
        "--costs",
        default=DEFAULT_COSTS,
        metavar="FILE",
        help="file with the measured times (%(default)s)",
    )
    group.add_argument("--json", action="store_true", help="print one object in JSON")
    add_engine(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder or a hub id: report its properties, whether and how it is served here, and"
        " its memory and speed; none of its weights are fetched",
    )
    parser.add_argument("--revision", metavar="REVISION", help=_REVISION)
    parser.add_argument(
        "--tokens",
        type=positive,
        default=DEFAULT_DOCTOR_TOKENS,
        metavar="N",
        help="size MODEL's KV cache for a sequence of N tokens (%(default)s)",
    )
    parser.add_argument(
        "--quality-file",
        default=DEFAULT_QUALITY_FILE,
        metavar="FILE",
        help="the file of `quire bench perplexity` with the quality cost of MODEL's formats"
        " (%(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="check whether this port is free (%(default)s)",
    )
    parser.add_argument(
        "--measure",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the memory bandwidth, in a third of a second",
    )
