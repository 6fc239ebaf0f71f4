"""The grammar of the command line: every flag, and what to say of one that doesn't exist.

Knows no engine and reads no environment; `cli` runs what is parsed here. Only light imports:
`quire --version` and `--help` come through this file.
"""

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

COMMANDS = {
    "generate": "continue a text",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model over HTTP with OpenAI's API",
    "bench": "measure throughput, memory or quality, against baselines too",
}

ENGINE_OPTIONS = (
    "tokenizer",
    "revision",
    "device",
    "dtype",
    "max_model_len",
    "block_size",
    "kv_cache_memory",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "scheduling_policy",
    "num_lookahead_blocks",
    "eviction",
    "kv_allocator",
    "max_itl_ratio",
    "quantization",
    "kernels",
    "num_threads",
)
"""Handed to the engine under these names, where given; the defaults are the engine's own."""

SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
"""Handed to SamplingParams under these names; None there means the model's default."""

DEFAULT_GENERATE_TOKENS = 128
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
SERVED_MAX_ITL_RATIO = 2.8


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and answers a mistake with the nearest name.

    commands: the names of its sub-commands, where it has some.
    """

    def __init__(self, *, commands: Iterable[str] = (), **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._commands = tuple(commands)

    def parse_known_args(  # type: ignore[override]  # the base has overloads for the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        if args is not None:
            self._refuse_unknown(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"quire: error: {message} (see '{self.prog} --help')\n")

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse the first unknown flag or command, before argparse complains of something else."""
        flags = list(self._option_string_actions)
        for word in words:
            if word == "--":
                return
            if self._commands and not word.startswith("-"):
                if word not in self._commands:
                    self.error(f"there is no command {word!r}{nearest(word, self._commands)}")
                return
            flag = word.partition("=")[0]
            if _looks_like_a_flag(flag) and flag not in flags:
                self.error(f"there is no option {flag}{nearest(flag, flags)}")
        if self._commands and not {"-h", "--help", "--version"} & set(words):
            self.error(f"name a command: {', '.join(self._commands)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name most like `word`, or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _looks_like_a_flag(word: str) -> bool:
    # As argparse has it: a lone dash, a negative number and a text with spaces are values.
    if not word.startswith("-") or word == "-" or " " in word:
        return False
    return re.fullmatch(r"-\d+|-\d*\.\d+", word) is None


def build_parser(add_bench_arguments: Mapping[str, Any] | None = None) -> Parser:
    """The whole grammar.

    add_bench_arguments: benchmark -> function that adds its arguments to a parser. They come from
        `quire.bench`, which is not loaded for other commands; None leaves `bench` empty.
    """
    parser = Parser(prog="quire", description=_DESCRIPTION, commands=COMMANDS)
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="with --version: what will compute here, too"
    )
    _add_debug(parser, default=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    adders = {"generate": _add_generate, "chat": _add_chat, "serve": _add_serve}
    for name, adder in adders.items():
        text = COMMANDS[name]
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        adder(command)
        _add_debug(command, default=argparse.SUPPRESS)
    benchmarks = add_bench_arguments or {}
    bench = commands.add_parser("bench", help=COMMANDS["bench"], commands=benchmarks)
    if benchmarks:
        kinds = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", parser_class=Parser)
        for name, add_arguments in benchmarks.items():
            kind = kinds.add_parser(name)
            add_arguments(kind)
            _add_debug(kind, default=argparse.SUPPRESS)
    return parser


_DESCRIPTION = "An inference engine for large language models."


def _add_debug(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="text to continue; - reads standard input"
    )
    _add_model(parser)
    _add_sampling(parser, max_tokens=DEFAULT_GENERATE_TOKENS)
    _add_engine(parser)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="ask this one question, then exit")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _add_model(parser)
    _add_sampling(parser, max_tokens=None)
    _add_engine(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (%(default)s)")
    group.add_argument("--port", type=int, default=DEFAULT_PORT, help="port (%(default)s)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (as MODEL)"
    )
    _add_engine(parser)
    group.add_argument("--seed", type=int, help="where the seeds of unseeded requests begin (0)")


_MODEL_HELP = "local folder or hub id in Hugging Face format (the embedded model)"


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help=_MODEL_HELP)


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling", "Without a value: the model's default.")
    limit = "as many as fit" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, metavar="N", default=max_tokens, help=f"at most so many ({limit})"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest, P in sum")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0: all")
    group.add_argument("--min-p", type=float, metavar="P", help="keep those P times the likeliest")
    group.add_argument("--seed", type=int, help="makes sampling reproducible")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--tokenizer", metavar="PATH", help="folder or hub id (as the model)")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the hub id")
    group.add_argument("--device", help="auto or cpu (auto)")
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (auto)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="tokens in one sequence")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens in a KV block (16)")
    group.add_argument("--kv-cache-memory", metavar="SIZE", help="memory for the KV cache, as 2GiB")
    group.add_argument("--num-blocks", type=int, metavar="N", help="KV blocks, instead of a size")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in one step")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens in one step")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share the KV blocks of equal prefixes (yes)",
    )
    group.add_argument(
        "--scheduling-policy",
        metavar="NAME",
        help="fcfs, priority, fair, longest_prefix or deadline (fcfs)",
    )
    group.add_argument(
        "--num-lookahead-blocks", type=int, metavar="N", help="KV blocks reserved ahead (1)"
    )
    group.add_argument(
        "--eviction", metavar="NAME", help="cached prefixes to forget first (hit_density), or lru"
    )
    group.add_argument(
        "--kv-allocator",
        metavar="NAME",
        help="paged, or contiguous_max, _pow2, _oracle to compare (paged)",
    )
    group.add_argument(
        "--max-itl-ratio",
        type=float,
        metavar="X",
        help="prompts make a step of running sequences at most X times as long; 0: no limit"
        f" (0; serve: {SERVED_MAX_ITL_RATIO})",
    )
    group.add_argument(
        "--quantization", metavar="NAME", help="int8 or int4: round weights while loading (none)"
    )
    group.add_argument(
        "--kernels", metavar="NAME", help="avx512_bf16, avx512, avx2, portable or torch (auto)"
    )
    group.add_argument("--num-threads", type=int, metavar="N", help="threads that compute")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the engine, `model` included, by the engine's own names."""
    names = ("model", *ENGINE_OPTIONS)
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the sampling, by SamplingParams' names."""
    return {name: getattr(args, name) for name in SAMPLING_OPTIONS}
