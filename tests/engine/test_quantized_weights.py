"""The law to the bit for weights that are a file's codes: a request's tokens and log-probabilities
are the same alone, in a crowd, with its prompt in other chunks and with another number of threads.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_writer import write_gguf
from tests.models.checkpoints.gguf.test_gguf_files import METADATA, V, ends, layer

from quire import LLM, SamplingParams

TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, logprobs=1)
PARAMS.detokenize = False
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "kv_cache_memory": "4MiB",
    "max_model_len": 64,
    "max_num_seqs": 8,
}


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[tuple[int, ...], float | None]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [output.outputs[0] for output in llm.generate(given, PARAMS, use_tqdm=False)]
    return [(tuple(each.token_ids), each.cumulative_logprob) for each in found]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", TYPES)
def test_output_does_not_depend_on_the_batch(kind: str, dtype: str, tmp_path: Path) -> None:
    other = "Q8_0" if kind == "Q6_K" else "Q6_K"
    tensors = layer(kind, other) | ends(kind)
    tensors["output_norm.weight"] *= 0.02  # so that logits lie near each other
    path = str(write_gguf(tmp_path / "x.gguf", METADATA, tensors))
    rng = random.Random(kind)
    prompts = [[rng.randrange(3, V) for _ in range(rng.randrange(2, 40))] for _ in range(9)]
    llm = LLM(path, dtype=dtype, **OPTIONS)
    crowd = answers(llm, prompts)
    assert len({tokens for tokens, _ in crowd}) > 3
    assert [answers(llm, [prompt])[0] for prompt in prompts[:4]] == crowd[:4]
    chunked = LLM(path, dtype=dtype, max_num_batched_tokens=16, num_threads=1, **OPTIONS)
    assert answers(chunked, prompts) == crowd
