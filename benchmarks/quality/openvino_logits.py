"""OpenVINO's runtime on a model that OpenVINO GenAI serves; see `reading.py`.

    PYTHONPATH=src VENV/bin/python benchmarks/quality/openvino_logits.py --model FOLDER ...

GenAI gives no distributions of a prompt, so the same model is run without it, with the properties
of `peers/openvino_offline.py`: the plugin's own defaults for what is not named there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import reading
from openvino_offline import PRECISIONS


class OpenVINOLogits:
    """A compiled model in this process. Invariant: its KV cache is empty between two calls."""

    name = "OpenVINO"

    def __init__(self, args: argparse.Namespace) -> None:
        import openvino  # after the number of threads is fixed

        self.version = str(openvino.__version__)
        properties = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[args.dtype],
            "INFERENCE_NUM_THREADS": args.threads,
        }
        path = Path(args.model) / "openvino_model.xml"
        compiled: Any = openvino.Core().compile_model(str(path), "CPU", properties)
        self._request: Any = compiled.create_infer_request()
        self.weight_bytes: int | None = path.with_suffix(".bin").stat().st_size

    def logits(self, window: Sequence[int], first: int) -> np.ndarray[Any, Any]:
        """See `reading.LogitsReader`."""
        length = len(window)
        self._request.reset_state()
        self._request.infer(
            {
                "input_ids": np.array([window], dtype=np.int64),
                "attention_mask": np.ones((1, length), dtype=np.int64),
                "position_ids": np.arange(length, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )
        rows: np.ndarray[Any, Any] = self._request.get_tensor("logits").data[0, first:]
        return rows


def main(argv: list[str] | None = None) -> None:
    args = reading.make_parser((__doc__ or "").partition("\n")[0]).parse_args(argv)
    reading.hold_threads(args.threads)
    reading.measure(OpenVINOLogits(args), args)


if __name__ == "__main__":
    main()
