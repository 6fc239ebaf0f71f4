"""Trains an EAGLE-3 head for the embedded model in a few minutes, on Python's standard library.

    python -m benchmarks.speculation.train_head FOLDER --minutes 5

The head learns the tokens that the model itself would choose, among the most frequent ones. It is
trained in two passes, as in arXiv:2503.01840: the second one continues from its own states instead
of the model's, as drafting does. FOLDER then has a head with the names of published ones, for
`--speculative-model FOLDER`.
"""

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

LAYERS, LENGTH, BATCH, RATE = (1, 2, 3), 256, 2, 2e-3
VOCABULARY = 1024
HEADS, KV_HEADS, HEAD_SIZE, INNER, EPS = 4, 2, 64, 640, 1e-6

Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [B, heads, T, D]."""
    half = x.shape[-1] // 2
    turns = torch.arange(x.shape[2])[:, None] / 10000.0 ** (torch.arange(half) / half)
    first, second = x.split(half, -1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def forward(weights: Weights, embeds: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """embeds and the states before them [B, T, H] -> the head's next states [B, T, H]."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"midlayer.{name}_proj.weight"].T

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)

    normed = norm(state, weights["midlayer.hidden_norm.weight"])
    both = torch.cat((norm(embeds, weights["midlayer.input_layernorm.weight"]), normed), -1)
    q, k, v = (split(linear(f"self_attn.{name}", both)) for name in "qkv")
    attended = functional.scaled_dot_product_attention(
        rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
    )
    total = state + linear("self_attn.o", attended.transpose(1, 2).flatten(2))
    x = norm(total, weights["midlayer.post_attention_layernorm.weight"])
    gated = functional.silu(linear("mlp.gate", x)) * linear("mlp.up", x)
    return total + linear("mlp.down", gated)


def new_weights(size: int, head: torch.Tensor, last_norm: torch.Tensor) -> Weights:
    """Random weights, and the target's own for the end."""

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) / columns**0.5

    ones = torch.ones(size)
    weights = {
        "fc.weight": draw(size, len(LAYERS) * size),
        "midlayer.hidden_norm.weight": ones.clone(),
        "midlayer.input_layernorm.weight": ones.clone(),
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "midlayer.self_attn.q_proj.weight": draw(HEADS * HEAD_SIZE, 2 * size),
        "midlayer.self_attn.k_proj.weight": draw(KV_HEADS * HEAD_SIZE, 2 * size),
        "midlayer.self_attn.v_proj.weight": draw(KV_HEADS * HEAD_SIZE, 2 * size),
        "midlayer.self_attn.o_proj.weight": draw(size, HEADS * HEAD_SIZE),
        "midlayer.mlp.gate_proj.weight": draw(INNER, size),
        "midlayer.mlp.up_proj.weight": draw(INNER, size),
        "midlayer.mlp.down_proj.weight": draw(size, INNER),
        "norm.weight": last_norm.clone(),
        "lm_head.weight": head.clone(),
    }
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def library_tokens() -> torch.Tensor:
    """The token ids of the standard library's sources."""
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths]
    found = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    return torch.tensor(found)


def train(folder: Path, minutes: float) -> None:
    """Train a head, and write it to `folder`."""
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    table = target.model.embed_tokens.weight.detach()
    size = table.shape[1]
    tokens, rng = library_tokens(), random.Random(1)
    chosen = tokens.bincount(minlength=len(table)).topk(VOCABULARY).indices.sort().values
    weights = new_weights(size, table[chosen], target.model.norm.weight.detach())
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.95))
    began_s, step = time.monotonic(), 0
    while (done := (time.monotonic() - began_s) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (1 - done)
        starts = [rng.randrange(len(tokens) - LENGTH) for _ in range(BATCH)]
        ids = torch.stack([tokens[start : start + LENGTH] for start in starts])
        with torch.no_grad():
            seen = target(ids, output_hidden_states=True)
            inputs = torch.cat([seen.hidden_states[layer] for layer in LAYERS], -1)
            wanted = seen.logits[..., chosen].softmax(-1)
        # The state at i and token i + 1 give what the model predicts after token i + 1.
        loss = torch.zeros(())
        state, shift = inputs @ weights["fc.weight"].T, 1
        for _ in range(2):
            state = forward(weights, table[ids[:, shift:]], state[:, :-1])
            logits = norm(state, weights["norm.weight"]) @ weights["lm_head.weight"].T
            own = functional.log_softmax(logits, -1)
            loss = loss - (wanted[:, shift:] * own).sum(-1).mean()
            shift += 1
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            best = seen.logits[:, 2:].argmax(-1)
            alike = (chosen[logits.argmax(-1)] == best).float().mean()
            print(
                f"step {step}: loss {loss.item() / 2:.3f}, second draft right {alike:.2f}",
                flush=True,
            )
        step += 1
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.detach().to(torch.bfloat16) for name, weight in weights.items()}
    stored["d2t"] = chosen - torch.arange(VOCABULARY)
    save_file(stored, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": table.shape[0],
        "draft_vocab_size": VOCABULARY,
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    arguments = parser.parse_args()
    train(arguments.folder, arguments.minutes)
