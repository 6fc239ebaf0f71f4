"""Agents on the nodes of a Ray cluster: Ray places the agents and watches their nodes.

Ray is the control plane only: an actor starts an agent on its node and reports the agent's address.
Tokens travel between the API server and the agents over direct connections, not over Ray. An agent
ends with its actor, and an actor with its node, so no engine runs on a node that Ray has given up.

Needs the extra `ray`. Called by `server`.
"""

import asyncio
import contextlib
import json
import logging
import os
import ssl
import subprocess
import tempfile
from functools import partial
from typing import Any

from quire.child_process import StartText, last_line, python_command, working_folder
from quire.cluster.machines.cluster_key import tls_context
from quire.cluster.machines.remote_link import AgentAccess, RemoteLink
from quire.engine_client.engine_slot import EngineSlot
from quire.errors import ConfigurationError

FIND_TIMEOUT_S = 4.0
START_TIMEOUT_S = 60.0


def load_ray() -> Any:
    """Import Ray. Raises ConfigurationError if it is not installed."""
    try:
        import ray  # an optional dependency that most servers lack
    except ImportError as error:
        raise ConfigurationError(
            "ray_address is set, but Ray is not installed; pip install 'ray>=2.50', on every node"
        ) from error
    return ray


class AgentActor:
    """The actor that Ray runs on a node; it starts the agent."""

    def __init__(self, key: bytes, log_level: str) -> None:
        """Start an agent that listens on the node's address."""
        ray = load_ray()
        self._host: str = ray.util.get_node_ip_address()
        with tempfile.NamedTemporaryFile(prefix="quire-key-") as file:
            file.write(key)
            file.flush()
            command = [*python_command("quire.cluster.machines.agent_main"), "--with-parent"]
            # The agent also ends when the node's Ray daemon ends, which this actor notices only
            # late.
            command += ["--with-process", str(os.getppid())]
            command += ["--host", self._host, "--port", "0", "--key-file", file.name]
            with contextlib.closing(StartText()) as text, os.fdopen(os.dup(2)) as stderr:
                self._agent = subprocess.Popen(
                    [*command, "--log-level", log_level, "--stderr-fd", str(stderr.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=text.descriptor,
                    cwd=working_folder(),
                    pass_fds=[stderr.fileno()],
                )
                assert self._agent.stdout is not None
                line = self._agent.stdout.readline()  # the agent writes it after reading its key
                said = text.read()
        if not line:
            self._agent.communicate()
            reason = last_line(said) or "; its node's log says why"
            raise RuntimeError(f"the agent did not start{reason}")
        self._port = int(json.loads(line)["port"])

    def address(self) -> tuple[str, int]:
        """The agent's host and port. If the agent is gone, ends the actor's process; Ray restarts
        it."""
        if self._agent.poll() is not None:
            os._exit(1)
        return self._host, self._port


class RayAgents:
    """The `EngineSlots` of one fleet: agents that Ray places. Ray reserves CPUs and GPUs for each
    agent."""

    def __init__(
        self,
        ray_address: str,
        key: bytes,
        server_id: str,
        heartbeat_s: float,
        *,
        num_engines: int,
        num_cpus: float,
        num_gpus: float,
    ) -> None:
        """Connect to the Ray cluster at `ray_address`, an address in the format of `ray.init`.
        The fleet starts with `num_engines` engines, each with `num_cpus` and `num_gpus`. Raises
        ConfigurationError if Ray is not installed or not at this address.
        """
        self._ray = load_ray()
        logging.getLogger("ray").setLevel(logging.ERROR)  # hides warnings
        self._key = key
        self._tls = tls_context(key, ssl.PROTOCOL_TLS_CLIENT)
        self._server_id = server_id
        self._num_engines = num_engines
        self._heartbeat_s = heartbeat_s
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        try:
            # Ray's processes would import from the API server's working folder, so they get an
            # empty one.
            with tempfile.TemporaryDirectory(prefix="quire-ray-") as empty_folder:
                self._ray.init(
                    address=ray_address,
                    namespace="quire",
                    log_to_driver=False,
                    configure_logging=False,
                    runtime_env={"working_dir": empty_folder},
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"there is no Ray cluster at {ray_address!r}: {error}; start one with: ray start"
                " --head"
            ) from error
        self._actors: dict[str, Any] = {}

    def initial(self) -> list[EngineSlot]:
        """See `EngineSlots`."""
        return [self.allocate(str(number)) for number in range(self._num_engines)]

    def allocate(self, name: str) -> EngineSlot:
        """See `EngineSlots`. Ray chooses the node."""
        access = AgentAccess(
            partial(self._find, name), self._tls, self._server_id, self._heartbeat_s
        )
        return EngineSlot(name, partial(RemoteLink, access=access))

    def release(self, name: str) -> None:
        """See `EngineSlots`. Ends the agent."""
        actor = self._actors.pop(name, None)
        if actor is not None:
            # Ray has many exceptions for an actor that is gone.
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    def close(self) -> None:
        """See `EngineSlots`. Disconnects from the cluster."""
        for name in list(self._actors):
            self.release(name)
        self._ray.shutdown()

    async def _find(self, name: str) -> tuple[str, int]:
        """The host and port of an agent. Raises OSError if its actor is not running."""
        is_new = name not in self._actors
        try:
            if is_new:
                self._actors[name] = self._new_actor()
            async with asyncio.timeout(START_TIMEOUT_S if is_new else FIND_TIMEOUT_S):
                host, port = await asyncio.wrap_future(self._actors[name].address.remote().future())
        except TimeoutError as error:
            raise ConnectionRefusedError(
                "Ray has no node for the replica yet: its resources are taken, or its node is gone"
            ) from error
        except self._ray.exceptions.RayError as error:
            raise ConnectionRefusedError(f"the replica's actor is gone: {error}") from error
        return host, port

    def _new_actor(self) -> Any:
        remote = self._ray.remote(AgentActor)
        return remote.options(
            max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD", **self._resources
        ).remote(self._key, "warning")
