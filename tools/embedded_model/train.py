#!/usr/bin/env python3
"""Train a small Qwen3 language model on the data made by prepare.py, on a CPU.

    python train.py --data data/ --out model/ --work work/ --steps 3000

Schedule: warm-up, constant rate, then a linear decay to 0, whose last part uses long rows. The
decay takes the last --decay steps before --steps, or starts when the file --wind-down appears, or, with --budget-min, --decay-min minutes before the budget ends. A machine shared with
others may pause the process: the number of steps that still fit is estimated again at every step
from the recent pace, pauses included, and the rate falls linearly over that many. --resume goes on
from the last checkpoint. With --teacher DIR the loss is mixed with the teacher's
distribution (for the draft model).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

EOT_ID, IGNORE = 0, -100
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


# ------------------------------------------------------------------ data


class Docs:
    def __init__(self, data: Path, name: str):
        info = json.loads((data / f"{name}.json").read_text())
        self.ids = np.fromfile(data / f"{name}.bin", dtype=np.uint16)
        self.lens = np.asarray(info["lens"], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lens)[:-1]])
        self.bytes, self.tokens = info["bytes"], info["tokens"]

    def __len__(self):
        return len(self.lens)

    def __getitem__(self, i):
        return self.ids[self.starts[i] : self.starts[i] + self.lens[i]]


class CodeStream:
    """Documents in a new random order every epoch; each epoch also takes 1/share of the test-suite."""

    def __init__(self, code: Docs, tests: Docs, share: int, seed: int):
        self.code, self.tests, self.share, self.seed = code, tests, share, seed
        self.epoch, self.pos, self.buf = -1, 0, np.zeros(0, np.uint16)

    def _next_epoch(self):
        self.epoch += 1
        rng = random.Random(self.seed * 1000 + self.epoch)
        docs = [self.code[i] for i in range(len(self.code))]
        docs += [
            self.tests[i]
            for i in range(len(self.tests))
            if i % self.share == self.epoch % self.share
        ]
        rng.shuffle(docs)
        self.buf = np.concatenate(docs)
        self.pos = rng.randrange(512)

    def row(self, n: int):
        if self.pos + n + 1 > len(self.buf):
            self._next_epoch()
        chunk = self.buf[self.pos : self.pos + n + 1].astype(np.int64)
        self.pos += n
        return chunk[:-1], chunk[1:].copy()

    def state(self):
        return {"epoch": self.epoch, "pos": self.pos}

    def restore(self, s):
        self.epoch = s["epoch"] - 1
        self._next_epoch()
        self.pos = s["pos"]


class ChatStream:
    """Rows that begin with a conversation and hold whole ones, an <|endoftext|> between them."""

    def __init__(self, chat: Docs):
        self.chat, self.i, self.pool = chat, 0, []

    def row(self, n: int):
        parts, room = [], n + 1
        while room > 24:
            while len(self.pool) < 48:
                self.pool.append(self.i % len(self.chat))
                self.i += 1
            fit = next((k for k, d in enumerate(self.pool) if self.chat.lens[d] + 1 <= room), None)
            if fit is None:
                if parts:
                    break
                fit = 0
            doc = self.chat[self.pool.pop(fit)][: room - 1]
            parts += [doc, np.asarray([EOT_ID], np.uint16)]
            room -= len(doc) + 1
        ids = np.concatenate(parts).astype(np.int64)
        row = np.full(n + 1, EOT_ID, np.int64)
        row[: len(ids)] = ids
        target = row[1:].copy()
        target[max(len(ids) - 1, 0) :] = IGNORE
        return row[:-1], target

    def state(self):
        return {"i": self.i, "pool": list(self.pool)}

    def restore(self, s):
        self.i, self.pool = s["i"], list(s["pool"])


def make_batch(code: CodeStream, chat: ChatStream, rows: int, n: int, chat_rows: int):
    pairs = [chat.row(n) for _ in range(chat_rows)] + [code.row(n) for _ in range(rows - chat_rows)]
    x, y = zip(*pairs)
    return torch.from_numpy(np.stack(x)), torch.from_numpy(np.stack(y))


# ------------------------------------------------------------------ model and optimizer


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


# ------------------------------------------------------------------ training


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", type=Path, required=True)
    ap.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the finished model (prepare.py put the tokenizer here)",
    )
    ap.add_argument("--work", type=Path, required=True, help="checkpoints, log.jsonl, WIND_DOWN")
    ap.add_argument("--status", type=Path, help="one line about the progress is written here")
    ap.add_argument("--pid-file", type=Path)
    ap.add_argument(
        "--wind-down", type=Path, help="the decay starts when this file appears (WORK/WIND_DOWN)"
    )
    ap.add_argument("--draft", action="store_true", help="the one-layer draft model")
    ap.add_argument("--teacher", type=Path)
    ap.add_argument("--steps", type=int, default=3000)
    ap.add_argument("--decay", type=int, default=700)
    ap.add_argument(
        "--long-below",
        type=float,
        default=0.3,
        help="rows of --long-len once the rate is below this share",
    )
    ap.add_argument("--long-len", type=int, default=2048)
    ap.add_argument("--warmup", type=int, default=60)
    ap.add_argument(
        "--budget-min", type=float, default=0, help="wall-clock minutes for this run, 0: no limit"
    )
    ap.add_argument("--decay-min", type=float, default=20)
    ap.add_argument("--rows", type=int, default=16)
    ap.add_argument("--micro", type=int, default=8, help="rows per forward pass")
    ap.add_argument("--len", type=int, default=512)
    ap.add_argument("--chat-share", type=float, default=0.35)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--lr-embed", type=float, default=4e-3)
    ap.add_argument("--weight-decay", type=float, default=0.05)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--fp32", action="store_true")
    ap.add_argument("--compile", action="store_true")
    ap.add_argument("--seed", type=int, default=1234)
    ap.add_argument("--save-min", type=float, default=3.0)
    ap.add_argument("--eval-every", type=int, default=200)
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--chat-name", default="chat_train")
    ap.add_argument(
        "--polish",
        type=float,
        default=0,
        metavar="RATE",
        help="with --resume: --decay more steps on another --chat-name, the rate falling from this share to 0",
    )
    ap.add_argument(
        "--restart-decay", action="store_true", help="with --resume: forget a decay already begun"
    )
    args = ap.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.pid_file:
        args.pid_file.write_text(f"{os.getpid()}\n")
    torch.set_num_threads(args.threads)
    amp = not args.fp32
    vocab = json.loads((args.data / "meta.json").read_text())["vocab"]

    code = CodeStream(Docs(args.data, "code_train"), Docs(args.data, "test_train"), 4, args.seed)
    chat = ChatStream(Docs(args.data, args.chat_name))
    val = {n: Docs(args.data, n) for n in ("val_code", "val_chat_fn", "val_chat_file", "seen_chat")}
    model = build_model(DRAFT if args.draft else BIG, vocab, args.seed)
    model.train()
    teacher = None
    if args.teacher:
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(
            args.teacher, dtype=torch.float32, attn_implementation="block"
        ).eval()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embed = [p for n, p in model.named_parameters() if "embed" in n]
    gains = [p for n, p in model.named_parameters() if p.ndim == 1]
    muon = Muon(matrices, lr=args.lr, weight_decay=args.weight_decay)
    adam = torch.optim.AdamW(
        [
            {"params": embed, "lr": args.lr_embed, "weight_decay": args.weight_decay * 0.1},
            {"params": gains, "lr": args.lr_embed, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    base = [(g, g["lr"]) for o in (muon, adam) for g in o.param_groups]

    state = {
        "step": 0,
        "tokens": 0,
        "elapsed": 0.0,
        "cpu": 0.0,
        "decay_from": None,
        "target": args.steps,
        "rate": 1.0,
        "owed": 0.0,
    }
    ckpt = args.work / "checkpoint.pt"
    if args.resume and ckpt.exists():
        saved = torch.load(ckpt, weights_only=False)
        model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        adam.load_state_dict(saved["adam"])
        code.restore(saved["code"])
        chat.restore(saved["chat"])
        state.update(saved["state"])
        if args.polish:
            chat = ChatStream(Docs(args.data, args.chat_name))
            state.update(
                decay_from=state["step"], rate=args.polish, target=state["step"] + args.decay
            )
        if args.restart_decay:
            state.update(decay_from=None, rate=1.0, target=args.steps)

    fn = (
        (lambda x, y: distill_sum(model, teacher, x, y, amp))
        if teacher
        else (lambda x, y: loss_sum(model, x, y, amp))
    )
    fast = (
        torch.compile(fn, dynamic=False) if args.compile else fn
    )  # long rows are few: not worth a second compilation

    def checkpoint():
        tmp = ckpt.with_suffix(".tmp")
        torch.save(
            {
                "model": model.state_dict(),
                "muon": muon.state_dict(),
                "adam": adam.state_dict(),
                "code": code.state(),
                "chat": chat.state(),
                "state": state,
            },
            tmp,
        )
        tmp.replace(ckpt)

    log = open(args.work / "log.jsonl", "a")
    started = last = saved_at = time.time()
    cpu_last, ema, step_s, pace = time.process_time(), None, None, [0.0, 0.0]
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    while True:
        s = state["step"]
        left_s = args.budget_min * 60 - (time.time() - started) if args.budget_min else math.inf
        if state["decay_from"] is None:
            wind_down = (args.wind_down or args.work / "WIND_DOWN").exists()
            if s >= args.steps - args.decay or wind_down or left_s < args.decay_min * 60:
                state["decay_from"] = s
                state["target"] = min(args.steps, s + args.decay) if wind_down else args.steps
                checkpoint()
                print(f"decay from step {s}", flush=True)
        rate, width = min(1.0, (s + 1) / args.warmup), args.len
        if state["decay_from"] is not None:
            fit = left_s * pace[1] / pace[0] if pace[1] > 5 else math.inf
            if fit < 30:  # the time is up: the last steps, whatever they take
                state["target"] = min(state["target"], s + 30)
            remaining = min(
                state["target"] - s, max(fit, 30) if s + 30 < state["target"] else math.inf
            )
            if remaining < 1:
                break
            rate *= state["rate"]
            state["rate"] *= 1 - 1 / remaining
            if state["rate"] < args.long_below:
                width = args.long_len
        for g, lr in base:
            g["lr"] = lr * rate
        rows = max(1, args.rows * args.len // width)
        state["owed"] += args.chat_share * rows
        chat_rows = int(state["owed"])
        state["owed"] -= chat_rows
        x, y = make_batch(code, chat, rows, width, chat_rows)
        if rows > 1:  # mix code and chat rows over the forward passes
            perm = torch.from_numpy(np.random.RandomState(s).permutation(rows))
            x, y = x[perm], y[perm]
        count, micro, total = int((y != IGNORE).sum()), max(1, args.micro * args.len // width), 0.0
        for k in range(0, rows, micro):
            loss = (fast if width == args.len else fn)(x[k : k + micro], y[k : k + micro]) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(embed + gains, 1.0).item()
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        state["step"] += 1
        state["tokens"] += count
        now = time.time()
        dt, last = now - last, now
        state["elapsed"] += dt
        state["cpu"] += time.process_time() - cpu_last
        cpu_last = time.process_time()
        if now - started > dt:  # not the first step, which compiles
            keep = math.exp(-dt / 600)
            pace = [pace[0] * keep + dt, pace[1] * keep + 1]
        step_s = dt if step_s is None or s < 3 else 0.9 * step_s + 0.1 * min(dt, 3 * step_s)
        ema = total if ema is None else 0.98 * ema + 0.02 * total
        if not math.isfinite(total):
            raise SystemExit("the loss is not finite")
        if state["step"] % 10 == 0:
            rec = {
                "step": state["step"],
                "loss": round(total, 4),
                "ema": round(ema, 4),
                "tokens": state["tokens"],
                "tok_s": round(rows * width / step_s),
                "rate": round(rate, 4),
                "width": width,
                "norm": round(norm, 3),
                "min": round(state["elapsed"] / 60, 2),
                "cpu_min": round(state["cpu"] / 60, 2),
                "epoch": code.epoch,
            }
            log.write(json.dumps(rec) + "\n")
            log.flush()
            line = " ".join(f"{k} {v}" for k, v in rec.items())
            if args.status:
                args.status.write_text(line + "\n")
            if state["step"] % 50 == 0:
                print(line, flush=True)
        if state["step"] % args.eval_every == 0:
            res = {
                "step": state["step"],
                "val_code": evaluate(model, val["val_code"], False, args.len, 8, amp, 40),
                "val_chat_fn": evaluate(model, val["val_chat_fn"], True, args.len, 16, amp, 64),
                "seen_chat": evaluate(model, val["seen_chat"], True, args.len, 16, amp, 64),
            }
            print(json.dumps({k: round(v, 4) for k, v in res.items()}), flush=True)
            log.write(json.dumps(res) + "\n")
        if now - saved_at > args.save_min * 60:
            checkpoint()
            saved_at = time.time()
    checkpoint()
    save_model(model, args.out, state["tokens"])
    final = {
        "steps": state["step"],
        "tokens": state["tokens"],
        "minutes": round(state["elapsed"] / 60, 1),
        "cpu_minutes": round(state["cpu"] / 60, 1),
        "decay_from": state["decay_from"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "code_epochs": code.epoch,
    }
    model.to(torch.bfloat16).float()  # measure what was saved
    for name, docs in val.items():
        loss = evaluate(model, docs, name != "val_code", args.len, 8, False)
        final[name] = {
            "loss": round(loss, 4),
            "bits_per_byte": round(bits_per_byte(loss, docs), 4),
            "tokens": docs.tokens,
            "bytes": docs.bytes,
        }
    for n in (2048, 4096):
        final[f"val_code_{n}"] = round(evaluate(model, val["val_code"], False, n, 2, False), 4)
    (args.work / "final.json").write_text(json.dumps(final, indent=2) + "\n")
    print(json.dumps(final, indent=2), flush=True)


if __name__ == "__main__":
    main()
