"""Classes of transformers on quire's memory: the tokens of their own greedy generation."""

import pytest
from benchmarks.fallback.equal_tokens import quire_tokens
from benchmarks.fallback.tiny_models import generated

from quire import LLM, SamplingParams

NUM_TOKENS = 16

CLASSES = {
    "cohere2": "windows on some layers, parallel MLP, scaled logits, interleaved rotation",
    "deepseek_v3": "multi-head latent attention with heads of other sizes, grouped routing",
    "gemma2": "soft caps of scores and logits, windows, scaled embeddings, a tied head",
    "glm4_moe": "a dense layer before those of experts, a stored buffer, partial rotation",
    "gpt2": "learned positions, linears that are stored transposed, a tied head",
    "gpt_oss": "sinks, windows, experts with biases and a clamp",
    "mixtral": "experts whose tensors are stacked from one each",
    "modernbert-decoder": "two rotations, fused projections, a head with a bias",
    "opt": "positions with an offset, a head that calls its decoder",
    "phi3": "fused projections",
}


@pytest.mark.parametrize("model_type", CLASSES, ids=CLASSES.keys())
def test_tokens_equal_transformers(model_type, tiny_folder):
    folder, reference = tiny_folder(model_type)
    assert quire_tokens(str(folder), NUM_TOKENS) == generated(reference, NUM_TOKENS)


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"block_size": 8}], ids=str)
def test_any_kernels_and_blocks_serve(options, tiny_folder):
    folder, reference = tiny_folder("starcoder2")
    assert quire_tokens(str(folder), NUM_TOKENS, **options) == generated(reference, NUM_TOKENS)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_request_gets_the_same_bits_alone_and_in_a_crowd(model_type, quantization, tiny_folder):
    folder, _ = tiny_folder(model_type)
    prompts = [[5, 17, 130, 9], [200, 3], [11, *range(20, 60)]]

    def logprobs(groups, max_num_batched_tokens):
        llm = LLM(
            str(folder),
            model_impl="transformers",
            skip_tokenizer_init=True,
            dtype="float32",
            quantization=quantization,
            kv_cache_memory="4MiB",
            max_model_len=128,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=4,
            enable_prefix_caching=False,
        )
        wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
        return [
            [entry.logprob for found in output.outputs[0].logprobs for entry in found.values()]
            for group in groups
            for output in llm.generate([{"prompt_token_ids": each} for each in group], wanted)
        ]

    assert logprobs([[each] for each in prompts], 64) == logprobs([prompts], 7)
