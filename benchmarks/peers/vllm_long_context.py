"""vLLM over long contexts; it computes the prompts, which takes minutes and is not timed.

    PYTHONPATH=src VENV/bin/python benchmarks/peers/vllm_long_context.py --model FOLDER --out ...

While the last prompts are computed, the first sequences decode already: their contexts are longer
by up to one token for each step of prefill, below 1% of a context of 8,192.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import driver
import long_context
from long_context import Case

MAX_BATCHED_TOKENS = 2048


class VLLM:
    """An engine in this process. Invariant: between start and end, all requests decode."""

    name = "vLLM"

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        import vllm  # reads its environment variables when imported

        self.version = str(vllm.__version__)
        self._vllm: Any = vllm
        longest = long_context.most_tokens(args)
        self._engine: Any = vllm.LLM(
            model=str(folder),
            dtype=args.dtype,
            max_model_len=longest,
            max_num_seqs=max(case.num_seqs for case in args.cases),
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        ).llm_engine
        self._num_started = 0
        self._counts: dict[str, int] = {}

    def start(self, case: Case, num_steps: int) -> None:
        """See `long_context.DecodingEngine`."""
        num_prefill_steps = case.num_seqs * (-(-case.context // MAX_BATCHED_TOKENS) + 1)
        num_tokens = num_steps + num_prefill_steps
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        for index in range(case.num_seqs):
            self._num_started += 1
            prompt = {"prompt_token_ids": long_context.draw_prompt(case, index)}
            self._counts[str(self._num_started)] = 0
            self._engine.add_request(str(self._num_started), prompt, params)
        while not all(self._counts.values()):
            self.step()

    def step(self) -> int:
        """See `long_context.DecodingEngine`. The engine may return a step's tokens one later."""
        num_tokens = 0
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            num_tokens += count - self._counts[output.request_id]
            self._counts[output.request_id] = count
        return num_tokens

    def end(self) -> None:
        """See `long_context.DecodingEngine`."""
        self._engine.abort_request(list(self._counts))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._counts.clear()


def main(argv: list[str] | None = None) -> None:
    parser = long_context.make_parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--kv-gib", type=int, default=3)
    args = parser.parse_args(argv)
    driver.hold_threads(args.threads)
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "auto",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)
    with long_context.raised_model(args.model, long_context.most_tokens(args)) as folder:
        long_context.measure(VLLM(folder, args), args)


if __name__ == "__main__":
    main()
