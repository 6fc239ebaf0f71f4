"""OpenVINO GenAI's ContinuousBatchingPipeline on a CPU; see `driver.py`.

    PYTHONPATH=src VENV/bin/python benchmarks/peers/openvino_offline.py --model FOLDER \\
        --workload requests.json --out result.json --label bf16

The folder is in OpenVINO's form: `optimum-cli export openvino` makes it.
"""

import argparse
import time
from typing import Any

import driver
import numpy as np

PRECISIONS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def make_parser() -> argparse.ArgumentParser:
    """The drivers' options and the engine's."""
    parser = driver.make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--kv-gib", type=int, default=3, help="size of the KV cache")
    parser.add_argument("--kv-dtype", help="f32, f16, bf16 or u8; without it the plugin's own")
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    return parser


class OpenVINO:
    """A pipeline in this process. Invariant: no request is under way between two calls."""

    name = "OpenVINO GenAI"

    def __init__(self, args: argparse.Namespace) -> None:
        import openvino  # after the number of threads is fixed
        import openvino_genai

        self.version = str(openvino_genai.__version__)
        self._openvino: Any = openvino
        self._genai: Any = openvino_genai
        self._num_started = 0
        self._kv_dtype = args.kv_dtype or "default"
        properties = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[args.dtype],
            "INFERENCE_NUM_THREADS": args.threads,
        }
        if args.kv_dtype:
            properties["KV_CACHE_PRECISION"] = args.kv_dtype
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = args.kv_gib
        scheduler.max_num_seqs = args.max_batch
        scheduler.max_num_batched_tokens = args.max_batched_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        started_s = time.perf_counter()
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            args.model, scheduler, "CPU", properties
        )
        self._load_s = time.perf_counter() - started_s

    def generate_one(self, prompt: list[int], num_new_tokens: int) -> driver.Latency:
        """See `driver.Engine`."""
        started_s = time.perf_counter()
        num_tokens, first_s = self._run([self._add(prompt, num_new_tokens)])
        total_s = time.perf_counter() - started_s
        assert num_tokens == num_new_tokens, (num_tokens, num_new_tokens)
        return driver.Latency(first_s - started_s, total_s)

    def run_workload(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        """See `driver.Engine`."""
        pairs = zip(prompts, output_lens, strict=True)
        return self._run([self._add(prompt, length) for prompt, length in pairs])[0]

    def details(self) -> dict[str, Any]:
        """See `driver.Engine`."""
        return {"load_s": round(self._load_s, 2), "kv_dtype": self._kv_dtype}

    def _add(self, prompt: list[int], num_new_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_new_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._num_started += 1
        ids = self._openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(self._num_started, ids, config)

    def _run(self, handles: list[Any]) -> tuple[int, float]:
        """All tokens of these requests, and when the first of them came."""
        num_tokens, first_s = 0, 0.0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            num_tokens += sum(_read(handle) for handle in handles)
            if num_tokens and not first_s:
                first_s = time.perf_counter()
        return num_tokens + sum(_read(handle) for handle in handles), first_s


def _read(handle: Any) -> int:
    """Takes what a request has brought since the last look; how many tokens."""
    num_tokens = 0
    while handle.can_read():
        num_tokens += sum(len(output.generated_ids) for output in handle.read().values())
    return num_tokens


def main(argv: list[str] | None = None) -> None:
    args = driver.parse_args(make_parser(), argv)
    driver.hold_threads(args.threads)
    driver.Measurement(args, OpenVINO(args)).run()


if __name__ == "__main__":
    main()
