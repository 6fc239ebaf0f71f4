"""Measures the cost of multiplying codes of other tools' formats, on SmolLM2's real weights.

    ./scripts/models
    python -m benchmarks.quality.block_quantized [--windows 8] [--context 256] [ROW ...]

Writes the model in each format, its weights rounded to the nearest, and reads held-out text (Python
and short answers in English) twice: with the codes as they are served, whose products round
activations, and with the same codes as numbers in float32. Prints the perplexity of the tokens that
have at least --context tokens of their window before them, the mean divergence from the numbers'
distributions, and how often the likeliest token is the same. The last rows are bf16 and int8 K and
V, beside the model in float32. A row that is no format's name is the path of a file or folder with
that model, which is read as it is.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.quantized_copies import copies
from tests.real_weights import MODELS

from benchmarks.quality import heldout
from quire.bench.quality.comparison import Quality, Reference, compare
from quire.bench.quality.readers import EngineReader
from quire.bench.quality.windows import Window, cut
from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods
from quire.text.tokenizer import Tokenizer

PLAIN_ROWS = {"bf16": {"dtype": "bfloat16"}, "int8 K and V": {"kv_cache_dtype": "int8"}}


def windows(model: Path, count: int, window_tokens: int) -> list[Window]:
    """Whole windows of the held-out texts, in turn, with the model's tokenizer."""
    tokenizer = Tokenizer.from_folder(model)
    texts = heldout.texts(4 * count * window_tokens).values()
    found = [list(cut(tokenizer.encode(text), window_tokens))[:-1] for text in texts]
    places = [(index, text) for index in range(count) for text in range(len(found))]
    return [found[text][index] for index, text in places if index < len(found[text])][:count]


def read(
    path: Path, given: Sequence[Window], *, as_numbers: bool = False, **options: Any
) -> Reference:
    """The windows read by the model at `path`. as_numbers: of weights that are codes, the numbers
    are multiplied."""
    numbers = mock.patch.object(BlockQuantizedMethods, "of", lambda *_: None)
    with numbers if as_numbers else nullcontext():
        length = max(len(window.token_ids) for window in given) + 1
        reader = EngineReader({"model": str(path), "max_model_len": length, **options})
    return Reference([reader.hidden(window) for window in given], reader.take_head())


def quality(given: Sequence[Window], exact: Reference, found: Reference) -> Quality:
    """exact, found: as `read` gives them of these windows."""
    return compare(given, found.hidden, found.logits, exact)


def said(found: Quality) -> str:
    """In one line."""
    return (
        f"{found.perplexity:8.3f}  {found.change:+.2%} (± {found.loss_change_error:.2%})"
        f"  KLD {found.divergence:.5f}  top-1 {found.agreement:.2%}"
    )


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-tokens", type=int, default=1024)
    parser.add_argument("--context", type=int, default=256, help="tokens that only precede others")
    parser.add_argument("--kernels", default="auto", help="as for the commands of quire")
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help="names or paths; without any, all names"
    )
    args = parser.parse_args()
    if not 0 < args.context < args.window_tokens:
        parser.error(f"--context is {args.context}, but must be from 1 to {args.window_tokens - 1}")
    smollm2 = MODELS / "smollm2-135m-instruct"
    cut_windows = windows(smollm2, args.windows, args.window_tokens)
    given = [replace(window, first=args.context) for window in cut_windows]
    options = {"dtype": "float32", "kernels": args.kernels}
    makers: dict[str, Callable[[Path], Path]] = copies(
        smollm2, MODELS / "smollm2-135m-instruct-q4_1.gguf"
    )
    names = args.rows or [*makers, *PLAIN_ROWS]
    for name in names:
        if name not in makers and name not in PLAIN_ROWS and not Path(name).exists():
            parser.error(f"there is no row {name!r}, and no such file or folder")
    for name in (name for name in names if name not in PLAIN_ROWS):
        with tempfile.TemporaryDirectory() as folder:
            path = makers[name](Path(folder, "copy")) if name in makers else Path(name)
            exact = read(path, given, as_numbers=True, **options)
            found = read(path, given, **options)
        print(f"{name:22}{said(quality(given, exact, found))}", flush=True)
    plain = [name for name in names if name in PLAIN_ROWS]
    if plain:
        exact = read(smollm2, given, **options)
    for name in plain:
        found = read(smollm2, given, **(options | PLAIN_ROWS[name]))
        print(f"{name:22}{said(quality(given, exact, found))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
