"""Threads and memory keep to the part; where the system refuses, one line says so."""

import errno
import logging
import os
import threading
from pathlib import Path

import pytest
from tests.forking import Forks
from tests.numa.fake_calls import FakeCalls
from tests.numa.trees import CXL, GIB, MEMORY_LESS, NO_NODES, ONE_NODE, SMT, TWO_NODES, Recorded

from quire.errors import ConfigurationError
from quire.numa import binding as binding_module
from quire.numa.binding import (
    Binding,
    choose_binding,
    choose_part,
    has_own_policy,
    split_for_replicas,
    unbind_threads,
    unbound_cpus,
)
from quire.numa.numa_options import NumaOptions
from quire.numa.planning import Part
from quire.numa.system_calls import MemoryPolicy
from quire.numa.topology import Topology, read_topology

LOGGER = "quire.numa.binding"


def chosen(numa: str, tree: Recorded, root: Path, *, rank: int = 0, size: int = 1) -> Part | None:
    return choose_part(NumaOptions(numa), rank, size, read_topology(tree.write(root)))


@pytest.fixture
def two_nodes(tmp_path: Path) -> Topology:
    return read_topology(TWO_NODES.write(tmp_path))


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What the thread may run on, as a fake system has it; the last is now."""
    found = [set(range(16))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(found[-1]))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: found.append(set(cpus)))
    monkeypatch.setattr(binding_module._thread, "before", None)
    return found


@pytest.mark.parametrize("tree", [NO_NODES, ONE_NODE])
@pytest.mark.parametrize("size", [1, 2])
def test_on_one_node_nothing_happens(
    tree: Recorded,
    size: int,
    tmp_path: Path,
    affinity: list[set[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topology = read_topology(tree.write(tmp_path))
    monkeypatch.setattr(binding_module, "read_topology", lambda: topology)
    monkeypatch.setattr(binding_module, "LinuxCalls", lambda: pytest.fail("a system call"))
    with caplog.at_level(logging.DEBUG):
        made = choose_binding(NumaOptions(), 0, size, num_threads=None, most_threads=None)
    assert made is None
    assert (len(affinity), caplog.records) == (1, [])


def test_auto_gives_a_rank_its_node_and_off_nothing(tmp_path: Path) -> None:
    part = chosen("auto", SMT, tmp_path, rank=1, size=2)
    assert part is not None
    assert (part.memory_nodes, part.cpus) == ((1,), (4, 5, 6, 7))
    assert chosen("off", SMT, tmp_path, rank=1, size=2) is None


def test_named_nodes_and_cpus_are_kept_to(tmp_path: Path) -> None:
    part = chosen("1:5-6,13", SMT, tmp_path)
    assert part is not None
    assert (part.memory_nodes, part.cpus, part.siblings) == ((1,), (5, 6), (13,))
    second = chosen("1", SMT, tmp_path, rank=1, size=2)
    assert second is not None
    assert second.cpus == (6, 7)


def test_single_memory_node_is_bound(tmp_path: Path) -> None:
    part = chosen("0", ONE_NODE, tmp_path)
    assert part is not None
    assert part.memory_nodes == (0,)


def test_named_memory_without_cores_is_used(tmp_path: Path) -> None:
    part = chosen("0,2", CXL, tmp_path)
    assert part is not None
    assert (part.memory_nodes, part.cpus) == ((0, 2), (0, 1))
    for rank in (0, 1):  # of one node: both use its memory, and that behind it
        shared = chosen("0,2", CXL, tmp_path, rank=rank, size=2)
        assert shared is not None
        assert (shared.memory_nodes, shared.cpus) == ((0, 2), (rank,))


@pytest.mark.parametrize(
    ("numa", "tree", "sentence"),
    [
        ("2", TWO_NODES, "node 2 does not exist: this machine has nodes 0-1; name others, or set"),
        ("0", NO_NODES, "node 0 does not exist: this machine has no nodes, as Linux shows it"),
        ("1", MEMORY_LESS, "no memory that this process may use; it may use that of nodes 0,2"),
        ("2", CXL, "on these nodes this process may run on no CPU"),
        ("0:0-4", TWO_NODES, "on these nodes this process may run on CPUs 0-3 only"),
    ],
)
def test_missing_nodes_and_cpus_are_refused(
    numa: str, tree: Recorded, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"numa is '{numa}', but .*{sentence}"):
        chosen(numa, tree, tmp_path)


def test_memory_comes_from_the_node_meanwhile(two_nodes: Topology) -> None:
    part = choose_part(NumaOptions(), 1, 2, two_nodes)
    assert part is not None
    calls = FakeCalls()
    there = [(0, 4096)]
    bound = Binding(part, two_nodes, 4, calls=calls, regions=lambda: list(there))
    bound.expect(2 * GIB)
    with bound.memory_of_part():
        calls.made.append("weights")
        there.append((8192, 65536))
    bound.place(4096, 8192)
    assert calls.made == [
        ("BIND", (1,)),
        "weights",
        ("DEFAULT", ()),
        ("BIND", (1,), 8192, 65536 - 8192),
        ("BIND", (1,), 4096, 8192),
    ]


def test_several_nodes_take_turns(two_nodes: Topology) -> None:
    part = choose_part(NumaOptions(), 0, 1, two_nodes)
    assert part is not None
    calls = FakeCalls()
    bound = Binding(part, two_nodes, 4, calls=calls, regions=lambda: [])
    assert not bound.leaves_nodes
    with bound.memory_of_part():
        pass
    assert calls.made == [("INTERLEAVE", (0, 1)), ("DEFAULT", ())]


def test_memory_that_does_not_fit_may_lie_on_other_nodes(
    two_nodes: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    part = choose_part(NumaOptions(), 0, 2, two_nodes)
    assert part is not None
    calls = FakeCalls()
    bound = Binding(part, two_nodes, 4, calls=calls)
    assert bound.free_bytes == 20 * GIB
    bound.expect(20 * GIB)
    bound.place(0, 4096)
    assert calls.made == [("PREFERRED", (0,), 0, 4096)]
    (line,) = caplog.messages
    assert "more than is free on node 0" in line


@pytest.mark.parametrize(
    ("code", "hint"), [(errno.EPERM, True), (errno.ENOSYS, True), (errno.EINVAL, False)]
)
def test_refused_calls_degrade_with_one_line(
    code: int,
    hint: bool,
    two_nodes: Topology,
    affinity: list[set[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    part = choose_part(NumaOptions(), 1, 2, two_nodes)
    assert part is not None
    bound = Binding(part, two_nodes, 4, calls=FakeCalls(refused=code))
    bound.bind_threads()
    with bound.memory_of_part():
        pass
    bound.place(0, 4096)
    assert affinity[-1] == {4, 5, 6, 7}, "threads are bound all the same"
    assert not bound.binds_memory
    (line,) = caplog.messages
    assert "memory can't be bound to node 1, since get_mempolicy is refused" in line
    assert ("capability SYS_NICE" in line) == hint


def test_a_policy_from_outside_stays_unless_nodes_are_named(two_nodes: Topology) -> None:
    part = choose_part(NumaOptions(), 0, 2, two_nodes)
    assert part is not None
    calls = FakeCalls(policy=MemoryPolicy.BIND)
    bound = Binding(part, two_nodes, 4, calls=calls)
    with bound.memory_of_part():
        bound.place(0, 4096)
    assert calls.made == []
    named = Binding(part, two_nodes, 4, calls=calls, respects_policy=False)
    named.place(0, 4096)
    assert calls.made == [("BIND", (0,), 0, 4096)]


def test_the_next_engine_of_a_process_finds_the_whole_machine(
    tmp_path: Path, affinity: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = read_topology(SMT.write(tmp_path))
    monkeypatch.setattr(binding_module, "read_topology", lambda: topology)
    for rank in (0, 1):
        unbind_threads()
        assert affinity[-1] == set(range(16))
        bound = choose_binding(NumaOptions(), rank, 2, num_threads=None, most_threads=3)
        assert bound is not None
        bound.bind_threads()
        assert bound.num_threads == 3
        assert affinity[-1] == set(bound.part.cpus)
    unbind_threads()
    assert affinity[-1] == set(range(16))


@pytest.mark.parametrize(
    ("numa", "tree", "values"),
    [
        ("auto", SMT, ("0:0-3,8-11", "1:4-7,12-15")),
        ("1", SMT, ("1:4-5,12-13", "1:6-7,14-15")),
        ("0:0-1,8-9", SMT, ("0:0,8", "0:1,9")),
        ("0", ONE_NODE, ("0:0-1", "0:2-3")),
        ("auto", ONE_NODE, None),
        ("off", SMT, None),
    ],
)
def test_replicas_divide_what_is_named(
    numa: str,
    tree: Recorded,
    values: tuple[str, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = read_topology(tree.write(tmp_path))
    monkeypatch.setattr(binding_module, "read_topology", lambda: topology)
    parts = split_for_replicas(NumaOptions(numa), 2)
    assert (None if parts is None else tuple(part.as_option() for part in parts)) == values
    for value in values or ():
        assert choose_part(NumaOptions(value), 0, 1, topology) is not None


def test_a_machine_that_shows_nothing_binds_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Topology:
        raise PermissionError(errno.EACCES, "Permission denied", "/sys")

    monkeypatch.setattr(binding_module, "read_topology", refuse)
    for numa in ("off", "auto"):
        assert split_for_replicas(NumaOptions(numa), 2) is None
        assert choose_binding(NumaOptions(numa), 0, 1, num_threads=1, most_threads=None) is None
    assert len(caplog.messages) == 2 and "nothing is bound" in caplog.messages[0]
    with pytest.raises(ConfigurationError, match="nodes of this machine can't be read"):
        split_for_replicas(NumaOptions("0"), 2)


def test_threads_bound_by_others_stay_bound(affinity: list[set[int]]) -> None:
    affinity.append({3})
    unbind_threads()
    assert affinity[-1] == {3}


PROGRAM = """
import ctypes, logging, struct, sys
from pathlib import Path
from quire.observability import log
from quire.offline.llm import LLM
from quire.numa.system_calls import LinuxCalls
from quire.numa.regions import anonymous_memory
import numpy as np

def refuse(numbers):
    '''A filter of system calls, as a container's: these raise EPERM.'''
    lines = [(0x20, 0, 0, 0)]
    lines += [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    kept = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0, ctypes.get_errno()

def tokens(numa):
    llm = LLM(numa=numa, num_threads=1, max_num_seqs=2, kv_cache_memory="4MiB", max_model_len=64)
    (output,) = llm.generate(["quire"], use_tqdm=False)
    storage = llm.engine.kv_memory.kv_storage
    return output.outputs[0].token_ids, storage, llm.engine.facts.get("numa")

log.configure("info", "text")
calls = LinuxCalls()
"""


def test_a_real_engine_keeps_to_a_node(forks: Forks, native_engine: None) -> None:
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("this system has no NUMA")
    code, printed = forks.run(
        "-c",
        f"""{PROGRAM}
plain, _, fact = tokens("off")
assert fact is None
bound, storage, fact = tokens("0")
assert bound == plain
assert fact == "node 0", fact
begin = storage.data_ptr() // 4096 * 4096
nodes = calls.nodes_of(np.arange(begin, begin + storage.nbytes, 4096, dtype=np.uint64))
assert set(nodes.tolist()) <= {{0, -2}} and 0 in nodes, set(nodes.tolist())
regions = anonymous_memory()
assert any(begin <= storage.data_ptr() < end for begin, end in regions)
assert calls.thread_policy() == 0
""",
    )
    assert code == 0, printed
    assert printed.count("numa:") == 1, printed
    assert "numa: 1 threads on CPUs" in printed


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of its system calls")
def test_a_filter_of_system_calls_leaves_the_pinning(forks: Forks, native_engine: None) -> None:
    if not Path("/sys/devices/system/node/node0").is_dir():
        pytest.skip("this system has no NUMA")
    code, printed = forks.run(
        "-c",
        f"""{PROGRAM}
plain, _, _ = tokens("off")
refuse([237, 238, 239, 279])
bound, _, fact = tokens("0")
assert bound == plain
import os
assert os.sched_getaffinity(0)
""",
    )
    assert code == 0, printed
    assert printed.count(" WARNING ") == 1, printed
    assert "get_mempolicy is refused (Operation not permitted; in a container" in printed


def test_processes_that_share_a_node_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = read_topology(TWO_NODES.write(tmp_path))
    monkeypatch.setattr(binding_module, "read_topology", lambda: topology)
    whole = topology.nodes[0].free_bytes

    def free(numa: str, num_ranks: int, num_engines: int = 1) -> int:
        found = choose_binding(
            NumaOptions(numa),
            0,
            num_ranks,
            num_threads=1,
            most_threads=None,
            num_engines=num_engines,
        )
        assert found is not None
        return found.free_bytes

    assert [free("auto", 2), free("0", 1)] == [whole, whole]
    assert [free("0", 2), free("auto", 4), free("0", 1, 2)] == [whole // 2] * 3
    assert free("0", 2, 2) == whole // 4
    shared = choose_binding(NumaOptions("0"), 0, 2, num_threads=1, most_threads=None)
    assert shared is not None
    shared.expect(whole * 6 // 10)  # each of the two: more than there is
    assert not shared._is_strict


def test_memory_that_is_gone_meanwhile_ends_nothing(two_nodes: Topology) -> None:
    part = choose_part(NumaOptions(), 1, 2, two_nodes)
    assert part is not None
    calls = FakeCalls(refused=errno.EFAULT)
    bound = Binding(part, two_nodes, 4, calls=calls)
    bound.place(0, 4096)
    calls.refused = None
    bound.place(0, 4096)
    assert bound.binds_memory and calls.made == [("BIND", (1,), 0, 4096)]


def test_each_thread_knows_what_bound_it(affinity: list[set[int]], two_nodes: Topology) -> None:
    part = choose_part(NumaOptions(), 0, 2, two_nodes)
    assert part is not None
    Binding(part, two_nodes, 4, calls=FakeCalls()).bind_threads()
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(unbound_cpus()))
    thread.start()
    thread.join()
    assert found == [{0, 1, 2, 3}], "another thread was bound by nobody"
    assert unbound_cpus() == set(range(16))


def test_a_policy_of_the_process_is_found() -> None:
    assert not has_own_policy(FakeCalls())
    assert has_own_policy(FakeCalls(policy=MemoryPolicy.INTERLEAVE))
    assert not has_own_policy(FakeCalls(refused=errno.EPERM))


def test_nodes_without_any_cpu_bound_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Recorded({0: ((), 64), 1: ((), 64)}, cpus=range(4))
    topology = read_topology(tree.write(tmp_path))
    monkeypatch.setattr(binding_module, "read_topology", lambda: topology)
    found = choose_binding(NumaOptions(), 0, 1, num_threads=None, most_threads=None)
    assert found is not None and found.part.cpus == (0, 1, 2, 3)
    found.expect(GIB)
    assert not found.binds_memory and found.free_bytes is None
