"""quire's offline engine (the LLM class), measured as its peers are; see `driver.py`.

    python benchmarks/peers/quire_offline.py --model FOLDER --workload requests.json \\
        --out result.json --label int8 --quantization int8
"""

import argparse
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import driver

if TYPE_CHECKING:
    from quire import SamplingParams

# Options of the engine that are passed on where they are given, and refused by the engine itself.
PASSED_ON = (
    ("--quantization", str),
    ("--kernels", str),
    ("--max-model-len", int),
    ("--max-num-batched-tokens", int),
    ("--block-size", int),
    ("--kv-cache-memory", str),
    ("--num-blocks", int),
)


def make_parser() -> argparse.ArgumentParser:
    """The drivers' options and the engine's."""
    parser = driver.make_parser((__doc__ or "").partition("\n")[0])
    for option, kind in PASSED_ON:
        parser.add_argument(option, type=kind, help="see EngineOptions in docs/python.md")
    return parser


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `LLM`: those that were given, and what the measurement fixes."""
    names = [option.removeprefix("--").replace("-", "_") for option, _ in PASSED_ON]
    given = {name: getattr(args, name) for name in names}
    return {
        "model": args.model,
        "dtype": args.dtype,
        "max_num_seqs": args.max_batch,
        "num_threads": args.threads,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        **{name: value for name, value in given.items() if value is not None},
    }


class QuireOffline:
    """An LLM in this process. Invariant: no request is under way between two calls."""

    name = "quire"
    version = version("quire")

    def __init__(self, options: dict[str, Any]) -> None:
        started_s = time.perf_counter()
        from quire import LLM  # after the number of threads is fixed: brings torch

        self._llm = LLM(**options)
        self._load_s = time.perf_counter() - started_s

    def generate_one(self, prompt: list[int], num_new_tokens: int) -> driver.Latency:
        """See `driver.Engine`."""
        started_s = time.perf_counter()
        with self._llm.start({"prompt_token_ids": prompt}, _exactly(num_new_tokens)) as generation:
            while not generation.output.token_ids:
                generation.step()
            first_s = time.perf_counter() - started_s
            generation.finish()
            total_s = time.perf_counter() - started_s
            num_tokens = len(generation.output.token_ids)
        assert num_tokens == num_new_tokens, (num_tokens, num_new_tokens)
        return driver.Latency(first_s, total_s)

    def run_workload(self, prompts: list[list[int]], output_lens: list[int]) -> int:
        """See `driver.Engine`."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [_exactly(length) for length in output_lens],
            use_tqdm=False,
        )
        found = [len(output.outputs[0].token_ids) for output in outputs]
        assert found == output_lens, (found, output_lens)
        return sum(found)

    def details(self) -> dict[str, Any]:
        """kv_bytes: of the whole KV cache, of which only what is used takes memory."""
        return {
            "load_s": round(self._load_s, 2),
            "kv_bytes": self._llm.memory_report().total_bytes,
        }


def _exactly(num_tokens: int) -> "SamplingParams":
    from quire import SamplingParams  # with LLM, after the number of threads is fixed

    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def main(argv: list[str] | None = None) -> None:
    args = driver.parse_args(make_parser(), argv)
    driver.hold_threads(args.threads)
    measurement = driver.Measurement(args, QuireOffline(engine_options(args)))
    measurement.run()


if __name__ == "__main__":
    main()
