"""Embeddings a second, ours and transformers', of a random model on the same texts.

    python -m benchmarks.embedding_speed --shape minilm --num-texts 256 --num-tokens 128

Both get token ids of one length, so that transformers has no padding to compute; its batches are as
sentence-transformers makes them, of 32 texts. Both use the same number of threads. The vectors are
compared: the largest difference of an element is printed, too.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertModel, PreTrainedModel, Qwen3Config, Qwen3Model

from quire import LLM

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
    "qwen3": {"hidden_size": 1024, "num_hidden_layers": 6, "intermediate_size": 3072},
}
"""`qwen3` has the layers of Qwen3-0.6B, but six of its 28."""
BATCH = 32


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="minilm")
    parser.add_argument("--num-texts", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.num_threads)
    reference = make_model(args.shape).to(getattr(torch, args.dtype)).eval()
    token_ids = torch.randint(1000, 20000, (args.num_texts, args.num_tokens))
    theirs, their_s = timed(lambda: embed(reference, token_ids))
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        llm = LLM(
            folder,
            runner="pooling",
            skip_tokenizer_init=True,
            dtype=args.dtype,
            num_threads=args.num_threads,
            max_model_len=512,
            enable_prefix_caching=False,  # the second run would only read it
        )
        prompts = [{"prompt_token_ids": row} for row in token_ids.tolist()]
        ours, our_s = timed(lambda: [each.outputs.embedding for each in llm.embed(prompts)])
    difference = (torch.tensor(ours) - theirs).abs().max().item()
    print(f"{args.shape}, {args.num_texts} texts of {args.num_tokens} tokens, {args.dtype}")
    print(f"quire         {args.num_texts / our_s:8.1f} texts/s")
    print(f"transformers  {args.num_texts / their_s:8.1f} texts/s")
    print(f"ratio {their_s / our_s:.2f}, largest difference {difference:.2g}")


def make_model(shape: str) -> PreTrainedModel:
    """A random model."""
    if shape == "qwen3":
        sizes = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        return Qwen3Model(Qwen3Config(vocab_size=30522, **sizes, **SHAPES[shape]))
    return BertModel(BertConfig(num_attention_heads=12, **SHAPES[shape]))


@torch.inference_mode()
def embed(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """The mean of BERT's hidden states, the last one of Qwen3's, of length 1."""
    is_causal = isinstance(model, Qwen3Model)
    found = []
    for batch in token_ids.split(BATCH):
        hidden = model(batch, attention_mask=torch.ones_like(batch)).last_hidden_state.float()
        found.append(hidden[:, -1] if is_causal else hidden.mean(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What the second of two runs gives, and its seconds."""
    work()
    started_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started_s


if __name__ == "__main__":
    main()
