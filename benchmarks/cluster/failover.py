"""Streams over a fleet on Ray while engines, nodes and links die; for root, on Linux.

    python -m benchmarks.cluster.failover --ray-python /path/to/python-with-ray

Makes three network namespaces: a head with the server, and two Ray nodes with a replica each. 32
streams (greedy, seeded, three choices, tool calls, with log-probabilities) are read without any
fault first, then again with one fault in their midst each: the engine's process killed, the node's
daemon killed, the node's link cut. Every token and log-probability must be the same, no stream may
end with an error, and the longest pause of each kind is printed. Ends what it started.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

NAMES = ("qf", "qa", "qb")
BRIDGE = "qbr"
PORT = 8200
HEARTBEAT_S = 3.0
BETWEEN_S = 1.0
"""From the first token of all streams to the fault."""

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "maxLength": 400},
                "deep": {"type": "boolean"},
            },
            "required": ["path", "deep"],
        },
    },
}


@dataclass
class Read:
    """The result of one stream. choices: the joined deltas of each choice, with log-probabilities,
    by index."""

    choices: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    pause_s: float = 0.0
    error: str | None = None
    seconds: float = 0.0


def bodies(num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """32 calls, of four kinds."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(8):
        plain = {
            "prompt": f"import os\n\ndef function_{number}(path):\n",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 2,
            "return_token_ids": True,
        }
        found.append(("/v1/completions", plain | {"temperature": 0}))
        found.append(("/v1/completions", plain | {"temperature": 0.9, "seed": number}))
        found.append(("/v1/completions", plain | {"temperature": 0.7, "seed": number, "n": 3}))
        found.append(
            (
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": f"Find the file number {number}."}],
                    "tools": [TOOL],
                    "tool_choice": "required",
                    "max_tokens": num_tokens,
                    "temperature": 1.0,
                    "seed": number,
                    "stream": True,
                    "logprobs": True,
                },
            )
        )
    return found


async def read(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Read:
    """One stream to its end."""
    found, began_s = Read(), time.monotonic()
    last_s: float | None = None
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                found.error = (await response.aread()).decode()
                return found
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    found.error = str(event["error"])
                    continue
                now_s = time.monotonic()
                if last_s is not None:
                    found.pause_s = max(found.pause_s, now_s - last_s)
                last_s = now_s
                for choice in event["choices"]:
                    _take(found.choices.setdefault(choice["index"], {}), choice)
    except httpx.HTTPError as error:
        found.error = f"{type(error).__name__}: {error}"
    found.seconds = time.monotonic() - began_s
    return found


def _take(parts: dict[str, list[Any]], choice: dict[str, Any]) -> None:
    """Add the parts of a chunk that don't depend on how the stream was cut into chunks."""
    logprobs = choice.get("logprobs") or {}
    content = [(each["token"], each["logprob"]) for each in logprobs.get("content") or ()]
    text = choice.get("text") or ""
    for name, more in (
        ("text", list(text)),
        ("token_ids", choice.get("token_ids") or ()),
        ("logprobs", logprobs.get("token_logprobs") or content),
        ("end", [choice["finish_reason"]] if choice.get("finish_reason") else ()),
    ):
        parts.setdefault(name, []).extend(more)


async def read_all(num_tokens: int, fault: Any = None) -> list[Read]:
    """All streams at once; `fault` is called in their midst."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{PORT}", timeout=120, limits=limits
    ) as client:
        reading = [asyncio.ensure_future(read(client, *call)) for call in bodies(num_tokens)]
        if fault is not None:
            await asyncio.sleep(BETWEEN_S)
            open_now = sum(not task.done() for task in reading)
            await asyncio.to_thread(fault)
            print(f"  {open_now} streams were open", flush=True)
        return await asyncio.gather(*reading)


def report(name: str, found: list[Read], wanted: list[Read], bound_s: float) -> bool:
    """One line; whether all is as it must be."""
    errors = [each.error for each in found if each.error]
    differing = sum(a.choices != b.choices for a, b in zip(found, wanted, strict=True))
    pause_s = max(each.pause_s for each in found)
    ok = not errors and not differing and pause_s <= bound_s
    print(
        f"{name}: {len(found)} streams, {len(errors)} errors, {differing} with other tokens or"
        f" log-probabilities, longest pause {pause_s:.2f} s (bound {bound_s:.1f}):"
        f" {'ok' if ok else 'NOT OK'}",
        flush=True,
    )
    for error in errors[:3]:
        print(f"  {error}")
    return ok


# ---- machines -----------------------------------------------------------------------------------


def sh(*words: str, check: bool = True) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(words, check=check, capture_output=True, text=True)
    return done.stdout


def inside(name: str, *words: str) -> list[str]:
    """The command inside a namespace."""
    return ["ip", "netns", "exec", name, *words]


@contextmanager
def namespaces() -> Iterator[None]:
    """Three machines on one switch; all that runs in them is ended at the end."""
    sh("ip", "netns", "add", BRIDGE)
    sh(*inside(BRIDGE, "ip", "link", "add", "br0", "type", "bridge"))
    sh(*inside(BRIDGE, "ip", "link", "set", "br0", "up"))
    try:
        for number, name in enumerate(NAMES, 1):
            sh("ip", "netns", "add", name)
            sh("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", f"p{name}")
            sh("ip", "link", "set", f"v{name}", "netns", name)
            sh("ip", "link", "set", f"p{name}", "netns", BRIDGE)
            sh(*inside(BRIDGE, "ip", "link", "set", f"p{name}", "master", "br0", "up"))
            sh(*inside(name, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", f"v{name}"))
            sh(*inside(name, "ip", "link", "set", f"v{name}", "up"))
            sh(*inside(name, "ip", "link", "set", "lo", "up"))
        yield
    finally:
        for name in NAMES:
            for pid in sh("ip", "netns", "pids", name, check=False).split():
                os.kill(int(pid), signal.SIGKILL)
        for name in (*NAMES, BRIDGE):
            sh("ip", "netns", "del", name, check=False)


def pids_of(name: str, *words: str) -> list[int]:
    """Processes in a namespace whose command line has all words."""
    found = []
    for pid in sh("ip", "netns", "pids", name).split():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(pid))
    return found


def start_ray(python: str, folder: str) -> None:
    """A head without CPUs for actors, and two nodes."""
    common = ["--disable-usage-stats", "--object-store-memory=100000000"]
    ray = [python, "-m", "ray.scripts.scripts", "start"]
    head = ["--head", "--node-ip-address=10.77.0.1", "--port=6379", "--num-cpus=0"]
    head += ["--include-dashboard=false", f"--temp-dir={folder}"]
    sh(*inside("qf", *ray, *head, *common))
    for number, name in ((2, "qa"), (3, "qb")):
        start_node(python, number, name)


def start_node(python: str, number: int, name: str) -> None:
    """One node with one CPU for actors."""
    words = ["--address=10.77.0.1:6379", f"--node-ip-address=10.77.0.{number}", "--num-cpus=1"]
    words += ["--disable-usage-stats", "--object-store-memory=100000000"]
    sh(*inside(name, python, "-m", "ray.scripts.scripts", "start", *words))


def wait_ready(seconds: float, num_replicas: int = 2) -> None:
    """Wait until num_replicas replicas are ready."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        try:
            answer = httpx.get(f"http://127.0.0.1:{PORT}/replicas", timeout=5).json()
            states = [each["state"] for each in answer["replicas"].values()]
            if states.count("ready") >= num_replicas:
                return
        except (httpx.HTTPError, KeyError, ValueError):
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{num_replicas} replicas were not ready after {seconds:g} s")


# ---- faults -------------------------------------------------------------------------------------


def kill_engine() -> None:
    """kill -9 of the engine's process on node a."""
    for pid in pids_of("qa", "engine_main"):
        os.kill(pid, signal.SIGKILL)


def kill_daemon() -> None:
    """kill -9 of Ray's daemon on node a, whose actors end with it."""
    for pid in pids_of("qa", "raylet/raylet"):
        os.kill(pid, signal.SIGKILL)


def cut_link() -> None:
    """Cut the link of node b."""
    sh(*inside(BRIDGE, "ip", "link", "set", "pqb", "down"))


def mend_link() -> None:
    """Restore the link of node b."""
    sh(*inside(BRIDGE, "ip", "link", "set", "pqb", "up"))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ray-python", default=sys.executable, help="with ray and quire")
    parser.add_argument("--num-tokens", type=int, default=1800)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inner:
        return measure(arguments.ray_python, arguments.num_tokens)
    with tempfile.TemporaryDirectory(prefix="qray") as folder, namespaces():
        start_ray(arguments.ray_python, folder)
        serve = [arguments.ray_python, "-m", "quire", "cluster", "serve", "--replicas", "2"]
        serve += ["--ray-address", "10.77.0.1:6379", "--port", str(PORT)]
        with (Path(folder) / "server.log").open("w") as log:
            server = subprocess.Popen(inside("qf", *serve), stdout=log, stderr=log)
            words = [sys.executable, "-m", "benchmarks.cluster.failover", "--inner"]
            words += ["--ray-python", arguments.ray_python]
            words += ["--num-tokens", str(arguments.num_tokens)]
            try:
                return subprocess.run(inside("qf", *words), check=False).returncode
            finally:
                server.send_signal(signal.SIGINT)
                server.wait(30)


def measure(python: str, num_tokens: int) -> int:
    """Within the head's namespace, beside the server."""
    wait_ready(120)
    wanted = asyncio.run(read_all(num_tokens))
    ok = report("without a fault", wanted, wanted, 60.0)
    print(f"  they take {max(each.seconds for each in wanted):.1f} s", flush=True)
    ok &= report("again", asyncio.run(read_all(num_tokens)), wanted, 1.0)
    ok &= report("engine killed", asyncio.run(read_all(num_tokens, kill_engine)), wanted, 1.0)
    wait_ready(60)
    ok &= report("daemon killed", asyncio.run(read_all(num_tokens, kill_daemon)), wanted, 1.0)
    start_node(python, 2, "qa")
    wait_ready(120)
    ok &= report("link cut", asyncio.run(read_all(num_tokens, cut_link)), wanted, HEARTBEAT_S + 1.0)
    mend_link()
    time.sleep(2)
    if not pids_of("qb", "raylet/raylet"):  # Ray has given the node up, and it has ended itself
        start_node(python, 3, "qb")
    wait_ready(120)
    ok &= report("mended", asyncio.run(read_all(num_tokens)), wanted, 1.0)
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
