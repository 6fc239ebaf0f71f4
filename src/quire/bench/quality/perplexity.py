"""`quire bench perplexity`: measures the quality cost of smaller weight and KV cache formats.

Each combination of a model, a dtype, a weight format and a KV format reads the same windows of a
text. The combination's next-token distributions are compared with the reference's. The reference is
the first model in its own formats. The module loads without torch, so that `--help` is quick.
"""

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.attention.kv_registry import AUTO, KV_FORMATS
from quire.bench.quality.quality_file import DEFAULT_QUALITY_FILE, LEAST_TOKENS, store_quality
from quire.bench.quality.table import NONE, Table, as_data, model_name
from quire.bench.quality.windows import DEFAULT_WINDOW_TOKENS
from quire.errors import ConfigurationError
from quire.formats.format_registry import WEIGHT_FORMATS
from quire.observability.log import get_logger
from quire.plugins import add_plugin_flag
from quire.version import __version__

logger = get_logger(__name__)

_ENGINE_OPTIONS = ("kernels", "num_threads", "plugins")

NOT_ALL_MEASURED = 1
"""The exit code if a combination could not be measured on this machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    names = (NONE, *WEIGHT_FORMATS)
    # The description explains the columns of the table.
    parser.description = (
        "Measure what number formats cost a model in quality, on a text: one table with a row for"
        " each combination of --model, --dtype, --quantization and --kv-cache-dtype. The first row"
        " is the reference, the first model in its own formats. Each row has its perplexity, how"
        " much it changes (with its standard error), the mean and the 99th percentile of the"
        " Kullback-Leibler divergence of its next-token distributions from the reference's in nats,"
        " and how often both have the same likeliest token. Use a text that the model was not"
        " trained on. Memory holds one model at a time, and beside it the reference's head."
    )
    # The texts, and how they are cut.
    text = parser.add_argument_group("text")
    text.add_argument("text", nargs="+", metavar="FILE", help="UTF-8 texts to predict")
    text.add_argument(
        "--window-tokens",
        type=int,
        metavar="N",
        help="size of a window, which is read without earlier context; tokens in its second half"
        f" count ({DEFAULT_WINDOW_TOKENS}, or the model's context if it is shorter)",
    )
    text.add_argument(
        "--max-tokens", type=int, metavar="N", help="use only the first N tokens of each FILE"
    )
    # The combinations to measure.
    engine = parser.add_argument_group("engine", "Without a value: the engine's own default.")
    add_plugin_flag(engine)
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
        choices=tuple(KV_FORMATS),
        default=[AUTO],
        metavar="NAME",
        help=f"KV formats to measure, of {', '.join(KV_FORMATS)} ({AUTO}); one that this"
        " machine doesn't store is simulated",
    )
    # The files to write.
    output = parser.add_argument_group("output")
    output.add_argument("--output-json", metavar="FILE", help="write all figures, as JSON")
    output.add_argument(
        "--quality-file",
        default=DEFAULT_QUALITY_FILE,
        metavar="FILE",
        help="where the figures are kept for `quire doctor MODEL`, if at least"
        f" {LEAST_TOKENS} tokens count (%(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, and write the requested files. Returns the exit code.

    Raises ConfigurationError if the reference can't be measured.
    """
    texts = _read(args)
    # These modules import torch, which `--help` and a refusal don't need.
    from quire.assembly.model_kind import choose_kind
    from quire.bench.quality.measuring import Measuring, TextCut, combine
    from quire.options.engine_options import EngineOptions

    # First, list all combinations.
    models = list(dict.fromkeys(args.model or [None]))
    kinds = {model: choose_kind(EngineOptions.from_mapping({"model": model})) for model in models}
    quantized = frozenset(name for name, kind in kinds.items() if kind.config.quantized is not None)
    combinations = list(
        combine(
            models,
            args.dtype or [None],
            {model: _weight_formats(args, model in quantized) for model in models},
            args.kv_cache_dtype,
        )
    )
    # Then measure the reference.
    measuring = Measuring(
        texts, _engine_options(args), TextCut(args.window_tokens, args.max_tokens)
    )
    reference = combinations[0]
    found = {reference: measuring.read_reference(reference)}
    origin = {
        "reference": f"{model_name(reference.model)} in {found[reference].dtype}",
        "texts": ", ".join(Path(path).name for path in args.text),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "version": __version__,
    }
    num_counted = found[reference].quality.num_tokens
    print(
        f"{origin['reference']}, {measuring.kernels} kernels; {len(measuring.windows)} windows of"
        f" {measuring.window_tokens} tokens at most, {num_counted:,} tokens count\n"
    )
    # Then print a row of the table after the measurement of each combination.
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
    # Last, write the results. The reference's own result is not stored for `quire doctor`, since it
    # has no cost.
    results = [as_data(*each) for each in found.items()]
    _write(args, measuring.window_tokens, results)
    folders = [kinds[each.model].folder for each in found]
    _store_results(args, origin, list(zip(folders, results, strict=True))[1:])
    return 0 if len(found) == len(combinations) else NOT_ALL_MEASURED


def _weight_formats(args: argparse.Namespace, is_quantized: bool) -> list[str | None]:
    """The weight formats to measure for a model; None means the format of its files."""
    if is_quantized:
        return [None]
    by_itself = [NONE, *WEIGHT_FORMATS] if args.kv_cache_dtype == [AUTO] else [NONE]
    return [None if name == NONE else name for name in args.quantization or by_itself]


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {option: getattr(args, option) for option in _ENGINE_OPTIONS}
    return {option: value for option, value in options.items() if value is not None}


def _read(args: argparse.Namespace) -> list[str]:
    """Check the arguments that need no model, and read the texts."""
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


def _store_results(
    args: argparse.Namespace,
    origin: Mapping[str, str],
    results: Sequence[tuple[Path, Mapping[str, Any]]],
) -> None:
    """Store the results, each given with the folder of its model.

    If the file can't be written, this is only logged, since the results are already printed.
    """
    try:
        for folder, result in results:
            store_quality(Path(args.quality_file), folder, result, origin)
    except ConfigurationError as error:
        logger.warning("%s", error)


def _write(args: argparse.Namespace, window_tokens: int, results: list[dict[str, Any]]) -> None:
    if args.output_json is None:
        return
    data: Mapping[str, Any] = {
        "texts": args.text,
        "window_tokens": window_tokens,
        "results": results,
    }
    Path(args.output_json).write_text(json.dumps(data, indent=1) + "\n")
