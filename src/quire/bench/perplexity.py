"""`quire bench perplexity`: what smaller weights or a compact KV cache cost in quality.

The text's tokens are cut into windows, each of which the engine reads by itself; a token counts if
another one of its window precedes it. Weight formats are compared by perplexity alone, KV formats
by their whole distributions (`kv_quality.py`). Loads without torch, so that `--help` is quick.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError
from quire.formats.registry import weight_format_names

if TYPE_CHECKING:
    from quire.bench.kv_quality import KVQuality
    from quire.offline.llm import LLM

NONE = "none"
DEFAULT_WINDOW_TOKENS = 512
AUTO = "auto"
KV_FORMATS = ("int8", "fp8", "int4")

NOTHING_TO_PREDICT = "the text has less than two tokens: there is nothing to predict"

_ENGINE_OPTIONS = ("model", "dtype", "kernels", "num_threads")


@dataclass(frozen=True, slots=True)
class Perplexity:
    """num_tokens: that were predicted. loss: their mean negative log-likelihood, in nats."""

    num_tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def measure(llm: "LLM", windows: Sequence[Sequence[int]]) -> Perplexity:
    """The model's perplexity on windows of token ids; those of less than two tokens count nothing.

    Raises ConfigurationError where no window has two, and InvalidRequestError for one that is
    longer than the model's length.
    """
    prompts = [{"prompt_token_ids": list(window)} for window in windows if len(window) > 1]
    if not prompts:
        raise ConfigurationError(NOTHING_TO_PREDICT)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    total, num_tokens = 0.0, 0
    for output in llm.generate(prompts, params):
        assert output.prompt_logprobs is not None
        following = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        for token_id, found in following:
            if found is not None:  # the first token has no prediction
                total -= found[token_id].logprob
                num_tokens += 1
    return Perplexity(num_tokens, total / num_tokens)


def cut(token_ids: Sequence[int], window_tokens: int) -> list[Sequence[int]]:
    """Windows of so many tokens, one after the other; the last may be shorter."""
    starts = range(0, len(token_ids), window_tokens)
    return [token_ids[start : start + window_tokens] for start in starts]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    names = (NONE, *weight_format_names())
    parser.description = (
        "Measure a model's perplexity on a text, without quantization and with: the price of"
        " smaller weights. With --kv-cache-dtype, the price of a compact KV cache: perplexity, the"
        " mean divergence of next-token distributions from those with K and V in the model's dtype,"
        " and how often the likeliest token is the same. Use a text that the model was not trained"
        " on."
    )
    text = parser.add_argument_group("text")
    text.add_argument("text", metavar="FILE", help="UTF-8 text to predict")
    text.add_argument(
        "--window-tokens",
        type=int,
        metavar="N",
        help=f"tokens that are read together, from nothing ({DEFAULT_WINDOW_TOKENS}; of KV formats"
        " the model's full context)",
    )
    text.add_argument("--max-tokens", type=int, metavar="N", help="use only the first N tokens")
    engine = parser.add_argument_group("engine", "Without a value: the engine's own default.")
    engine.add_argument("--model", metavar="MODEL", help="local folder or hub id (embedded model)")
    engine.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    engine.add_argument("--kernels", metavar="NAME", help="as for the other commands")
    engine.add_argument("--num-threads", type=int, metavar="N", help="threads that compute")
    engine.add_argument(
        "--quantization",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"which to measure, compared with the first ({' '.join(names)})",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=(AUTO, *KV_FORMATS),
        metavar="NAME",
        help=f"KV formats to compare with {AUTO}, of {', '.join(KV_FORMATS)}; one that this machine"
        " doesn't store is simulated. Then at most one --quantization, by itself none",
    )
    parser.add_argument_group("output").add_argument(
        "--output-json", metavar="FILE", help="write all figures, as JSON"
    )


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, write the file that was asked for. Returns the exit code.

    Raises ConfigurationError and InvalidRequestError for what can't be measured as asked.
    """
    text = _read(args)
    if args.kv_cache_dtype is not None:
        _write(args, _measure_kv_formats(args, text))
        return 0
    found: dict[str, Perplexity] = {}
    for name in dict.fromkeys(args.quantization or (NONE, *weight_format_names())):
        found[name] = _measure_quantized(args, name, text)
        print(_line(name, found), flush=True)
    _write(args, found)
    return 0


def _measure_quantized(args: argparse.Namespace, name: str, text: str) -> Perplexity:
    """With one model in memory, which is gone when this returns."""
    from quire.offline.llm import LLM  # brings torch, which `--help` and a refusal do without

    llm = LLM(**_options(args, name), disable_log_stats=True)
    token_ids = llm.get_tokenizer().encode(text)[: args.max_tokens]
    return measure(llm, cut(token_ids, args.window_tokens or DEFAULT_WINDOW_TOKENS))


def _measure_kv_formats(args: argparse.Namespace, text: str) -> dict[str, "KVQuality"]:
    """Prints a line of each. One model is in memory at a time."""
    # Brings torch, which `--help` and a refusal do without.
    from quire.bench.kv_quality import EngineReader, compare, open_reader

    options = _options(args, (args.quantization or [NONE])[0])
    exact_reader = EngineReader(options)
    token_ids = exact_reader.encode(text)[: args.max_tokens]
    window_tokens = args.window_tokens or exact_reader.max_window
    args.window_tokens = window_tokens
    windows = [window for window in cut(token_ids, window_tokens) if len(window) > 1]
    if not windows:
        raise ConfigurationError(NOTHING_TO_PREDICT)
    exact = [exact_reader.hidden(window) for window in windows]
    found = {AUTO: compare(exact_reader, windows, exact)}
    del exact_reader
    print(_kv_line(AUTO, found), flush=True)
    for name in dict.fromkeys(args.kv_cache_dtype):
        if name == AUTO:
            continue
        found[name] = compare(open_reader(options, name), windows, exact)
        print(_kv_line(name, found), flush=True)
    return found


def _options(args: argparse.Namespace, quantization: str) -> dict[str, Any]:
    """Those of the engine that were given."""
    options = {option: getattr(args, option) for option in _ENGINE_OPTIONS}
    given = {option: value for option, value in options.items() if value is not None}
    return {**given, "quantization": None if quantization == NONE else quantization}


def _read(args: argparse.Namespace) -> str:
    """The text, once all that can be refused without a model has been."""
    least = {"window_tokens": (args.window_tokens, 2), "max_tokens": (args.max_tokens, 2)}
    for name, (value, low) in least.items():
        if value is not None and value < low:
            raise ConfigurationError(f"{name} is {value}, but must be at least {low}")
    if args.kv_cache_dtype is not None and len(args.quantization or ()) > 1:
        raise ConfigurationError(
            f"quantization is {' '.join(args.quantization)!r}, but with kv_cache_dtype one weight"
            " format is measured at a time; name one"
        )
    if args.output_json is not None and not Path(args.output_json).parent.is_dir():
        raise ConfigurationError(
            f"output_json is {args.output_json!r}, but there is no such folder; make it first"
        )
    try:
        text = Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"text is {args.text!r}, but must be a readable file of UTF-8 text ({error})"
        ) from error
    if not text:
        raise ConfigurationError(f"text is {args.text!r}, but that file is empty")
    return text


def _line(name: str, found: dict[str, Perplexity]) -> str:
    result, first = found[name], next(iter(found.values()))
    change = (
        f"{100 * (result.perplexity / first.perplexity - 1):+.2f} %" if result is not first else ""
    )
    return f"{name:6} perplexity {result.perplexity:10.4f}  {change:9} ({result.num_tokens} tokens)"


def _kv_line(name: str, found: "dict[str, KVQuality]") -> str:
    result, first = found[name], found[AUTO]
    line = f"{name:6} perplexity {result.perplexity:10.4f}"
    if result is not first:
        change = 100 * (result.perplexity / first.perplexity - 1)
        line += f"  {change:+.3f} %  mean KLD {result.divergence:.6f}"
        line += f" (last quarter {result.deep_divergence:.6f})"
        line += f"  top-1 {100 * result.agreement:.2f} %"
    note = ", simulated" if result.is_simulated else ""
    return f"{line}  {result.token_bytes} bytes a token ({result.num_tokens} tokens{note})"


def _write(args: argparse.Namespace, found: "Mapping[str, Perplexity | KVQuality]") -> None:
    if args.output_json is None:
        return
    results: dict[str, Any] = {
        "model_id": args.model or "embedded model",
        "window_tokens": args.window_tokens or DEFAULT_WINDOW_TOKENS,
        "results": {
            name: {**asdict(result), "perplexity": result.perplexity}
            for name, result in found.items()
        },
    }
    Path(args.output_json).write_text(json.dumps(results, indent=1) + "\n")
