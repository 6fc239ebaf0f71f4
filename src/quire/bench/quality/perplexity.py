"""`quire bench perplexity`: what smaller weights or a compact KV cache cost in quality.

Each combination of a model, a dtype, a weight format and a KV format reads the same windows of a
text, and its next-token distributions are compared with those of the first model as it is. Loads
without torch, so that `--help` is quick.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.bench.quality.table import NONE, Table, as_data, model_name
from quire.bench.quality.windows import DEFAULT_WINDOW_TOKENS
from quire.errors import ConfigurationError
from quire.formats.registry import weight_format_names

AUTO = "auto"
KV_FORMATS = ("int8", "fp8", "int4")
_ENGINE_OPTIONS = ("kernels", "num_threads")

NOT_ALL_MEASURED = 1
"""The exit code where a combination can't be had here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    names = (NONE, *weight_format_names())
    parser.description = (
        "Measure what number formats cost a model in quality, on a text: one table with a row for"
        " each combination of --model, --dtype, --quantization and --kv-cache-dtype. The first row"
        " is the reference, the first model in its own formats. Each row has its perplexity, how"
        " much it changes (with its standard error), the mean and the 99th percentile of the"
        " Kullback-Leibler divergence of its next-token distributions from the reference's in nats,"
        " and how often both have the same likeliest token. Use a text that the model was not"
        " trained on. Memory holds one model at a time, and beside it the reference's head."
    )
    text = parser.add_argument_group("text")
    text.add_argument("text", nargs="+", metavar="FILE", help="UTF-8 texts to predict")
    text.add_argument(
        "--window-tokens",
        type=int,
        metavar="N",
        help="tokens that are read together, from nothing; those with at least half a window"
        f" before them count ({DEFAULT_WINDOW_TOKENS}, or the model's context if it is shorter)",
    )
    text.add_argument(
        "--max-tokens", type=int, metavar="N", help="use only the first N tokens of each FILE"
    )
    engine = parser.add_argument_group("engine", "Without a value: the engine's own default.")
    engine.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help="local folder, GGUF file or hub id (embedded model); may be given several times, for"
        " models of one tokenizer, such as an original and files made of it",
    )
    engine.add_argument(
        "--dtype",
        action="append",
        help="auto, float32, bfloat16 or float16; may be given several times",
    )
    engine.add_argument("--kernels", metavar="NAME", help="as for the other commands")
    engine.add_argument("--num-threads", type=int, metavar="N", help="threads that compute")
    engine.add_argument(
        "--quantization",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"weight formats to measure ({' '.join(names)}; with --kv-cache-dtype {NONE}). A"
        " model whose weights are quantized already is measured as it is",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=(AUTO, *KV_FORMATS),
        default=[AUTO],
        metavar="NAME",
        help=f"KV formats to measure, of {', '.join((AUTO, *KV_FORMATS))} ({AUTO}); one that this"
        " machine doesn't store is simulated",
    )
    parser.add_argument_group("output").add_argument(
        "--output-json", metavar="FILE", help="write all figures, as JSON"
    )


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, write the file that was asked for. Returns the exit code.

    Raises ConfigurationError and its kinds where the reference can't be measured.
    """
    texts = _read(args)
    # These bring torch, which `--help` and a refusal do without.
    from quire.bench.quality.measuring import Measuring, TextCut, combine

    models = args.model or [None]
    quantized = frozenset(model for model in models if _is_quantized(model))
    combinations = list(
        combine(
            list(dict.fromkeys(models)),
            args.dtype or [None],
            {model: _weight_formats(args, model in quantized) for model in models},
            args.kv_cache_dtype,
        )
    )
    measuring = Measuring(
        texts, _engine_options(args), TextCut(args.window_tokens, args.max_tokens)
    )
    reference = combinations[0]
    found = {reference: measuring.read_reference(reference)}
    num_counted = found[reference].quality.num_tokens
    print(
        f"{model_name(reference.model)}, {found[reference].dtype}, {measuring.kernels} kernels;"
        f" {len(measuring.windows)} windows of {measuring.window_tokens} tokens at most,"
        f" {num_counted:,} tokens count\n"
    )
    table = Table(combinations, quantized)
    print(table.head())
    print(table.row(reference, found[reference], is_reference=True), flush=True)
    for combination in combinations[1:]:
        try:
            found[combination] = measuring.measure(combination)
        except ConfigurationError as error:
            print(table.refusal(combination, str(error)), flush=True)
            continue
        print(table.row(combination, found[combination], is_reference=False), flush=True)
    _write(args, measuring.window_tokens, [as_data(*each) for each in found.items()])
    return 0 if len(found) == len(combinations) else NOT_ALL_MEASURED


def _is_quantized(model: str | None) -> bool:
    from quire.assembly.model_kind import choose_kind  # brings torch, as above
    from quire.options.engine_options import EngineOptions

    return choose_kind(EngineOptions.from_mapping({"model": model})).config.quantized is not None


def _weight_formats(args: argparse.Namespace, is_quantized: bool) -> list[str | None]:
    """None: as the model's files have them."""
    if is_quantized:
        return [None]
    by_itself = [NONE, *weight_format_names()] if args.kv_cache_dtype == [AUTO] else [NONE]
    return [None if name == NONE else name for name in args.quantization or by_itself]


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {option: getattr(args, option) for option in _ENGINE_OPTIONS}
    return {option: value for option, value in options.items() if value is not None}


def _read(args: argparse.Namespace) -> list[str]:
    """The texts, once all that can be refused without a model has been."""
    least = {"window_tokens": (args.window_tokens, 2), "max_tokens": (args.max_tokens, 2)}
    for name, (value, low) in least.items():
        if value is not None and value < low:
            raise ConfigurationError(f"{name} is {value}, but must be at least {low}")
    if args.output_json is not None and not Path(args.output_json).parent.is_dir():
        raise ConfigurationError(
            f"output_json is {args.output_json!r}, but there is no such folder; make it first"
        )
    return [_read_text(path) for path in args.text]


def _read_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"text is {path!r}, but must be a readable file of UTF-8 text ({error})"
        ) from error
    if not text:
        raise ConfigurationError(f"text is {path!r}, but that file is empty")
    return text


def _write(args: argparse.Namespace, window_tokens: int, results: list[dict[str, Any]]) -> None:
    if args.output_json is None:
        return
    data: Mapping[str, Any] = {
        "texts": args.text,
        "window_tokens": window_tokens,
        "results": results,
    }
    Path(args.output_json).write_text(json.dumps(data, indent=1) + "\n")
