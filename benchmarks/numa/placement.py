"""Where weights and KV cache lie on a machine with two memory nodes, and whether tokens are equal.

    python -m benchmarks.numa.placement

For a machine with several nodes, or the guest that `benchmarks.numa.guest` starts. Each case is an
engine of the embedded model in a process of its own:

    replicas    two engines, each told its node, as replicas of one server are
    ranks       one engine of two ranks, numa=auto
    blocked     one of the replicas, with the system calls on memory refused by a filter
    idle        a replica whose pages were moved to the other node: they come back while it is idle

Prints what share of the pages lies on the process's own node and whether the tokens are those of
numa=off, and fails where less than 99% do or a token differs.
"""

import ctypes
import json
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import quire.assembly.build
from benchmarks.numa.page_count import Counts, count_pages, pages_of, report_path
from quire import LLM, SamplingParams
from quire.numa.binding import split_for_replicas
from quire.numa.numa_options import NumaOptions
from quire.numa.stragglers import IDLE_S, Stragglers
from quire.numa.system_calls import LinuxCalls
from quire.observability import log

LEAST_SHARE = 0.99
PROMPTS = [f"{start} " * 8 for start in ("quire", "a page", "memory", "node")]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True),
] * 2
BLOCKED = {"x86_64": (237, 238, 239, 279)}
"""mbind, set_mempolicy, get_mempolicy, move_pages."""


def main() -> int:
    """Run all cases; 1 where one of them fails."""
    parts = split_for_replicas(NumaOptions(numa="auto"), 2)
    if parts is None:
        print("this machine has one memory node; benchmarks.numa.guest starts one with two")
        return 1
    first, second = (part.as_option() for part in parts)
    print(f"replicas are told {first!r} and {second!r}", flush=True)
    plain = in_child(lambda: run("off"))
    good = True
    for node, option in enumerate((first, second)):
        good &= judge(f"replica {node}", in_child(partial(run, option)), [node], plain)
    good &= judge("blocked", in_child(lambda: run_blocked(first)), [], plain)
    good &= judge("idle", in_child(lambda: run_idle(second)), [1], plain)
    plain = in_child(lambda: run("off", num_ranks=2))
    good &= judge("ranks", in_child(lambda: run("auto", num_ranks=2)), [0, 1], plain)
    print("all as it should be" if good else "FAILED", flush=True)
    return int(not good)


def in_child(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a function, called in a fork of this process, which has imported everything."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(case()).encode())
        except BaseException as error:
            traceback.print_exception(error)
            os.write(writer, json.dumps({"error": repr(error)}).encode())
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text)
    return found


def run(numa: str, num_ranks: int = 1) -> dict[str, Any]:
    """An engine's tokens, and on which nodes each of its processes has its pages."""
    llm, tokens = _generate(numa, num_ranks)
    counts = [count_pages()]
    if num_ranks > 1:
        runner: Any = llm.engine._runner
        report_path().unlink(missing_ok=True)
        os.kill(runner._workers._processes[0].pid, signal.SIGUSR1)
        while not report_path().exists():
            time.sleep(0.1)
        counts.append(json.loads(report_path().read_text()))
    return {"tokens": tokens, "counts": counts}


def _generate(numa: str, num_ranks: int = 1) -> tuple[LLM, list[list[int]]]:
    log.configure("info", "text")
    quire.assembly.build.WORKER_COMMAND = (sys.executable, "-m", "benchmarks.numa.page_count")
    options: dict[str, Any] = {"tensor_parallel_size": num_ranks, "num_threads": 2 * num_ranks}
    llm = LLM(numa=numa, max_num_seqs=4, kv_cache_memory="32MiB", max_model_len=512, **options)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return llm, [list(output.outputs[0].token_ids) for output in outputs]


def run_blocked(numa: str) -> dict[str, Any]:
    """Generate while a filter refuses system calls on memory, as in containers."""
    numbers = BLOCKED[os.uname().machine]
    lines = [(0x20, 0, 0, 0)]  # load the call's number
    lines += [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]  # allow; EPERM
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0  # PR_SET_SECCOMP
    _, tokens = _generate(numa)
    return {"tokens": tokens, "counts": []}


def run_idle(numa: str) -> dict[str, Any]:
    """Generate, move half of the KV cache's pages away, and let the engine idle."""
    llm, tokens = _generate(numa)
    calls = LinuxCalls()
    assert llm.engine.kv_memory is not None
    storage: Any = llm.engine.kv_memory
    pages = np.array(sorted(pages_of(storage.kv_storage))[::2], np.uint64)
    calls.move(pages, np.zeros(len(pages), np.int32))
    before = count_pages()["kv"]
    work = llm.engine.on_idle
    assert work is not None
    owner = getattr(work, "__self__", None)
    assert isinstance(owner, Stragglers)
    num_pieces, longest_s = 0, 0.0
    while True:
        began_s = time.perf_counter()
        wait_s = work(IDLE_S)
        longest_s = max(longest_s, time.perf_counter() - began_s)
        num_pieces += 1
        if wait_s is None or wait_s > 1.0:
            break
    print(
        f"idle: KV pages by node before: {before}; {owner.num_moved_pages} moved in {num_pieces}"
        f" pieces, the longest {1000 * longest_s:.1f} ms",
        flush=True,
    )
    return {"tokens": tokens, "counts": [count_pages()]}


def judge(name: str, found: dict[str, Any], nodes: list[int], plain: dict[str, Any]) -> bool:
    """Print a case. nodes: of each of its processes, the node where its pages should be."""
    if "error" in found or "error" in plain:
        print(f"{name}: {found.get('error', 'there is nothing to compare with')}", flush=True)
        return False
    good: bool = found["tokens"] == plain["tokens"]
    counts: list[Counts] = found["counts"]
    for node, count in zip(nodes, counts, strict=True):
        for what, by_node in count.items():
            num_pages = sum(by_node.values())
            share = by_node.get(str(node), 0) / max(1, num_pages)
            good = good and share >= LEAST_SHARE
            print(f"{name}: {what}: {share:.2%} of {num_pages} pages on node {node}", flush=True)
    same = "equal" if found["tokens"] == plain["tokens"] else "DIFFERENT"
    print(f"{name}: tokens with numa=off: {same}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
