"""Agents that Ray places: with Ray's calls played by the test, and with Ray itself where it is."""

import asyncio
import os
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.cluster.machines.cluster_keys import KEY
from tests.cluster.machines.test_agent import PATIENT
from tests.cluster.test_fleet import generate, tokens
from tests.engine_client.fleet_world import LeastOpen

from quire.cluster.machines import ray_agents
from quire.cluster.machines.ray_agents import AgentActor, RayAgents
from quire.engine_client.fleet import EngineFleet
from quire.errors import ConfigurationError


class FakeRay:
    """Runs actors in this process, and remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.killed: list[Any] = []
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.is_there = True

    def init(self, **options: Any) -> None:
        if not self.is_there:
            raise ConnectionError("nobody listens")
        # What Ray's processes would import from.
        assert os.listdir(options["runtime_env"]["working_dir"]) == []
        self.asked.append(options)

    def remote(self, kind: type) -> Any:
        def options(**resources: Any) -> Any:
            self.asked.append(resources)
            return SimpleNamespace(remote=lambda *arguments: self._actor(kind(*arguments)))

        return SimpleNamespace(options=options)

    def _actor(self, actor: Any) -> Any:
        def remote() -> Any:
            done: Future[Any] = Future()
            try:
                done.set_result(actor.address())
            except RuntimeError as error:
                done.set_exception(error)
            return SimpleNamespace(future=lambda: done)

        return SimpleNamespace(address=SimpleNamespace(remote=remote), actor=actor)

    def kill(self, handle: Any) -> None:
        self.killed.append(handle)
        handle.actor._agent.stdin.close()
        handle.actor._agent.wait(10)
        handle.actor._agent.stdout.close()

    def shutdown(self) -> None:
        self.asked.append("shutdown")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_agents, "load_ray", lambda: fake)
    return fake


def new_agents(**more: Any) -> RayAgents:
    sizes = {"num_engines": 2, "num_cpus": 1.5, "num_gpus": 0.5} | more
    return RayAgents("auto", KEY, "server", 2.0, **sizes)


def test_each_replica_has_an_actor_with_its_resources_and_its_agent_ends_with_it(ray) -> None:
    async def run() -> None:
        before = psutil.Process().children(recursive=True)
        agents = new_agents()
        fleet = EngineFleet(
            {"kv_cache_memory": "16MiB", "max_itl_ratio": 0},
            LeastOpen(),
            agents,
            max_queued_requests=9,
            recovery=PATIENT,
        )
        try:
            await fleet.start()
            assert [len(fleet.engines.ready), list(fleet.engines_by_name)] == [2, ["0", "1"]]
            one, other = generate(fleet, "a", max_tokens=5), generate(fleet, "b", max_tokens=5)
            assert await tokens(one) == await tokens(other), "the same prompt, greedy or not"
        finally:
            await fleet.shutdown(drain=False, timeout_s=5)
        assert psutil.Process().children(recursive=True) == before

    asyncio.run(asyncio.wait_for(run(), 90))
    resources = [each for each in ray.asked if isinstance(each, dict) and "num_cpus" in each]
    assert len(resources) == len(ray.killed) == 2 and ray.asked[-1] == "shutdown"
    assert (resources[0]["num_cpus"], resources[0]["num_gpus"]) == (1.5, 0.5)
    assert resources[0]["max_restarts"] == -1


def test_missing_ray_cluster_is_named(ray) -> None:
    ray.is_there = False
    with pytest.raises(ConfigurationError, match="no Ray cluster at 'auto': nobody listens"):
        new_agents()


def test_an_actor_that_is_gone_is_no_agent_for_now(ray, monkeypatch) -> None:
    def gone(self: AgentActor) -> Any:
        raise RuntimeError("the actor died")

    monkeypatch.setattr(AgentActor, "address", gone)
    agents = new_agents()
    try:
        slot = agents.initial()[0]
        find = slot.open_link.keywords["access"].find
        with pytest.raises(ConnectionRefusedError, match="actor is gone: the actor died"):
            asyncio.run(find())
    finally:
        agents.close()


def test_without_ray_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'ray>=2\.50'"):
        ray_agents.load_ray()


def test_an_agent_that_did_not_start_ends_its_actor(ray, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        AgentActor(KEY, "warning")
