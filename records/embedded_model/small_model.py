"""The model that is trained, its optimizer, losses and evaluation, and how it is saved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from token_data import IGNORE, Docs

BIG = dict(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=640,
)
DRAFT = dict(
    hidden_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=320,
)


def block_attention(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, **_):
    """Causal attention in blocks of queries: on a CPU, with its backward, twice as fast as SDPA at these sizes."""
    b, h, t, d = query.shape
    kv = key.shape[1]
    g = h // kv
    query = (query * (scaling or d**-0.5)).reshape(b, kv, g, t, d)
    n = max(128, t // 8)
    out = []
    for i in range(0, t, n):
        j = min(i + n, t)
        scores = query[:, :, :, i:j].reshape(b, kv, g * (j - i), d) @ key[:, :, :j].transpose(
            -1, -2
        )
        hide = torch.arange(j).unsqueeze(0) > torch.arange(i, j).unsqueeze(1)
        scores = scores.float().view(b, kv, g, j - i, j).masked_fill(hide, float("-inf"))
        probs = torch.softmax(scores, -1).to(value.dtype).view(b, kv, g * (j - i), j)
        out.append((probs @ value[:, :, :j]).view(b, kv, g, j - i, d))
    out = torch.cat(out, 3).reshape(b, h, t, d)
    return out.transpose(1, 2).contiguous(), None


def register_attention():
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("block", block_attention)
    AttentionMaskInterface.register(
        "block", lambda *a, **k: None
    )  # always causal, never padded on the left


def build_model(shape: dict, vocab: int, seed: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    register_attention()
    cfg = Qwen3Config(
        vocab_size=vocab,
        head_dim=64,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        initializer_range=0.02,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        **shape,
    )
    cfg._attn_implementation = "block"
    model = Qwen3ForCausalLM(cfg)
    with torch.no_grad():  # smaller residual outputs
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_(1 / math.sqrt(2 * cfg.num_hidden_layers))
    return model


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by Newton-Schulz iterations (Jordan 2024), scaled to AdamW's update size."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0, iters=5):
        super().__init__(
            params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, iters=iters)
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape), []).append(p)
            for ps in shapes.values():  # matrices of one shape go through the iterations together
                us = []
                for p in ps:
                    buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    us.append(p.grad.lerp(buf, group["momentum"]))
                u = torch.stack(us).bfloat16()
                flip = u.shape[1] > u.shape[2]
                if flip:
                    u = u.transpose(1, 2)
                u = u / (u.norm(dim=(1, 2), keepdim=True) + 1e-7)
                for _ in range(group["iters"]):
                    a = u @ u.transpose(1, 2)
                    b = -4.7750 * a + 2.0315 * (a @ a)
                    u = 3.4445 * u + b @ u
                if flip:
                    u = u.transpose(1, 2)
                scale = 0.2 * math.sqrt(max(u.shape[1], u.shape[2]))
                for p, d in zip(ps, u.float()):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(d, alpha=-group["lr"] * scale)


def loss_sum(model, x, y, amp):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        hidden = model.model(input_ids=x, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]),
        y.reshape(-1),
        ignore_index=IGNORE,
        reduction="sum",
    )


def distill_sum(model, teacher, x, y, amp, alpha=0.5):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        with torch.no_grad():
            target = teacher.lm_head(teacher.model(input_ids=x, use_cache=False).last_hidden_state)
        logits = model.lm_head(model.model(input_ids=x, use_cache=False).last_hidden_state)
    logp = F.log_softmax(logits.float().view(-1, logits.shape[-1]), -1)
    prob = F.softmax(target.float().view(-1, logits.shape[-1]), -1)
    keep = (y.reshape(-1) != IGNORE).float()
    hard = F.nll_loss(logp, y.reshape(-1), ignore_index=IGNORE, reduction="sum")
    soft = (-(prob * logp).sum(-1) * keep).sum()
    return (1 - alpha) * hard + alpha * soft


@torch.no_grad()
def evaluate(model, docs: Docs, chat: bool, n: int, rows: int, amp: bool, limit: int | None = None):
    """Loss per token. Code: the documents in a row cut into pieces of n; chat: each conversation by itself."""
    model.eval()
    total, count = 0.0, 0
    if chat:
        order = sorted(range(len(docs)), key=lambda i: -docs.lens[i])[:limit]
        for k in range(0, len(order), rows):
            batch = [docs[i] for i in order[k : k + rows]]
            width = -(-max(map(len, batch)) // 32) * 32
            x = torch.zeros(len(batch), width, dtype=torch.long)
            y = torch.full((len(batch), width), IGNORE)
            for r, d in enumerate(batch):
                t = torch.from_numpy(d.astype(np.int64))[:width]
                x[r, : len(t)] = t
                y[r, : len(t) - 1] = t[1:]
            total += loss_sum(model, x, y, amp).item()
            count += int((y != IGNORE).sum())
    else:
        ids = docs.ids.astype(np.int64)
        pieces = (len(ids) - 1) // n
        pieces = min(pieces, limit or pieces)
        for k in range(0, pieces, rows):
            m = min(rows, pieces - k)
            chunk = torch.from_numpy(ids[k * n : (k + m) * n + 1])
            x, y = chunk[:-1].view(m, n), chunk[1:].view(m, n)
            total += loss_sum(model, x, y, amp).item()
            count += y.numel()
    model.train()
    return total / count


def bits_per_byte(loss, docs: Docs):
    return loss / math.log(2) * docs.tokens / docs.bytes


def save_model(model, out: Path, tokens: int):
    """bf16 safetensors and configs written with the field names most engines read."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: v.detach().to(torch.bfloat16).contiguous().clone()
        for k, v in model.state_dict().items()
        if k != "lm_head.weight"
    }  # tied to the embedding
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    c = model.config
    (out / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "vocab_size": c.vocab_size,
                "hidden_size": c.hidden_size,
                "num_hidden_layers": c.num_hidden_layers,
                "num_attention_heads": c.num_attention_heads,
                "num_key_value_heads": c.num_key_value_heads,
                "head_dim": c.head_dim,
                "intermediate_size": c.intermediate_size,
                "hidden_act": "silu",
                "max_position_embeddings": 4096,
                "rope_theta": 10000.0,
                "rope_scaling": None,
                "rms_norm_eps": 1e-6,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "tie_word_embeddings": True,
                "use_sliding_window": False,
                "sliding_window": None,
                "max_window_layers": c.num_hidden_layers,
                "initializer_range": 0.02,
                "bos_token_id": None,
                "eos_token_id": 2,
                "pad_token_id": 0,
                "torch_dtype": "bfloat16",
                "use_cache": True,
            },
            indent=2,
        )
        + "\n"
    )
    (out / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0}, indent=2) + "\n"
    )
