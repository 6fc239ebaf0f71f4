"""How fast a model is by transformers' class, beside quire's own model of the same checkpoint.

    python -m benchmarks.fallback.speed --model FOLDER --rounds 5

The folder's architecture must be one of quire's own. Two engines of one process take turns: one
stream, and `--batch` streams, of 128 prompt tokens and 64 new ones each, greedy, prefix cache off.
The best round of each counts; the ratio is transformers' over quire's own.
"""

import argparse
import random
import time
from collections.abc import Sequence

from quire import LLM, SamplingParams

NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 128, 64
IMPLEMENTATIONS = ("native", "transformers")


def main() -> None:
    """Print a line for each number of streams."""
    args = parse_arguments()
    engines = {
        name: LLM(
            args.model,
            model_impl=name,
            skip_tokenizer_init=True,
            quantization=args.quantization,
            kv_cache_memory="256MiB",
            max_model_len=1024,
            max_num_seqs=args.batch,
            enable_prefix_caching=False,
        )
        for name in IMPLEMENTATIONS
    }
    generator = random.Random(0)
    for num_streams in (1, args.batch):
        best = dict.fromkeys(engines, 0.0)
        for round_index in range(args.rounds):
            prompts = [
                [generator.randrange(5, 20000) for _ in range(NUM_PROMPT_TOKENS)]
                for _ in range(num_streams)
            ]
            for name in IMPLEMENTATIONS[:: 1 if round_index % 2 else -1]:
                best[name] = max(best[name], tokens_per_s(engines[name], prompts))
        ratio = best["transformers"] / best["native"]
        figures = ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in best.items())
        print(f"{num_streams} streams: {figures}, ratio {ratio:.2f}")


def parse_arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    return parser.parse_args()


def tokens_per_s(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """The rate of all streams together; the time includes the prompts."""
    wanted = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    start_s = time.perf_counter()
    llm.generate([{"prompt_token_ids": list(each)} for each in prompts], wanted, use_tqdm=False)
    return len(prompts) * NUM_NEW_TOKENS / (time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
