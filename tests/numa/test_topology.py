"""What is read of a machine's files, recorded and real."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.numa.trees import (
    CXL,
    EIGHT_NODES,
    GIB,
    MEMORY_LESS,
    NO_NODES,
    ONE_NODE,
    SMT,
    TWO_NODES,
    Recorded,
)

from quire.numa.topology import format_list, parse_list, read_topology


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("", ()),
        ("7", (7,)),
        ("4-5,0", (0, 4, 5)),
        ("0-15:2/4", (0, 1, 4, 5, 8, 9, 12, 13)),
    ],
)
def test_lists_are_those_of_the_kernel(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers
    assert parse_list(format_list(numbers)) == numbers


@pytest.mark.parametrize("text", ["a", "0-", "1..3", "-1", "0-9999999", "0 1"])
def test_other_texts_are_no_lists(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number nor a range"):
        parse_list(text)


def test_a_list_is_printed_in_runs() -> None:
    assert format_list([8, 0, 1, 2, 3, 10, 11]) == "0-3,8,10-11"
    assert format_list([]) == ""


def test_two_sockets_with_smt(tmp_path: Path) -> None:
    found = read_topology(SMT.write(tmp_path))
    assert [node.cpus for node in found.nodes] == [
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    ]
    assert found.cores == tuple((first, first + 8) for first in range(8))
    assert [node.memory_bytes for node in found.nodes] == [64 * GIB, 64 * GIB]
    assert found.nodes[0].free_bytes == 40 * GIB  # free, and files that can be dropped
    assert found.nodes[0].distances == {0: 10, 1: 21}
    assert found.has_several


def test_a_machine_without_nodes(tmp_path: Path) -> None:
    found = read_topology(NO_NODES.write(tmp_path))
    assert found.nodes == ()
    assert found.cores == ((0,), (1,), (2,), (3,))
    assert not found.has_several


def test_one_node_leaves_no_choice(tmp_path: Path) -> None:
    found = read_topology(ONE_NODE.write(tmp_path))
    assert found.memory_nodes == (0,)
    assert not found.has_several


def test_memory_and_cores_need_not_be_together(tmp_path: Path) -> None:
    bare = read_topology(MEMORY_LESS.write(tmp_path / "memory-less"))
    assert bare.memory_nodes == (0, 2)
    assert bare.nodes[1].cpus == (2, 3)
    cxl = read_topology(CXL.write(tmp_path / "cxl"))
    assert cxl.memory_nodes == (0, 1, 2, 3)
    assert cxl.nodes[3].cpus == ()


def test_cpus_and_nodes_that_are_not_allowed_are_left_out(tmp_path: Path) -> None:
    tree = replace(SMT, cpus_allowed="0-1,4,8-9,12", mems_allowed="1")
    found = read_topology(tree.write(tmp_path))
    assert found.cpus == (0, 1, 4, 8, 9, 12)
    assert found.cores == ((0, 8), (1, 9), (4, 12))
    assert found.memory_nodes == (1,)
    assert found.nodes[0].free_bytes == 0


def test_offline_cpus_are_left_out(tmp_path: Path) -> None:
    found = read_topology(replace(SMT, offline=[0, 9]).write(tmp_path))
    assert found.cores == ((1,), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15), (8,))


def test_distances_belong_to_the_nodes_that_are_online(tmp_path: Path) -> None:
    tree = Recorded({0: ([0], 4), 5: ([1], 4)}, [[10, 40], [40, 10]])
    first, second = read_topology(tree.write(tmp_path)).nodes
    assert (first.distance(second), second.distance(first), first.distance(first)) == (40, 40, 10)


def test_without_a_table_another_node_is_farther_than_the_own(tmp_path: Path) -> None:
    first, second = read_topology(replace(TWO_NODES, distances=()).write(tmp_path)).nodes
    assert (first.distance(first), first.distance(second)) == (10, 20)


def test_a_core_lies_on_one_node_whatever_a_guest_is_shown(tmp_path: Path) -> None:
    guest = Recorded({0: ([0, 2], 8), 1: ([1, 3], 8)}, siblings=[(0, 1), (2, 3)])
    assert read_topology(guest.write(tmp_path)).cores == ((0,), (1,), (2,), (3,))


def test_a_topology_can_be_narrowed(tmp_path: Path) -> None:
    whole = read_topology(EIGHT_NODES.write(tmp_path))
    found = whole.only(nodes=[1, 7])
    assert [node.id for node in found.nodes] == [1, 7]
    assert found.cpus == (3, 4, 5, 21, 22, 23)
    assert whole.only([4, 5, 6], [1]).cpus == (4, 5)
    assert whole.only() == whole


def test_this_machine_can_be_read() -> None:
    found = read_topology()
    assert found.cores
    assert {cpu for node in found.nodes for cpu in node.cpus} <= set(found.cpus)
