"""transformers' own model, which in fp32 is what the others are compared with; see `reading.py`.

    python benchmarks/quality/transformers_logits.py --model FOLDER --dtype float32 \\
        --write-exact --windows windows.json --exact exact.npy --out result.json
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import reading


class TransformersLogits:
    """A model in this process."""

    name = "transformers"

    def __init__(self, args: argparse.Namespace) -> None:
        import torch  # after the number of threads is fixed
        import transformers

        self.version = transformers.__version__
        self._torch = torch
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype)
        ).eval()
        self.weight_bytes: int | None = sum(each.nbytes for each in self._model.parameters())

    def logits(self, window: Sequence[int], first: int) -> np.ndarray[Any, Any]:
        """See `reading.LogitsReader`."""
        with self._torch.inference_mode():
            found = self._model(self._torch.tensor([list(window)])).logits[0, first:]
        rows: np.ndarray[Any, Any] = found.float().numpy()
        return rows


def main(argv: list[str] | None = None) -> None:
    args = reading.make_parser((__doc__ or "").partition("\n")[0]).parse_args(argv)
    reading.hold_threads(args.threads)
    reading.measure(TransformersLogits(args), args)


if __name__ == "__main__":
    main()
