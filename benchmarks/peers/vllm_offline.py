"""vLLM's offline engine (its class LLM) on a CPU; see `driver.py`.

    PYTHONPATH=src VENV/bin/python benchmarks/peers/vllm_offline.py --model FOLDER \\
        --workload requests.json --out result.json --label bf16
"""

import argparse
import os
import time
from typing import Any

import driver

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def make_parser() -> argparse.ArgumentParser:
    """The drivers' options and the engine's."""
    parser = driver.make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--kv-gib", type=int, default=3, help="size of the KV cache")
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=4096)
    return parser


class VLLM:
    """An engine in this process. Invariant: no request is under way between two calls."""

    name = "vLLM"

    def __init__(self, args: argparse.Namespace) -> None:
        import vllm  # reads its environment variables when imported

        self.version = str(vllm.__version__)
        self._vllm: Any = vllm
        self._num_started = 0
        started_s = time.perf_counter()
        self._llm: Any = vllm.LLM(
            model=args.model,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_batch,
            max_num_batched_tokens=args.max_batched_tokens,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )
        self._load_s = time.perf_counter() - started_s

    def generate_one(self, prompt: list[int], num_new_tokens: int) -> driver.Latency:
        """See `driver.Engine`."""
        engine = self._llm.llm_engine
        self._num_started += 1
        started_s = time.perf_counter()
        engine.add_request(
            f"one-{self._num_started}",
            {"prompt_token_ids": prompt},
            self._exactly(num_new_tokens),
        )
        num_tokens, first_s = 0, 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                num_tokens = max(num_tokens, len(output.outputs[0].token_ids))
            if num_tokens and not first_s:
                first_s = time.perf_counter() - started_s
        assert num_tokens == num_new_tokens, (num_tokens, num_new_tokens)
        return driver.Latency(first_s, time.perf_counter() - started_s)

    def run_workload(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        """See `driver.Engine`."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self._exactly(length) for length in output_lens],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def details(self) -> dict[str, Any]:
        """See `driver.Engine`."""
        return {"load_s": round(self._load_s, 2)}

    def _exactly(self, num_tokens: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )


def main(argv: list[str] | None = None) -> None:
    args = driver.parse_args(make_parser(), argv)
    driver.hold_threads(args.threads)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(args.kv_gib))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    driver.Measurement(args, VLLM(args)).run()


if __name__ == "__main__":
    main()
