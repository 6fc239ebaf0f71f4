"""How well one engine predicts fixed tokens: the part that the quality drivers share.

    DRIVER --model M --windows windows.json --exact exact.npy --out result.json --label int8
        [--write-exact] [--threads 2] [--dtype bfloat16]

A window of token ids is read from nothing, as one prompt, and the tokens of its second half are
predicted. `--write-exact` makes this engine the reference: its log-probabilities become the file
exact.npy, [windows, positions, vocabulary] in fp32, and all others are compared with them. Knows no
engine; an engine's own environment needs numpy alone to import it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))

# Found through the line above, as are those of the drivers that import this module.
from driver import hold_threads

__all__ = ["LogitsReader", "hold_threads", "longest_window", "make_parser", "measure"]

# Rows of logits that are compared at a time, in fp64.
ROWS = 64


class LogitsReader(Protocol):
    """An engine that gives the logits of all positions of a prompt."""

    #: As in the tables of speed.
    name: str
    version: str
    #: Bytes of all weights as the engine holds or stores them; None where it does not say.
    weight_bytes: int | None

    def logits(self, window: Sequence[int], first: int) -> np.ndarray[Any, Any]:
        """[len(window) - first, vocabulary], of the positions from `first` on."""
        ...


@dataclass(slots=True)
class Quality:
    """One value for each predicted token, in the order of the windows.

    Divergences and agreements are empty for the reference itself.
    """

    #: Negative log-likelihoods, in nats.
    losses: list[float] = field(default_factory=list)

    #: Kullback-Leibler divergences of the engine's distributions from the exact ones, in nats.
    divergences: list[float] = field(default_factory=list)

    #: 1 where the likeliest token is the exact one, else 0.
    agreements: list[int] = field(default_factory=list)

    def add(
        self, found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any] | None, tokens: Sequence[int]
    ) -> None:
        """found, exact: log-probabilities [R, V] of the tokens [R]."""
        self.losses += [-float(found[row, token]) for row, token in enumerate(tokens)]
        if exact is not None:
            known = exact.astype(np.float64)
            self.divergences += (np.exp(known) * (known - found)).sum(1).tolist()
            self.agreements += (known.argmax(1) == found.argmax(1)).astype(int).tolist()


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that all quality drivers have."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--model", required=True, help="folder or file, in the engine's form")
    add("--windows", required=True, type=Path, help="windows of token ids, as JSON")
    add("--exact", required=True, type=Path, help="the reference's log-probabilities, as .npy")
    add("--write-exact", action="store_true", help="make --exact instead of comparing with it")
    add("--out", required=True, type=Path, help="the result file")
    add("--label", default="", help="precision or variant, copied into the result")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, default=2)
    return parser


def longest_window(args: argparse.Namespace) -> int:
    """In tokens, of the windows that will be read."""
    return max(len(window) for window in json.loads(args.windows.read_text()))


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The log-probabilities of each row, in fp64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted


def measure(reader: LogitsReader, args: argparse.Namespace) -> None:
    """Read all windows and write the result file; with `args.write_exact` the reference's, too."""
    windows = json.loads(args.windows.read_text())
    quality, exact = Quality(), None if args.write_exact else np.load(args.exact, mmap_mode="r")
    for index, window in enumerate(windows):
        # The logits of a position predict the token after it.
        first = len(window) // 2
        rows = reader.logits(window, first - 1)[:-1]
        if exact is None:
            shape = (len(windows), *rows.shape)
            exact = np.lib.format.open_memmap(args.exact, "w+", np.float32, shape)
        if exact.shape[1:] != rows.shape:
            raise ValueError(
                f"{args.exact} has {exact.shape[1:]} positions and tokens a window, but"
                f" {reader.name} gives {rows.shape}"
            )
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            found = log_softmax(rows[part])
            if args.write_exact:
                exact[index, part] = found
            known = None if args.write_exact else exact[index, part]
            quality.add(found, known, window[first:][part])
    result = {
        "peer": reader.name,
        "version": reader.version,
        "label": args.label,
        "weight_bytes": reader.weight_bytes,
        **asdict(quality),
    }
    args.out.write_text(json.dumps(result) + "\n")
