"""ONNX Runtime GenAI's Generator on a CPU: static batches, padded on the left; see `driver.py`.

    PYTHONPATH=src VENV/bin/python benchmarks/peers/onnxruntime_offline.py --model FOLDER \\
        --workload requests.json --out result.json --label int4

The folder is made by `python -m onnxruntime_genai.models.builder`. A batch runs until the longest
of its requests is done; only the tokens that were asked for are counted.
"""

import argparse
import json
import time
from typing import Any

import driver
import numpy as np


def make_parser() -> argparse.ArgumentParser:
    """The drivers' options and the engine's."""
    parser = driver.make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--static-batch", type=int, default=16, help="requests in one batch")
    return parser


class ONNXRuntime:
    """A model in this process."""

    name = "ONNX Runtime GenAI"

    def __init__(self, args: argparse.Namespace) -> None:
        import onnxruntime_genai  # after the number of threads is fixed

        self.version = str(onnxruntime_genai.__version__)
        self._genai: Any = onnxruntime_genai
        self._static_batch: int = args.static_batch
        started_s = time.perf_counter()
        config = onnxruntime_genai.Config(args.model)
        session = {"session_options": {"intra_op_num_threads": args.threads}}
        config.overlay(json.dumps({"model": {"decoder": session}}))
        self._model: Any = onnxruntime_genai.Model(config)
        self._load_s = time.perf_counter() - started_s

    def generate_one(self, prompt: list[int], num_new_tokens: int) -> driver.Latency:
        """See `driver.Engine`."""
        started_s = time.perf_counter()
        first_s = self._run([prompt], num_new_tokens)
        return driver.Latency(first_s, time.perf_counter() - started_s)

    def run_workload(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        """See `driver.Engine`."""
        for first in range(0, len(prompts), self._static_batch):
            batch = slice(first, first + self._static_batch)
            self._run(prompts[batch], max(output_lens[batch]))
        return sum(output_lens)

    def details(self) -> dict[str, Any]:
        """See `driver.Engine`."""
        return {"load_s": round(self._load_s, 2), "static_batch": self._static_batch}

    def _run(self, prompts: list[list[int]], num_new_tokens: int) -> float:
        """Continue each prompt by exactly num_new_tokens tokens. Returns the seconds to the
        first."""
        width = max(map(len, prompts))
        params = self._genai.GeneratorParams(self._model)
        length = width + num_new_tokens
        params.set_search_options(
            max_length=length, min_length=length, do_sample=False, batch_size=len(prompts)
        )
        generator = self._genai.Generator(self._model, params)
        started_s = time.perf_counter()
        padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        generator.append_tokens(np.array(padded, dtype=np.int32))
        generator.generate_next_token()
        first_s = time.perf_counter() - started_s
        num_tokens = 1
        while num_tokens < num_new_tokens and not generator.is_done():
            generator.generate_next_token()
            num_tokens += 1
        assert num_tokens == num_new_tokens, (num_tokens, num_new_tokens)
        return first_s


def main(argv: list[str] | None = None) -> None:
    args = driver.parse_args(make_parser(), argv)
    driver.hold_threads(args.threads)
    driver.Measurement(args, ONNXRuntime(args)).run()


if __name__ == "__main__":
    main()
