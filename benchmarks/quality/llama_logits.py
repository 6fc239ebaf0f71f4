"""llama.cpp, through the package llama_cpp over the library that was built; see `reading.py`.

    PYTHONPATH=src:PEERS/python PEERS/tools/bin/python benchmarks/quality/llama_logits.py \\
        --model FILE.gguf --windows windows.json --exact exact.npy --out result.json --label Q8_0

All settings are the library's own, which its server has, too: a KV cache of fp16, flash attention
where the model allows it, prompts in pieces of 512.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import reading

SEQUENCE = 0


class LlamaLogits:
    """A context in this process. Invariant: its KV cache is empty between two calls."""

    name = "llama.cpp"

    def __init__(self, args: argparse.Namespace, longest: int) -> None:
        lib: Any = importlib.import_module("llama_cpp")
        self.version = str(lib.__version__)
        self._lib = lib
        self._longest = longest
        lib.llama_backend_init()
        settings = lib.llama_model_default_params()
        model = lib.llama_model_load_from_file(args.model.encode(), settings)
        if not model:
            raise RuntimeError(f"llama.cpp can't load {args.model}")
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = longest
        settings.n_threads = settings.n_threads_batch = args.threads
        self._context = lib.llama_init_from_model(model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {args.model}")
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        self.weight_bytes: int | None = int(lib.llama_model_size(model))

    def logits(self, window: Sequence[int], first: int) -> np.ndarray[Any, Any]:
        """See `reading.LogitsReader`."""
        lib, length = self._lib, len(window)
        batch = lib.llama_batch_init(length, 0, 1)
        batch.n_tokens = length
        for place, token in enumerate(window):
            batch.token[place] = token
            batch.pos[place] = place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = SEQUENCE
            batch.logits[place] = place >= first
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        status = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answers {status}")
        shape = (length - first, self._vocab_size)
        return np.ctypeslib.as_array(lib.llama_get_logits(self._context), shape).copy()


def main(argv: list[str] | None = None) -> None:
    args = reading.make_parser((__doc__ or "").partition("\n")[0]).parse_args(argv)
    reading.hold_threads(args.threads)
    reading.measure(LlamaLogits(args, reading.longest_window(args)), args)


if __name__ == "__main__":
    main()
