#!/usr/bin/env python3
"""Train a small Qwen3 language model on the data made by prepare.py, on a CPU.

    python train.py --data data/ --out model/ --work work/ --steps 3000

Schedule: warm-up, constant rate, then a linear decay to 0, whose last part uses long rows. The
decay takes the last --decay steps before --steps, or starts when the file --wind-down appears, or,
with --budget-min, --decay-min minutes before the budget ends. A machine shared with others may
pause the process. So the number of steps that still fit is estimated at every step from the recent
pace, pauses included, and the rate falls linearly over this number of steps. --resume continues
from the last checkpoint. With --teacher DIR the loss is mixed with the teacher's distribution (for
the draft model).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from small_model import (
    BIG,
    DRAFT,
    Muon,
    bits_per_byte,
    build_model,
    distill_sum,
    evaluate,
    loss_sum,
    save_model,
)
from token_data import IGNORE, ChatStream, CodeStream, Docs, make_batch


def parse_args():
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
    add_schedule(ap)
    add_run(ap)
    return ap.parse_args()


def add_schedule(ap):
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


def add_run(ap):
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


class Run:
    """One call of this script: model, optimizers, data, and what is counted on the way."""

    def __init__(self, args):
        self.args, self.amp = args, not args.fp32
        vocab = json.loads((args.data / "meta.json").read_text())["vocab"]
        self.code = CodeStream(
            Docs(args.data, "code_train"), Docs(args.data, "test_train"), 4, args.seed
        )
        self.chat = ChatStream(Docs(args.data, args.chat_name))
        self.val = {
            n: Docs(args.data, n) for n in ("val_code", "val_chat_fn", "val_chat_file", "seen_chat")
        }
        self.model = build_model(DRAFT if args.draft else BIG, vocab, args.seed)
        self.model.train()
        self.make_optimizers()
        self.state = {
            "step": 0,
            "tokens": 0,
            "elapsed": 0.0,
            "cpu": 0.0,
            "decay_from": None,
            "target": args.steps,
            "rate": 1.0,
            "owed": 0.0,
        }
        self.ckpt = args.work / "checkpoint.pt"
        if args.resume and self.ckpt.exists():
            self.resume()
        self.make_loss()
        self.log = open(args.work / "log.jsonl", "a")
        self.started = self.last = self.saved_at = time.time()
        self.cpu_last, self.ema, self.step_s, self.pace = (
            time.process_time(),
            None,
            None,
            [0.0, 0.0],
        )

    def make_optimizers(self):
        args, model = self.args, self.model
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        self.embed = [p for n, p in model.named_parameters() if "embed" in n]
        self.gains = [p for n, p in model.named_parameters() if p.ndim == 1]
        self.muon = Muon(matrices, lr=args.lr, weight_decay=args.weight_decay)
        self.adam = torch.optim.AdamW(
            [
                {
                    "params": self.embed,
                    "lr": args.lr_embed,
                    "weight_decay": args.weight_decay * 0.1,
                },
                {"params": self.gains, "lr": args.lr_embed, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        self.base = [(g, g["lr"]) for o in (self.muon, self.adam) for g in o.param_groups]

    def resume(self):
        args, state = self.args, self.state
        saved = torch.load(self.ckpt, weights_only=False)
        self.model.load_state_dict(saved["model"])
        self.muon.load_state_dict(saved["muon"])
        self.adam.load_state_dict(saved["adam"])
        self.code.restore(saved["code"])
        self.chat.restore(saved["chat"])
        state.update(saved["state"])
        if args.polish:
            self.chat = ChatStream(Docs(args.data, args.chat_name))
            state.update(
                decay_from=state["step"], rate=args.polish, target=state["step"] + args.decay
            )
        if args.restart_decay:
            state.update(decay_from=None, rate=1.0, target=args.steps)

    def make_loss(self):
        model, amp, teacher = self.model, self.amp, None
        if self.args.teacher:
            from transformers import AutoModelForCausalLM

            teacher = AutoModelForCausalLM.from_pretrained(
                self.args.teacher, dtype=torch.float32, attn_implementation="block"
            ).eval()
        self.fn = (
            (lambda x, y: distill_sum(model, teacher, x, y, amp))
            if teacher
            else (lambda x, y: loss_sum(model, x, y, amp))
        )
        self.fast = (
            torch.compile(self.fn, dynamic=False) if self.args.compile else self.fn
        )  # long rows are few: not worth a second compilation

    def checkpoint(self):
        tmp = self.ckpt.with_suffix(".tmp")
        torch.save(
            {
                "model": self.model.state_dict(),
                "muon": self.muon.state_dict(),
                "adam": self.adam.state_dict(),
                "code": self.code.state(),
                "chat": self.chat.state(),
                "state": self.state,
            },
            tmp,
        )
        tmp.replace(self.ckpt)

    def schedule(self):
        """Rate and row length of the next step; None when training is over."""
        args, state = self.args, self.state
        s = state["step"]
        left_s = (
            args.budget_min * 60 - (time.time() - self.started) if args.budget_min else math.inf
        )
        if state["decay_from"] is None:
            wind_down = (args.wind_down or args.work / "WIND_DOWN").exists()
            if s >= args.steps - args.decay or wind_down or left_s < args.decay_min * 60:
                state["decay_from"] = s
                state["target"] = min(args.steps, s + args.decay) if wind_down else args.steps
                self.checkpoint()
                print(f"decay from step {s}", flush=True)
        rate, width = min(1.0, (s + 1) / args.warmup), args.len
        if state["decay_from"] is not None:
            fit = left_s * self.pace[1] / self.pace[0] if self.pace[1] > 5 else math.inf
            if fit < 30:  # the time is up: the last steps, whatever they take
                state["target"] = min(state["target"], s + 30)
            remaining = min(
                state["target"] - s, max(fit, 30) if s + 30 < state["target"] else math.inf
            )
            if remaining < 1:
                return None
            rate *= state["rate"]
            state["rate"] *= 1 - 1 / remaining
            if state["rate"] < args.long_below:
                width = args.long_len
        return rate, width

    def draw(self, width):
        """A batch in which code and chat rows are mixed over the forward passes."""
        args, state = self.args, self.state
        rows = max(1, args.rows * args.len // width)
        state["owed"] += args.chat_share * rows
        chat_rows = int(state["owed"])
        state["owed"] -= chat_rows
        x, y = make_batch(self.code, self.chat, rows, width, chat_rows)
        if rows > 1:
            perm = torch.from_numpy(np.random.RandomState(state["step"]).permutation(rows))
            x, y = x[perm], y[perm]
        return rows, x, y

    def step(self, rate, width):
        args, state = self.args, self.state
        for g, lr in self.base:
            g["lr"] = lr * rate
        rows, x, y = self.draw(width)
        count, micro, total = int((y != IGNORE).sum()), max(1, args.micro * args.len // width), 0.0
        fn = self.fast if width == args.len else self.fn
        for k in range(0, rows, micro):
            loss = fn(x[k : k + micro], y[k : k + micro]) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.embed + self.gains, 1.0).item()
        self.muon.step()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        s = state["step"]
        state["step"] += 1
        state["tokens"] += count
        self.count_time(s)
        self.ema = total if self.ema is None else 0.98 * self.ema + 0.02 * total
        if not math.isfinite(total):
            raise SystemExit("the loss is not finite")
        if state["step"] % 10 == 0:
            self.report(total, norm, rate, width, rows)
        if state["step"] % args.eval_every == 0:
            self.evaluate_some()
        if self.last - self.saved_at > args.save_min * 60:
            self.checkpoint()
            self.saved_at = time.time()

    def count_time(self, s):
        state, now = self.state, time.time()
        dt, self.last = now - self.last, now
        state["elapsed"] += dt
        state["cpu"] += time.process_time() - self.cpu_last
        self.cpu_last = time.process_time()
        if now - self.started > dt:  # not the first step, which compiles
            keep = math.exp(-dt / 600)
            self.pace = [self.pace[0] * keep + dt, self.pace[1] * keep + 1]
        self.step_s = (
            dt
            if self.step_s is None or s < 3
            else 0.9 * self.step_s + 0.1 * min(dt, 3 * self.step_s)
        )

    def report(self, total, norm, rate, width, rows):
        state = self.state
        rec = {
            "step": state["step"],
            "loss": round(total, 4),
            "ema": round(self.ema, 4),
            "tokens": state["tokens"],
            "tok_s": round(rows * width / self.step_s),
            "rate": round(rate, 4),
            "width": width,
            "norm": round(norm, 3),
            "min": round(state["elapsed"] / 60, 2),
            "cpu_min": round(state["cpu"] / 60, 2),
            "epoch": self.code.epoch,
        }
        self.log.write(json.dumps(rec) + "\n")
        self.log.flush()
        line = " ".join(f"{k} {v}" for k, v in rec.items())
        if self.args.status:
            self.args.status.write_text(line + "\n")
        if state["step"] % 50 == 0:
            print(line, flush=True)

    def evaluate_some(self):
        model, val, n, amp = self.model, self.val, self.args.len, self.amp
        res = {
            "step": self.state["step"],
            "val_code": evaluate(model, val["val_code"], False, n, 8, amp, 40),
            "val_chat_fn": evaluate(model, val["val_chat_fn"], True, n, 16, amp, 64),
            "seen_chat": evaluate(model, val["seen_chat"], True, n, 16, amp, 64),
        }
        print(json.dumps({k: round(v, 4) for k, v in res.items()}), flush=True)
        self.log.write(json.dumps(res) + "\n")

    def finish(self):
        """Save the model, and measure what was saved."""
        args, state, model, val = self.args, self.state, self.model, self.val
        self.checkpoint()
        save_model(model, args.out, state["tokens"])
        final = {
            "steps": state["step"],
            "tokens": state["tokens"],
            "minutes": round(state["elapsed"] / 60, 1),
            "cpu_minutes": round(state["cpu"] / 60, 1),
            "decay_from": state["decay_from"],
            "parameters": sum(p.numel() for p in model.parameters()),
            "code_epochs": self.code.epoch,
        }
        model.to(torch.bfloat16).float()
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


def main():
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.pid_file:
        args.pid_file.write_text(f"{os.getpid()}\n")
    torch.set_num_threads(args.threads)
    run = Run(args)
    print(f"parameters {sum(p.numel() for p in run.model.parameters())}", flush=True)
    while (scheduled := run.schedule()) is not None:
        run.step(*scheduled)
    run.finish()


if __name__ == "__main__":
    main()
