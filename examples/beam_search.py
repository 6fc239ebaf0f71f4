"""Beam search inside the engine: the likeliest continuations of a text, best first.

The beams share the memory of their common tokens; the result equals transformers'.

    python examples/beam_search.py ["import os.pa"]
"""

import sys

from quire import LLM, BeamSearchParams


def main() -> None:
    """Print four beams with their scores."""
    prompt = (sys.argv[1:] or ["with open(path) as"])[0]
    llm = LLM(dtype="float32", max_num_seqs=8, max_model_len=512)
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    for beam in llm.beam_search(prompt, params)[0].sequences:
        print(f"{beam.cum_logprob:8.3f}  {beam.text!r}")


if __name__ == "__main__":
    main()
