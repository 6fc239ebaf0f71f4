"""Prints the tokens that a model continues a text with, in several number formats.

    python -m tools.engine_tokens [--kernels NAME] [--max-tokens N] [MODEL ...]

Machines that compute alike print the same lines, but not for long texts: torch's cosines, from
which rotary embeddings are made, may differ in a last bit. MODEL is a folder or a GGUF file, whose
weights are used as they are; without one, the embedded model is run in each format. `tools.arm64
--engine` compares an emulated processor with this machine.
"""

import argparse
import sys
from typing import Any

from quire import LLM, SamplingParams

PROMPT = "import os\n\ndef "
#: In fp32, since instruction sets may round sums of bf16 products differently.
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}


def continued(kernels: str, max_tokens: int, **options: Any) -> str:
    """The ids of the likeliest tokens after PROMPT."""
    llm = LLM(kernels=kernels, max_model_len=128, max_num_seqs=2, **options)
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return " ".join(map(str, llm.generate([PROMPT], params)[0].outputs[0].token_ids))


def main() -> int:
    """The command line of this file."""
    parser = argparse.ArgumentParser(prog="python -m tools.engine_tokens", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--kernels", default="auto", help="instruction set (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8, help="(%(default)s)")
    arguments = parser.parse_args()
    models = {model: {"model": model, "dtype": "float32"} for model in arguments.models}
    for name, options in (models or FORMATS).items():
        tokens = continued(arguments.kernels, arguments.max_tokens, **options)
        print(f"{name}: {tokens}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
