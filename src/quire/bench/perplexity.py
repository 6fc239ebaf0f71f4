"""`quire bench perplexity`: the quality that quantization costs, on a given text.

The text's tokens are cut into windows, each of which the engine reads by itself; a token counts if
another one of its window precedes it. Loads without torch, so that `--help` is quick.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError
from quire.formats.registry import weight_format_names

if TYPE_CHECKING:
    from quire.offline.llm import LLM

NONE = "none"
DEFAULT_WINDOW_TOKENS = 512

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
        raise ConfigurationError("the text has less than two tokens: there is nothing to predict")
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
        " smaller weights. Use a text that the model was not trained on."
    )
    text = parser.add_argument_group("text")
    text.add_argument("text", metavar="FILE", help="UTF-8 text to predict")
    text.add_argument(
        "--window-tokens",
        type=int,
        metavar="N",
        default=DEFAULT_WINDOW_TOKENS,
        help=f"tokens that are read together, from nothing ({DEFAULT_WINDOW_TOKENS})",
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
        default=list(names),
        metavar="NAME",
        help=f"which to measure, compared with the first ({' '.join(names)})",
    )
    parser.add_argument_group("output").add_argument(
        "--output-json", metavar="FILE", help="write all figures, as JSON"
    )


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, write the file that was asked for. Returns the exit code.

    Raises ConfigurationError and InvalidRequestError for what can't be measured as asked.
    """
    text = _read(args)
    found: dict[str, Perplexity] = {}
    for name in dict.fromkeys(args.quantization):
        found[name] = _measure_quantized(args, name, text)
        print(_line(name, found), flush=True)
    if args.output_json is not None:
        _write(args, found)
    return 0


def _measure_quantized(args: argparse.Namespace, name: str, text: str) -> Perplexity:
    """With one model in memory, which is gone when this returns."""
    from quire.offline.llm import LLM  # brings torch, which `--help` and a refusal do without

    options = {option: getattr(args, option) for option in _ENGINE_OPTIONS}
    given = {option: value for option, value in options.items() if value is not None}
    llm = LLM(**given, quantization=None if name == NONE else name, disable_log_stats=True)
    token_ids = llm.get_tokenizer().encode(text)[: args.max_tokens]
    return measure(llm, cut(token_ids, args.window_tokens))


def _read(args: argparse.Namespace) -> str:
    """The text, once all that can be refused without a model has been."""
    least = {"window_tokens": (args.window_tokens, 2), "max_tokens": (args.max_tokens, 2)}
    for name, (value, low) in least.items():
        if value is not None and value < low:
            raise ConfigurationError(f"{name} is {value}, but must be at least {low}")
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


def _write(args: argparse.Namespace, found: dict[str, Perplexity]) -> None:
    results: dict[str, Any] = {
        "model_id": args.model or "embedded model",
        "window_tokens": args.window_tokens,
        "results": {
            name: {**asdict(result), "perplexity": result.perplexity}
            for name, result in found.items()
        },
    }
    Path(args.output_json).write_text(json.dumps(results, indent=1) + "\n")
