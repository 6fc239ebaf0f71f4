"""Which part gets which cores and memory, on recorded machines."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.numa.trees import (
    CXL,
    EIGHT_NODES,
    FOUR_NODES,
    MEMORY_LESS,
    NO_NODES,
    ONE_NODE,
    SMT,
    TWO_NODES,
    UNEVEN,
    Recorded,
)

from quire.errors import ConfigurationError
from quire.numa.numa_options import NumaOptions
from quire.numa.planning import Part, plan
from quire.numa.topology import read_topology

ALL = {
    "no nodes": NO_NODES,
    "one node": ONE_NODE,
    "two nodes": TWO_NODES,
    "SMT": SMT,
    "four nodes": FOUR_NODES,
    "eight nodes": EIGHT_NODES,
    "memory-less": MEMORY_LESS,
    "CXL": CXL,
    "uneven": UNEVEN,
    "cpuset": replace(EIGHT_NODES, cpus_allowed="3-20", mems_allowed="1-6"),
    "offline": replace(SMT, offline=[0, 9, 10]),
}


def short(parts: tuple[Part, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(part.memory_nodes, part.cpus) for part in parts]


def planned(
    tree: Recorded, num_parts: int, root: Path, *, uses_bare_memory: bool = False
) -> tuple[Part, ...]:
    return plan(read_topology(tree.write(root)), num_parts, uses_bare_memory=uses_bare_memory)


@pytest.mark.parametrize(
    ("name", "num_parts", "expected"),
    [
        ("no nodes", 2, [((), (0, 1)), ((), (2, 3))]),
        ("one node", 1, [((0,), (0, 1, 2, 3))]),
        ("one node", 2, [((0,), (0, 1)), ((0,), (2, 3))]),
        ("two nodes", 1, [((0, 1), tuple(range(8)))]),
        ("two nodes", 2, [((0,), (0, 1, 2, 3)), ((1,), (4, 5, 6, 7))]),
        ("two nodes", 3, [((0,), (0, 1)), ((0,), (2, 3)), ((1,), (4, 5, 6, 7))]),
        ("SMT", 2, [((0,), (0, 1, 2, 3)), ((1,), (4, 5, 6, 7))]),
        # Nodes of one socket come together, though their numbers don't.
        ("four nodes", 2, [((0, 2), (0, 1, 4, 5)), ((1, 3), (2, 3, 6, 7))]),
        (
            "eight nodes",
            2,
            [((0, 1, 2, 3), tuple(range(12))), ((4, 5, 6, 7), tuple(range(12, 24)))],
        ),
        (
            "eight nodes",
            4,
            [((2 * i, 2 * i + 1), tuple(range(6 * i, 6 * i + 6))) for i in range(4)],
        ),
        # Cores without memory use the nearest that there is.
        ("memory-less", 2, [((0,), (0, 1, 2, 3)), ((2,), (4, 5, 6, 7))]),
        ("CXL", 2, [((0,), (0, 1)), ((1,), (2, 3))]),
        ("uneven", 3, [((0,), (0, 1, 2, 3)), ((0,), (4, 5, 6, 7)), ((1,), (8, 9, 10, 11))]),
        ("cpuset", 2, [((1, 2, 3), tuple(range(3, 12))), ((4, 5, 6), tuple(range(12, 21)))]),
        ("offline", 2, [((0,), (1, 2, 3, 8)), ((1,), (4, 5, 6, 7))]),
    ],
)
def test_parts_of_recorded_machines(
    name: str,
    num_parts: int,
    expected: list[tuple[tuple[int, ...], tuple[int, ...]]],
    tmp_path: Path,
) -> None:
    assert short(planned(ALL[name], num_parts, tmp_path)) == expected


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 5, 7, 8, 16, 40])
def test_on_every_machine(name: str, num_parts: int, tmp_path: Path) -> None:
    topology = read_topology(ALL[name].write(tmp_path))
    parts = plan(topology, num_parts)
    assert len(parts) == num_parts
    threads = [cpu for part in parts for cpu in (*part.cpus, *part.siblings)]
    assert set(threads) <= set(topology.cpus)
    if not any(part.shares_cores for part in parts):
        assert len(threads) == len(set(threads)), "a hardware thread is of one part"
    if num_parts <= len(topology.cores) and topology.memory_nodes:
        assert {cpu for part in parts for cpu in part.cpus} | {
            cpu for part in parts for cpu in part.siblings
        } == set(topology.cpus)
    for part in parts:
        assert part.cpus
        assert set(part.memory_nodes) <= set(topology.memory_nodes)
        cores = [core for core in topology.cores if set(core) & set(part.cpus)]
        assert len(cores) == len(part.cpus), "one thread a physical core"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_a_part_is_found_again_by_its_option(name: str, num_parts: int, tmp_path: Path) -> None:
    topology = read_topology(ALL[name].write(tmp_path))
    for part in plan(topology, num_parts):
        named = NumaOptions(part.as_option()).numa_nodes
        if not topology.nodes:
            assert named is None
            continue
        assert named is not None
        nodes, cpus = named
        (again,) = plan(topology.only(cpus, nodes), 1)
        told = replace(again, shares_cores=part.shares_cores, num_sharing=part.num_sharing)
        assert told == part


@pytest.mark.parametrize(
    ("num_replicas", "values"),
    [
        (2, ["0:0-3,8-11", "1:4-7,12-15"]),
        (3, ["0:0-1,8-9", "0:2-3,10-11", "1:4-7,12-15"]),
    ],
)
def test_replicas_are_told_their_parts(
    num_replicas: int, values: list[str], tmp_path: Path
) -> None:
    parts = plan(read_topology(SMT.write(tmp_path)), num_replicas)
    assert [part.as_option() for part in parts] == values


def test_a_part_knows_how_many_have_its_memory(tmp_path: Path) -> None:
    assert [part.num_sharing for part in planned(SMT, 3, tmp_path)] == [2, 2, 1]
    assert [part.num_sharing for part in planned(ONE_NODE, 3, tmp_path / "one")] == [3, 3, 3]
    assert [part.num_sharing for part in planned(FOUR_NODES, 2, tmp_path / "four")] == [1, 1]


def test_more_parts_than_cores_share_them(tmp_path: Path) -> None:
    parts = planned(TWO_NODES, 9, tmp_path)
    assert all(len(part.cpus) == 1 for part in parts[:5])
    assert parts[0].shares_cores
    assert parts[4].cpus == parts[0].cpus
    assert not parts[5].shares_cores


def test_more_threads_than_cores_run_on_siblings_too(tmp_path: Path) -> None:
    part = planned(SMT, 2, tmp_path)[0]
    assert part.cpus_for(4) == (0, 1, 2, 3)
    assert part.cpus_for(5) == (0, 1, 2, 3, 8, 9, 10, 11)


def test_memory_without_cores_serves_where_it_is_named(tmp_path: Path) -> None:
    parts = planned(CXL, 2, tmp_path, uses_bare_memory=True)
    assert [part.memory_nodes for part in parts] == [(0, 2), (1, 3)]


def test_where_all_memory_is_without_cores_the_nearest_is_used(tmp_path: Path) -> None:
    tree = Recorded(
        {0: ([0, 1], 0), 1: ([2, 3], 0), 2: ([], 8), 3: ([], 8)},
        [[10, 20, 14, 24], [20, 10, 24, 14], [14, 24, 10, 26], [24, 14, 26, 10]],
    )
    assert short(planned(tree, 2, tmp_path)) == [((2,), (0, 1)), ((3,), (2, 3))]


def test_without_a_cpu_there_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no CPU is left"):
        plan(read_topology(TWO_NODES.write(tmp_path)).only([7], [0]), 1)
