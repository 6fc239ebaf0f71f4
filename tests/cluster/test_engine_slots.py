"""Where engines are started on this machine, and behind which agents."""

from pathlib import Path

import pytest
from tests.cluster.machines.cluster_keys import KEY
from tests.numa.trees import SMT

from quire.cluster import engine_slots
from quire.cluster.engine_slots import AgentSlots, LocalSlots
from quire.errors import ConfigurationError
from quire.numa import binding
from quire.numa.topology import read_topology


def test_each_of_the_first_engines_has_processors_and_its_share_of_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(engine_slots.os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    local = LocalSlots(2, {"device": "cpu", "numa": "off"}, most=3)
    first = local.initial()
    commands = [slot.open_link.keywords["command"][-2:] for slot in first]
    assert commands == [["--cpus", "0,1"], ["--cpus", "4,5"]]
    again, more = local.allocate("1"), local.allocate("2")
    assert again.open_link.keywords["command"][-2:] == ["--cpus", "4,5"], "as it had before"
    assert [slot.name for slot in (again, more)] == ["1", "2"]
    assert all(slot.options["engines_here"] == 3 for slot in [*first, again, more])


@pytest.mark.parametrize(
    ("limit", "options", "expected"),
    [
        (None, {}, None),
        (4.0, {}, None),  # no less than the processors
        (3.0, {}, 1),
        (3.9, {"num_threads": 2}, None),  # the whole fleet's own option says it
        (0.5, {}, 1),
    ],
)
def test_engines_share_the_time_that_control_groups_allow(
    monkeypatch, limit: float | None, options: dict[str, int], expected: int | None
) -> None:
    monkeypatch.setattr(engine_slots.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(engine_slots, "cpu_limit", lambda: limit)
    local = LocalSlots(2, {"device": "cpu", "numa": "off"} | options)
    given = [slot.options.get("num_threads") for slot in [*local.initial(), local.allocate("2")]]
    assert given == [expected] * 3


def test_gpus_are_given_out_by_their_numbers() -> None:
    local = LocalSlots(2, {"device": "cuda"})
    assert [slot.options["device"] for slot in local.initial()] == ["cuda:0", "cuda:1"]
    assert local.allocate("2").options["device"] == "cuda:2"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:1"}, "device is 'cuda:1'"),
        ({"device": "cuda", "tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"device": "cpu", "cache_dir": "/somewhere"}, "cache_dir is '/somewhere'"),
    ],
)
def test_options_that_local_replicas_cannot_share_are_refused_by_name(options, says) -> None:
    with pytest.raises(ConfigurationError, match=says):
        LocalSlots(2, options)


def test_ranks_on_a_cpu_may_have_replicas() -> None:
    assert len(LocalSlots(2, {"device": "cpu", "tensor_parallel_size": 2}).initial()) == 2


def test_agents_are_given_out_and_taken_back() -> None:
    agents = AgentSlots(["host-a:8100", "[::1]:8101"], KEY, 3.0)
    assert [slot.name for slot in agents.initial()] == ["host-a:8100", "[::1]:8101"]
    with pytest.raises(ConfigurationError, match="every agent has its replica"):
        agents.allocate("2")
    agents.release("[::1]:8101")
    assert agents.allocate("2").name == "[::1]:8101"


@pytest.mark.parametrize("address", ["host", "host:", ":8100", "host:0", "host:70000", "host:1x"])
def test_invalid_or_doubled_address_is_refused(address) -> None:
    with pytest.raises(ConfigurationError, match="each must be HOST:PORT"):
        AgentSlots([address], KEY, 3.0)
    with pytest.raises(ConfigurationError, match="twice"):
        AgentSlots(["host:1", "host:1"], KEY, 3.0)


@pytest.mark.parametrize("keeps_policy", [False, True])
def test_replicas_are_told_their_nodes_unless_memory_has_a_policy(
    keeps_policy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    topology = read_topology(SMT.write(tmp_path))
    monkeypatch.setattr(binding, "read_topology", lambda: topology)
    monkeypatch.setattr(engine_slots, "has_own_policy", lambda: keeps_policy)
    local = LocalSlots(3, {"device": "cpu"})
    first = local.initial()
    assert [slot.options["engines_on_nodes"] for slot in first] == [2, 2, 1]
    told = [slot.options.get("numa") for slot in first]
    commands = [slot.open_link.keywords["command"] for slot in first]
    if keeps_policy:
        assert told == [None] * 3
        assert [command[-1] for command in commands] == [
            "0,1,8,9",
            "2,3,10,11",
            "4,5,6,7,12,13,14,15",
        ]
    else:
        assert told == ["0:0-1,8-9", "0:2-3,10-11", "1:4-7,12-15"]
        assert all("--cpus" not in command for command in commands)


@pytest.mark.parametrize(
    ("version", "files", "found"),
    [
        ("2.13.0", ["nvidia4", "nvidia5"], True),
        ("2.13.0+cu130", ["nvidia4"], True),
        ("2.13.0", ["nvidiactl"], False),
        ("2.13.0+cpu", ["nvidia0"], False),
    ],
)
def test_gpus_are_found_as_engines_will(
    version: str, files: list[str], found: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(engine_slots, "GPU_FILES", str(tmp_path))
    monkeypatch.setattr(engine_slots.metadata, "version", lambda _: version)
    local = LocalSlots(2, {"numa": "off"})
    assert ("device" in local.initial()[0].options) is found
