"""`quire doctor` draws recorded machines."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.doctor.test_findings import SOUND, advices
from tests.numa.trees import (
    CXL,
    EIGHT_NODES,
    MEMORY_LESS,
    NO_NODES,
    ONE_NODE,
    SMT,
    Recorded,
)

from quire.cli.doctor.findings import describe
from quire.cli.doctor.nodes import advice_on_nodes, draw_nodes, sum_up_nodes
from quire.numa.topology import read_topology


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (NO_NODES, "the system shows no memory nodes; auto: nothing is bound"),
        (ONE_NODE, "1 node, one with memory for this process; auto: nothing is bound"),
        (
            SMT,
            "2 nodes; auto: one rank uses nodes 0-1 (8 threads);"
            " 2 ranks use node 0 (4 threads) | node 1 (4 threads)",
        ),
        (
            MEMORY_LESS,
            "4 nodes; auto: one rank uses nodes 0,2 (8 threads);"
            " 2 ranks use node 0 (4 threads) | node 2 (4 threads)",
        ),
        (
            replace(SMT, mems_allowed="1"),
            "2 nodes, one with memory for this process; auto: nothing is bound",
        ),
        (replace(CXL, cpus_allowed="0-1"), "4 nodes; auto: one rank uses node 0 (2 threads)"),
        (
            Recorded({0: ((), 64), 1: ((), 64)}, cpus=range(4)),
            "2 nodes; auto: one rank uses any node (4 threads)",
        ),
    ],
)
def test_the_summary_of_nodes_says_what_auto_does(
    tree: Recorded, text: str, tmp_path: Path
) -> None:
    assert sum_up_nodes(read_topology(tree.write(tmp_path))) == text


def test_the_nodes_are_drawn(tmp_path: Path) -> None:
    topology = read_topology(CXL.write(tmp_path))
    assert list(draw_nodes(topology)) == [
        "node      memory        free  cores  CPUs                      to 0  to 1  to 2  to 3",
        "   0    32.0 GiB    20.0 GiB      2  0-1                         10    21    14    24",
        "   1    32.0 GiB    20.0 GiB      2  2-3                         21    10    24    14",
        "   2   128.0 GiB    80.0 GiB      0  none                        14    24    10    26",
        "   3   128.0 GiB    80.0 GiB      0  none                        24    14    26    10",
    ]


def test_one_node_is_not_drawn(tmp_path: Path) -> None:
    assert list(draw_nodes(read_topology(ONE_NODE.write(tmp_path)))) == []


def test_several_nodes_are_advised_on(tmp_path: Path) -> None:
    topology = read_topology(EIGHT_NODES.write(tmp_path))
    machine = replace(SOUND, topology=topology)
    assert "--tensor-parallel-size 8 gives each of 8 processes" in advices(machine)[0]
    lines = list(describe(machine))
    first = next(i for i, line in enumerate(lines) if "NUMA" in line)
    assert lines[first + 1].split()[0] == "node"
    assert len(lines[first + 2 : first + 10]) == 8
    assert list(advice_on_nodes(read_topology(ONE_NODE.write(tmp_path / "one")))) == []
