"""Checks collectives over NCCL in a group of one rank, which is all that one GPU allows.

The group is made, its calls leave what one rank sends as it is, also when they are captured in a
CUDA graph and replayed on other numbers, and it lets go at the end.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.harness import Bench
from quire.distributed.group import ProcessGroup


def check_one_rank(bench: Bench) -> None:
    """On the CPU, a miniature: over gloo."""
    device = torch.device("cpu") if bench.small else torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        group = ProcessGroup(Path(folder) / "ranks", 0, 1, device)
        bench.check("a group of one rank: an agreed number", group.least(2**40) == 2**40)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(5, 1031, device=device).to(dtype)
            is_kept = torch.equal(group.sum(x.clone()), x) and torch.equal(group.gather(x)[0], x)
            bench.check(f"a group of one rank: {dtype} is kept", is_kept)
        if not bench.small:
            bench.check("a group of one rank: in a CUDA graph", _is_kept_in_a_graph(group, device))
        bench.sync()
        group.abort()


def _is_kept_in_a_graph(group: ProcessGroup, device: torch.device) -> bool:
    """As `runtime.graphs` captures the layers of a rank."""
    static = torch.zeros(64, 4096, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        group.gather(group.sum(static.clone()))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = group.gather(group.sum(static * 2))
    static.normal_()
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(result[0], static * 2)
