"""Counts on which nodes the weights and the KV cache of a process lie.

As a program it is a rank of tensor parallelism (`quire.engine_process.worker_main`) that writes the
counts into `rank-counts.json`, in the folder for temporary files, when it gets SIGUSR1.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from quire.numa.system_calls import PAGE_BYTES, LinuxCalls

Counts = dict[str, dict[str, int]]
"""Of "weights" and "kv": node -> pages."""


def report_path() -> Path:
    """Where a rank writes its counts."""
    return Path(tempfile.gettempdir()) / "rank-counts.json"


def count_pages() -> Counts:
    """Pages of the tensors of this process's model runner. Workspaces count as weights. The KV
    cache is written first, by a thread of its own."""
    import torch  # the rank's own thread watches its socket before that

    from quire.kernels.cpu.memory import FirstTouch
    from quire.runtime.model_runner import ModelRunner

    gc.unfreeze()  # else what was there when the engine was built is not listed
    objects = gc.get_objects()
    (runner,) = [each for each in objects if type(each) is ModelRunner]
    kv = pages_of(runner.kv_storage)
    touch = FirstTouch(runner.kv_storage, runner.kv_storage.nbytes, lambda: True)
    touch._thread.join()
    weights: set[int] = set()
    for each in objects:
        # Not isinstance, which asks torch's deprecated objects, too, and has them warn.
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            weights |= pages_of(each)
    return {"weights": nodes_of(weights - kv), "kv": nodes_of(kv)}


def pages_of(tensor: Any) -> set[int]:
    """Addresses of the pages that lie wholly within a contiguous tensor."""
    if not tensor.is_contiguous() or tensor.nbytes < PAGE_BYTES:
        return set()
    begin = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    return set(range(begin, tensor.data_ptr() + tensor.nbytes - PAGE_BYTES + 1, PAGE_BYTES))


def nodes_of(pages: set[int]) -> dict[str, int]:
    """Node -> how many of the pages are there; those that were never written are left out. Each is
    read first: one that Linux's automatic balancing has marked is else reported as not there."""
    for page in pages:
        ctypes.string_at(page, 1)
    found = LinuxCalls().nodes_of(np.array(sorted(pages), np.uint64))
    counted = Counter(found.tolist())
    if counted and max(counted) < 0:  # not a page is there, which can't be
        raise RuntimeError(f"move_pages says of all pages: {dict(counted)}")
    return {str(node): num for node, num in sorted(counted.items()) if node >= 0}


def _report(_signum: int, _frame: Any) -> None:
    part = report_path().with_suffix(".part")
    part.write_text(json.dumps(count_pages()))
    part.rename(report_path())


if __name__ == "__main__":
    from quire.engine_process import worker_main

    with contextlib.suppress(FileNotFoundError):
        report_path().unlink()
    signal.signal(signal.SIGUSR1, _report)
    code = worker_main.main()
    sys.stderr.flush()
    os._exit(code)
