"""Reads what prepare.py wrote: documents as token ids, and endless rows of them for training."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch

EOT_ID, IGNORE = 0, -100


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
