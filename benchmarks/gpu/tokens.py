"""Whole models on the device: tokens and log-probabilities beside transformers', and beside their
own in other company.

In fp32 every greedy token must be the one that transformers' logits say, teacher-forced on ours. In
bf16 two correct computations differ; then ours must be no farther from fp32 than transformers' own
bf16 is. With batch_invariant a request's tokens and log-probabilities must be the same bits alone,
among others, and with its prompt cut into other chunks.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.harness import (
    LLAMA_8B,
    QWEN3_600M,
    Answer,
    Bench,
    Load,
    drive,
    make_model,
    random_prompts,
)

# bf16: the largest ratio of our mean distance from fp32 to that of transformers.
MOST_DISTANCE = 1.5
# fp32: where ours is not transformers' first, its logit may lie below by so much: sums' order.
TIE = 1e-4

FEW_LAYERS = {"num_hidden_layers": 4, "vocab_size": 32_000}
ODD_LLAMA = {"hidden_size": 1120, "num_attention_heads": 14, "num_key_value_heads": 2}
ODD_LLAMA |= {"head_dim": 80, "intermediate_size": 2816, "tie_word_embeddings": True}


def check_tokens(bench: Bench) -> None:
    """Two families, in fp32 and in bf16, each against transformers on the same device."""
    models = {
        "qwen3": QWEN3_600M | FEW_LAYERS,
        "llama": LLAMA_8B | FEW_LAYERS | ODD_LLAMA,
    }
    for name in list(models)[: 1 if bench.small else None]:
        config = models[name]
        # Wide weights, so that logits lie apart.
        folder = make_model(bench, f"tokens-{name}", config, std=0.06)
        lengths = (3, 9) if bench.small else (5, 64, 333, 1100, 17, 700)
        vocab_size = 61 if bench.small else int(config["vocab_size"])
        prompts = random_prompts(lengths, vocab_size, int(time.time()))
        count = 2 if bench.small else 48
        _check_exact(bench, name, folder, prompts, count)
        if not bench.small:
            _check_close(bench, name, folder, prompts, count)


def _answers(
    bench: Bench, folder: Path, prompts: Sequence[Sequence[int]], count: int, **options: Any
) -> list[Answer]:
    """Greedy, with log-probabilities; prompts cut into chunks."""
    engine = bench.engine(folder, **(_sizes(bench, 6 if bench.small else 512) | options))
    load = Load(prompts, [count] * len(prompts), {"temperature": 0.0, "logprobs": 0})
    return drive(engine, load)[0]


def _check_exact(
    bench: Bench, name: str, folder: Path, prompts: list[list[int]], count: int
) -> None:
    ours = _answers(bench, folder, prompts, count, dtype="float32")
    reference = Reference(bench, folder, torch.float32)
    largest_gap, num_other, worst = 0.0, 0, 0.0
    for prompt, answer in zip(prompts, ours, strict=True):
        logits = reference.logits(prompt, answer.token_ids)
        chosen = logits.gather(1, torch.tensor(answer.token_ids, device=logits.device)[:, None])
        gaps = (logits.max(dim=1).values - chosen[:, 0]).cpu()
        largest_gap = max(largest_gap, float(gaps.max()))
        num_other += int((gaps > 0).sum())
        worst = max(worst, _distances(logits, answer).max().item())
    note = f"{num_other} of {len(ours) * count} tokens are not transformers' first"
    bench.at_most(f"{name} fp32: gap to its first", largest_gap, TIE, "logits", note, is_time=False)
    bench.at_most(f"{name} fp32: log-probabilities", worst, 1e-3, is_time=False)


def _check_close(
    bench: Bench, name: str, folder: Path, prompts: list[list[int]], count: int
) -> None:
    ours = _answers(bench, folder, prompts, count, dtype="bfloat16")
    exact, rounded = (Reference(bench, folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    own, its = [], []
    for prompt, answer in zip(prompts, ours, strict=True):
        exactly = exact.logits(prompt, answer.token_ids)
        own.append(_distances(exactly, answer))
        said = _logprobs(rounded.logits(prompt, answer.token_ids), answer)
        its.append((_logprobs(exactly, answer) - said).abs())
    mean, its_mean = torch.cat(own).mean().item(), torch.cat(its).mean().item()
    note = f"mean distance of log-probabilities {mean:.4g}, transformers {its_mean:.4g}"
    title = f"{name} bf16: distance from fp32"
    bench.at_most(title, mean / its_mean, MOST_DISTANCE, "x transformers'", note, is_time=False)


def _logprobs(logits: torch.Tensor, answer: Answer) -> torch.Tensor:
    chosen = torch.tensor(answer.token_ids, device=logits.device)[:, None]
    return logits.double().log_softmax(dim=1).gather(1, chosen)[:, 0].cpu()


def _distances(logits: torch.Tensor, answer: Answer) -> torch.Tensor:
    """Between our log-probabilities of our tokens and those that the logits give them."""
    own = torch.tensor(answer.logprobs, dtype=torch.float64)
    return (_logprobs(logits, answer) - own).abs()


class Reference:
    """transformers' forward pass on the bench's device."""

    def __init__(self, bench: Bench, folder: Path, dtype: torch.dtype) -> None:
        import transformers  # takes seconds

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation="sdpa"
        )
        self._model: Any = model.eval().to(bench.device)
        self._device = bench.device

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """[answer tokens, V] fp32: what predicts each token of the answer."""
        token_ids = torch.tensor([[*prompt, *answer[:-1]]], device=self._device)
        logits: torch.Tensor = self._model(token_ids).logits[0, len(prompt) - 1 :]
        return logits.float()


def check_tensor_parallel(bench: Bench) -> None:
    """Two GPUs say in fp32 what one says, where there are two."""
    num_gpus = 0 if bench.small else torch.cuda.device_count()
    if num_gpus < 2:
        bench.add("two GPUs as one", None, note=f"skipped: there are {num_gpus} GPUs")
        return
    config = QWEN3_600M | FEW_LAYERS
    folder = make_model(bench, "tokens-qwen3", config, std=0.06)
    prompts = random_prompts((5, 333, 64), int(config["vocab_size"]), int(time.time()))
    sizes = {"dtype": "float32", "max_model_len": 2048, "gpu_memory_utilization": 0.3}
    one, two = (
        _answers(bench, folder, prompts, 48, tensor_parallel_size=size, **sizes) for size in (1, 2)
    )
    same = [a.token_ids == b.token_ids for a, b in zip(one, two, strict=True)]
    bench.check("two GPUs as one", all(same), f"{sum(same)} of {len(same)} answers are equal")


def check_invariance(bench: Bench) -> None:
    """Check that a row's bits are the same in every batch, and measure the cost of this."""
    config = QWEN3_600M if bench.small else QWEN3_600M | {"num_hidden_layers": 8}
    folder = make_model(bench, "invariant", config, std=0.04)
    vocab_size = 61 if bench.small else int(config["vocab_size"])
    count = 2 if bench.small else 64
    lengths = (9, 4) if bench.small else tuple(range(40, 40 + 13 * 64, 13))
    prompts = random_prompts(lengths, vocab_size, int(time.time()))
    sampled = {"temperature": 0.8, "top_p": 0.95, "logprobs": 2}
    load = Load(prompts, [count] * len(prompts), sampled)
    few, many = (5, 12) if bench.small else (512, 2048)
    alone, one_way = _alone_and_together(bench, folder, load, few)
    other_way = _alone_and_together(bench, folder, load, many)[1]
    name = f"{len(prompts)} requests, prompts in chunks of {few} and of {many}"
    bench.check(name, one_way == other_way)
    bench.check(f"one request alone and among {len(prompts) - 1}", alone[0] == one_way[0])
    if not bench.small:
        took = {flag: _seconds(bench, folder, load, is_invariant=flag) for flag in (True, False)}
        note = f"{took[True]:.2f} s instead of {took[False]:.2f} s for {len(prompts)} requests"
        cost = took[True] / took[False] - 1
        bench.add("what batch_invariant costs", 100 * cost, "% more time", note=note)


Bits = tuple[tuple[int, ...], tuple[float, ...]]


def _alone_and_together(
    bench: Bench, folder: Path, load: Load, chunk: int
) -> tuple[list[Bits], list[Bits]]:
    """Tokens and log-probabilities of the first request alone, and of all."""
    engine = bench.engine(folder, batch_invariant=True, **_sizes(bench, chunk))
    first = Load(load.prompts[:1], load.num_tokens[:1], load.params)
    runs = [drive(engine, one)[0] for one in (first, load)]
    alone, together = (
        [(tuple(one.token_ids), tuple(one.logprobs)) for one in answers] for answers in runs
    )
    return alone, together


def _seconds(bench: Bench, folder: Path, load: Load, *, is_invariant: bool) -> float:
    engine = bench.engine(folder, batch_invariant=is_invariant, **_sizes(bench, 2048))
    return min(drive(engine, load)[1] for _ in range(3))


def _sizes(bench: Bench, chunk: int) -> dict[str, Any]:
    if bench.small:
        sizes = {"num_blocks": 40, "max_model_len": 64, "max_num_seqs": 2}
        return sizes | {"max_num_batched_tokens": chunk}
    share = {"gpu_memory_utilization": 0.4, "max_model_len": 2048}
    return share | {"max_num_batched_tokens": chunk}
