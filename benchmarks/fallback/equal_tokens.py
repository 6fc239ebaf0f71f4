"""Which classes of transformers give the same tokens on quire's memory as by themselves.

    python -m benchmarks.fallback.equal_tokens
    python -m benchmarks.fallback.equal_tokens --only mixtral gpt2

Goes over all model types for which transformers has a class that predicts the next token. Of each
it makes a tiny random model in float32, generates `--num-tokens` of three prompts greedily, by
transformers' own `generate` and by quire with `model_impl="transformers"` (prompts in chunks of 16
tokens, three sequences a step), and prints a line:

    equal      all tokens are the same
    refused    quire says why it doesn't run the class
    not made   transformers itself fails with such a tiny model
    DIFFERS    how many tokens of each prompt are the same

Those that can't pass their attention through transformers' interface, or carry a state, are left
out unless `--all` or `--only` asks for them: quire refuses them by their flags.
"""

import argparse
import logging
import tempfile
from collections import Counter
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.fallback.tiny_models import PROMPTS, class_of, generated, make_tiny
from quire import LLM, SamplingParams
from quire.errors import QuireError


def main() -> None:
    """Print the table, and how many lines of each kind it has."""
    args = parse_arguments()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, {args.num_tokens} tokens")
    counts: Counter[str] = Counter()
    for model_type in args.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = class_of(model_type)
        could_run = kind._supports_attention_backend and not getattr(kind, "_is_stateful", False)
        if not (could_run or args.all or args.only):
            counts["left out"] += 1
            continue
        verdict, reason = compare(model_type, args.num_tokens)
        counts[verdict] += 1
        print(f"{model_type:26} {kind.__name__:40} {verdict:9} {reason}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


def parse_arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="model types, as config.json has them")
    parser.add_argument("--all", action="store_true", help="those that the flags rule out, too")
    parser.add_argument("--num-tokens", type=int, default=32)
    return parser.parse_args()


def compare(model_type: str, num_tokens: int) -> tuple[str, str]:
    """(verdict, reason) of one class."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            wanted = generated(make_tiny(model_type, Path(folder)), num_tokens)
        except Exception as error:  # whatever a class of transformers raises
            return "not made", _one_line(error)
        try:
            found = quire_tokens(folder, num_tokens)
        except QuireError as error:
            return "refused", _one_line(error)
    if found == wanted:
        return "equal", ""
    same = [sum(map(int.__eq__, *pair)) for pair in zip(found, wanted, strict=True)]
    return "DIFFERS", f"{same} of {num_tokens} are the same"


def quire_tokens(folder: str, num_tokens: int, **options: object) -> list[list[int]]:
    """Each prompt's tokens by quire."""
    settings = {
        "model_impl": "transformers",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "kv_cache_memory": "8MiB",
        "max_model_len": 128,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
    llm = LLM(folder, **settings | options)
    wanted = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], wanted)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


if __name__ == "__main__":
    main()
