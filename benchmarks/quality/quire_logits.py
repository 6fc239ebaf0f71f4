"""quire, with the kernels and pages that serve; see `reading.py`.

    python benchmarks/quality/quire_logits.py --model FOLDER --windows windows.json \\
        --exact exact.npy --out result.json --label int8 --quantization int8
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import reading

# Options of the engine that are passed on where they are given, and refused by the engine itself.
PASSED_ON = ("quantization", "kernels", "kv_cache_dtype")


def make_parser() -> argparse.ArgumentParser:
    """The drivers' options and the engine's."""
    parser = reading.make_parser((__doc__ or "").partition("\n")[0])
    for name in PASSED_ON:
        parser.add_argument("--" + name.replace("_", "-"), help="see EngineOptions")
    return parser


class QuireLogits:
    """An engine in this process."""

    name = "quire"
    version = version("quire")

    def __init__(self, args: argparse.Namespace) -> None:
        from quire import LLM  # after the number of threads is fixed: brings torch

        given = {name: getattr(args, name) for name in PASSED_ON if getattr(args, name)}
        llm = LLM(
            model=args.model,
            dtype=args.dtype,
            num_threads=args.threads,
            max_num_seqs=1,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **given,
        )
        self._llm = llm
        self._runner: Any = llm.engine.kv_memory  # computes in this process
        self.weight_bytes: int | None = int(llm.engine.facts["weight_bytes"] or 0)

    def logits(self, window: Sequence[int], first: int) -> np.ndarray[Any, Any]:
        """See `reading.LogitsReader`."""
        import torch  # with LLM

        from quire import SamplingParams

        chunks: list[Any] = []
        self._runner.on_hidden = lambda hidden: chunks.append(hidden.clone())
        prompt = {"prompt_token_ids": list(window)}
        self._llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
        hidden = torch.cat(chunks)[first : len(window)]
        # Copied: the next call may overwrite them.
        rows = [self._runner.logits_of(part).numpy().copy() for part in hidden.split(reading.ROWS)]
        return np.concatenate(rows)


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    reading.hold_threads(args.threads)
    reading.measure(QuireLogits(args), args)


if __name__ == "__main__":
    main()
