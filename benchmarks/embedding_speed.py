"""Embeddings a second, ours and transformers', of a random model on the same texts, in turns.

    python -m benchmarks.embedding_speed --shape qwen3 --rounds 5
    python -m benchmarks.embedding_speed --shape minilm --profile

The texts are token ids of mixed lengths, from a quarter of `--num-tokens` to seven quarters. As in
sentence-transformers, transformers gets them sorted by length, in batches that are padded (on the
left, where the last token's hidden state is wanted). It is measured with each of `--peer-batches`
and `--peer-dtypes`, in turns with ours, on as many threads; of each the best round counts, and the
ratio is that to the best of them. The vectors are compared: the largest difference of an element
from transformers', in float32 where that was measured, is printed.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertModel, PreTrainedModel, Qwen3Config, Qwen3Model

from quire import LLM

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
    "qwen3": {"hidden_size": 1024, "num_hidden_layers": 3, "intermediate_size": 3072},
}
"""`qwen3` has the layers of Qwen3-0.6B, but three of its 28."""
Texts = Sequence[Sequence[int]]


def main() -> None:
    """Measure one shape."""
    args = parse_arguments()
    torch.manual_seed(0)
    texts = make_texts(args.num_texts, args.num_tokens)
    model = make_model(args.shape).eval()
    sides: dict[str, Callable[[], torch.Tensor]] = {}
    for dtype in args.peer_dtypes:
        of_dtype = make_model(args.shape).to(getattr(torch, dtype)).eval()
        of_dtype.load_state_dict(model.state_dict())
        for batch in args.peer_batches:
            sides[f"transformers {dtype}, batches of {batch}"] = peer(
                of_dtype, texts, batch, args.num_threads
            )
    with tempfile.TemporaryDirectory() as folder:
        model.to(getattr(torch, args.dtype)).save_pretrained(folder)
        ours = own_side(folder, texts, args.num_threads)
    found, bests_s = in_turns({f"quire {args.dtype}": ours, **sides}, args.rounds)
    if args.profile:
        print_profile(ours)
    report(args, texts, found, bests_s)


def parse_arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="minilm")
    parser.add_argument("--num-texts", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=128, help="of a text, on average")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--peer-dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peer-batches", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="of torch's operators in ours")
    return parser.parse_args()


def make_texts(count: int, mean: int) -> Texts:
    """Token ids of mixed lengths."""
    lengths = torch.randint(max(1, mean // 4), 2 * mean - mean // 4 + 1, (count,))
    return [torch.randint(1000, 20000, (size,)).tolist() for size in lengths.tolist()]


def make_model(shape: str) -> PreTrainedModel:
    """A random model."""
    if shape == "qwen3":
        sizes = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        return Qwen3Model(Qwen3Config(vocab_size=30522, **sizes, **SHAPES[shape]))
    return BertModel(BertConfig(num_attention_heads=12, **SHAPES[shape]))


def own_side(folder: str, texts: Texts, num_threads: int) -> Callable[[], torch.Tensor]:
    """Embeds all texts by quire, in the dtype of the folder."""
    llm = LLM(
        folder,
        runner="pooling",
        skip_tokenizer_init=True,
        num_threads=num_threads,
        max_model_len=512,
        enable_prefix_caching=False,  # the second run would only read it
    )
    prompts: list[Any] = [{"prompt_token_ids": text} for text in texts]

    def embed() -> torch.Tensor:
        torch.set_num_threads(1)  # as the engine does: its kernels have threads of their own
        return torch.tensor([each.outputs.embedding for each in llm.embed(prompts)])

    return embed


def peer(
    model: PreTrainedModel, texts: Texts, batch_size: int, num_threads: int
) -> Callable[[], torch.Tensor]:
    """Embeds all texts by transformers."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))

    @torch.inference_mode()
    def embed() -> torch.Tensor:
        torch.set_num_threads(num_threads)
        vectors = torch.empty(len(texts), model.config.hidden_size)
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            vectors[chosen] = embed_batch(model, [texts[index] for index in chosen])
        return torch.nn.functional.normalize(vectors, dim=-1)

    return embed


def embed_batch(model: PreTrainedModel, texts: Texts) -> torch.Tensor:
    """The mean of BERT's hidden states, the last one of Qwen3's."""
    width, is_causal = max(map(len, texts)), isinstance(model, Qwen3Model)
    token_ids, mask = torch.zeros(2, len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        where = slice(width - len(text), width) if is_causal else slice(len(text))
        token_ids[row, where], mask[row, where] = torch.tensor(text), 1
    how = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if is_causal else {}
    hidden = model(token_ids, attention_mask=mask, **how).last_hidden_state.float()
    if is_causal:
        return hidden[:, -1]
    return (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


def in_turns(
    sides: dict[str, Callable[[], torch.Tensor]], rounds: int
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The result of each side, and the seconds of its best round after one round of warm-up."""
    found = {name: embed() for name, embed in sides.items()}
    bests_s = dict.fromkeys(sides, float("inf"))
    for index in range(rounds):
        for name in reversed(sides) if index % 2 else sides:
            started_s = time.perf_counter()
            sides[name]()
            bests_s[name] = min(bests_s[name], time.perf_counter() - started_s)
    return found, bests_s


def print_profile(embed: Callable[[], torch.Tensor]) -> None:
    """The operators of torch that took longest, and the whole."""
    started_s = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        embed()
    print(f"profiled: {time.perf_counter() - started_s:.3f} s in all")
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


def report(
    args: argparse.Namespace,
    texts: Texts,
    found: dict[str, torch.Tensor],
    bests_s: dict[str, float],
) -> None:
    """Print the table."""
    num_tokens = sum(map(len, texts))
    print(f"{args.shape}, {len(texts)} texts of {num_tokens / len(texts):.0f} tokens on average,")
    print(f"{args.num_threads} threads, best of {args.rounds} rounds in turns")
    for name, best_s in bests_s.items():
        speed = f"{len(texts) / best_s:8.1f} texts/s {num_tokens / best_s:8.0f} tokens/s"
        print(f"{name:42} {speed}")
    ours, *theirs = bests_s
    best = min(theirs, key=lambda name: bests_s[name])
    exact = next((name for name in theirs if "float32" in name), best)
    difference = (found[ours] - found[exact]).abs().max().item()
    print(f"ratio to the best of them {bests_s[best] / bests_s[ours]:.2f}")
    print(f"largest difference of an element {difference:.2g}")


if __name__ == "__main__":
    main()
