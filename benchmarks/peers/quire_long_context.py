"""quire over long contexts whose K and V are random numbers: no prompt is computed.

    python benchmarks/peers/quire_long_context.py --model FOLDER --out result.json

The engine's own runner executes plans as from the scheduler, which has no part in what is
measured: a step's plan is the same whatever the context. A sequence's blocks lie anywhere in the
cache. Its memory is committed when it is written, so a case has what its contexts take, no more.
"""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import driver
import long_context
import numpy as np
from long_context import Case

if TYPE_CHECKING:
    from quire.runtime.model_runner import ModelRunner

BLOCK_SIZE = 16
SEED = 904


class QuireRunner:
    """The runner of an engine. Invariant: between start and end, rows 0 .. num_seqs - 1 live."""

    name = "quire"
    version = version("quire")

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        import torch  # after the number of threads is fixed

        from quire import LLM

        longest = long_context.most_tokens(args)
        self._num_blocks = max(case.num_seqs * _num_blocks(longest) for case in args.cases)
        options: dict[str, Any] = {
            "model": str(folder),
            "dtype": args.dtype,
            "max_model_len": longest,
            "max_num_seqs": max(case.num_seqs for case in args.cases),
            "num_blocks": self._num_blocks,
            "block_size": BLOCK_SIZE,
            "num_threads": args.threads,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
        }
        given = {name: getattr(args, name) for name in ("quantization", "kernels")}
        options |= {name: value for name, value in given.items() if value is not None}
        # An offline engine has no public way to begin in the middle of a sequence.
        self._runner = cast("ModelRunner", LLM(**options).engine._runner)
        storage = self._runner._kv_cache.storage
        self._pages = storage.view(getattr(torch, args.dtype))
        self._num_seqs = self._num_steps = 0

    def start(self, case: Case, num_steps: int) -> None:
        """See `long_context.DecodingEngine`."""
        from quire.core.sampling_params import DecodingParams
        from quire.core.step import RowAdmission

        generator = np.random.default_rng(SEED)
        num_blocks = _num_blocks(case.context + num_steps + 1)
        # From the front of the storage, so that cases share the memory that is committed.
        blocks = generator.permutation(case.num_seqs * num_blocks).reshape(case.num_seqs, -1)
        self._fill(case.num_seqs * num_blocks)
        admit = tuple(
            RowAdmission(
                row=index,
                token_ids=[*long_context.draw_prompt(case, index), driver.LOW_TOKEN_ID],
                num_prompt_tokens=case.context,
                num_computed_tokens=case.context,
                block_tables=(tuple(blocks[index].tolist()),),
                params=DecodingParams(max_tokens=num_steps + 1, temperature=0.0),
            )
            for index in range(case.num_seqs)
        )
        self._num_seqs, self._num_steps = case.num_seqs, 0
        self._run(admit=admit)

    def step(self) -> int:
        """See `long_context.DecodingEngine`."""
        return self._run()

    def end(self) -> None:
        """See `long_context.DecodingEngine`."""
        self._runner.reset()

    def _run(self, **changes: Any) -> int:
        from quire.core.step import StepPlan

        plan = StepPlan(
            step_id=self._num_steps, num_rows=self._num_seqs, num_tokens=self._num_seqs, **changes
        )
        self._num_steps += 1
        self._runner.execute(plan)
        self._runner.sample()
        return len(self._runner.result().rows)

    def _fill(self, num_blocks: int) -> None:
        """Random K and V, as large as those of a normed layer."""
        for block in range(num_blocks):
            self._pages[block].normal_()


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def main(argv: list[str] | None = None) -> None:
    parser = long_context.make_parser((__doc__ or "").partition("\n")[0])
    for option in ("--quantization", "--kernels"):
        parser.add_argument(option, help="see EngineOptions in docs/python.md")
    args = parser.parse_args(argv)
    driver.hold_threads(args.threads)
    with long_context.raised_model(args.model, long_context.most_tokens(args)) as folder:
        long_context.measure(QuireRunner(folder, args), args)


if __name__ == "__main__":
    main()
