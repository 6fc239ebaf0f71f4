"""Asks an installed quire: is the native library in it, does it run, and agree with torch?

    python tools/wheel_smoke.py

For wheels, in an environment of their own (cibuildwheel's test command). Takes a few seconds.
"""

import torch

from quire import LLM, SamplingParams
from quire.kernels.cpu.library import load_library

PROMPT = "import os"


def tokens(kernels: str) -> tuple[int, ...]:
    """The tokens with which the embedded model continues PROMPT, in float32."""
    llm = LLM(kernels=kernels, dtype="float32", max_model_len=64, max_num_seqs=2)
    params = SamplingParams(max_tokens=8, temperature=0)
    return tuple(llm.generate([PROMPT], params)[0].outputs[0].token_ids)


def main() -> None:
    """Check the library. Raises an error at the first fault."""
    library = load_library()
    print(f"{library.path} with {', '.join(library.isas())}; torch {torch.__version__}")
    expected = tokens("torch")
    for isa in library.isas():
        found = tokens(isa)
        if found != expected:
            raise SystemExit(f"kernels={isa!r} gives {found}, torch gives {expected}")
        print(f"{isa}: {len(found)} tokens as torch's")


if __name__ == "__main__":
    main()
