"""Several ranks in one process: a thread each, over real gloo groups."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from quire.distributed.group import ProcessGroup

CPU = torch.device("cpu")

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[ProcessGroup], T]) -> list[T]:
    """What `work` returns on each rank, in order; raises what the first of them raised."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:
        place = Path(folder) / "ranks"
        jobs = [
            threads.submit(lambda rank=rank: work(ProcessGroup(place, rank, size, CPU)))
            for rank in range(size)
        ]
        return [job.result() for job in jobs]


class LoneGroup:
    """Rank `rank` of `size` without the others: what they'd send is zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.zeros(self.size, *x.shape, dtype=x.dtype)
        parts[self.rank] = x
        return parts

    def least(self, value: int) -> int:
        return value
