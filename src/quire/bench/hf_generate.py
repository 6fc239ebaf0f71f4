"""Baseline of `quire bench`: transformers' `generate` in static batches, padded on the left.

Only this file needs transformers, which is loaded when the contender is made.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire.bench.contenders import MEMORY_FIGURES, RunRecord, batches
from quire.bench.metrics import Timeline
from quire.bench.workload import BenchRequest
from quire.errors import ConfigurationError

# Any id works, since the attention mask hides padding.
PAD_TOKEN_ID = 0


class HfModel:
    """A model as transformers loads it, with its fused attention (sdpa)."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Raises ConfigurationError if transformers is not installed, and for a GGUF file, which
        transformers would dequantize into a different model."""
        if folder.is_file():
            raise ConfigurationError(
                f"the baseline hf reads models in Hugging Face's format, but {folder} is a GGUF"
                " file; leave the baseline out, or name the original model"
            )
        try:
            import transformers  # not always installed, and takes seconds to import
        except ImportError as error:
            raise ConfigurationError(
                "the baseline hf needs transformers, which is not installed;"
                " run `pip install transformers accelerate`"
            ) from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._transformers = transformers
        self.version = str(transformers.__version__)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation="sdpa"
        )
        self._model: Any = model.eval()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        clock: "TokenClock | None" = None,
        num_beams: int = 1,
    ) -> list[list[int]]:
        """Generate exactly num_tokens tokens for each prompt, ignoring end tokens.

        With num_beams=1 decoding is greedy; with more, the best beam is returned. `clock` records
        the steps of greedy decoding; transformers accepts no clock with beams.
        """
        # First, pad the prompts on the left to one width, and mask the padding.
        width = max(len(prompt) for prompt in prompts)
        pads = [width - len(prompt) for prompt in prompts]
        rows = zip(pads, prompts, strict=True)
        token_ids = torch.tensor([[PAD_TOKEN_ID] * pad + list(prompt) for pad, prompt in rows])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        # Then generate, and return the tokens after the prompts.
        config = self._transformers.GenerationConfig(
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            num_beams=num_beams,
            pad_token_id=PAD_TOKEN_ID,
            eos_token_id=None,
            use_cache=True,
        )
        made: torch.Tensor = self._model.generate(
            token_ids, attention_mask=mask, generation_config=config, streamer=clock
        )
        found: list[list[int]] = made[:, width:].tolist()
        return found


class TokenClock:
    """A streamer for transformers' `generate` that records the time of each step."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by transformers, once with the prompts, then with the tokens of each step."""
        if self._num_puts:
            self.times_s.append(time.perf_counter())
        self._num_puts += 1

    def end(self) -> None:
        """Called by transformers after the last token."""


class HfStaticBatches:
    """Batches of `width` requests in order of arrival, each run until its longest output is done.

    Only the requested tokens are counted, each at the time of its step.
    """

    def __init__(self, model: HfModel, width: int) -> None:
        self._model = model
        self._width = width

    def run(self, requests: Sequence[BenchRequest]) -> RunRecord:
        started_s = time.perf_counter()
        timelines: list[Timeline] = []
        for batch in batches(requests, self._width):
            clock = TokenClock()
            longest = max(request.output_len for request in batch)
            prompts = [request.prompt_token_ids for request in batch]
            made = self._model.generate(prompts, longest, clock)
            assert len(clock.times_s) == longest, "generate stopped early"
            for request, token_ids in zip(batch, made, strict=True):
                count = request.output_len
                prompt_len = len(request.prompt_token_ids)
                times_s, own_ids = clock.times_s[:count], token_ids[:count]
                timelines.append(Timeline(prompt_len, started_s, times_s, own_ids))
        duration_s = time.perf_counter() - started_s
        memory = {name: None for name in MEMORY_FIGURES}
        return RunRecord(timelines, duration_s, {**memory})
