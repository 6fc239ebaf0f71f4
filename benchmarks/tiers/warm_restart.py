"""How long a server's first token takes after kill -9, with its cache on disk and without.

    python -m benchmarks.tiers.warm_restart --model FOLDER [--tokens 8192] [--rounds 5]

A server with an empty cache folder answers a prompt, and is left alone for --idle-s. Then its
processes are killed, the files are dropped from the page cache, and a new server answers the same
prompt with one token more: its time to first token, beside

- that of a server without a cache folder, which computes the prompt;
- the floor: the bytes of the prompt's blocks at the speed of a plain read of the same files (cold,
  in the same round), and a step of one token, as the second request of the prompt takes it.

Rounds alternate; medians. Also printed: how many of the prompt's tokens were found.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.tiers.restore import PLAIN_BYTES

START_S = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    """first_token_s: from the request to its first token. num_cached_tokens: of the prompt."""

    first_token_s: float
    num_cached_tokens: int


class Server:
    """`quire serve`, whose processes are one group."""

    def __init__(self, model: str, words: Sequence[str]) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]
        command = [sys.executable, "-m", "quire", "serve", model, "--port", str(self._port), *words]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=START_S)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health").status_code == 200:
                    return
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended with {self._process.returncode}")
            time.sleep(0.05)
        raise SystemExit(f"the server was not ready after {START_S:.0f} s")

    def ask(self, model: str, prompt: Sequence[int]) -> Answer:
        """One token."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_s, num_cached = None, 0
        began_s = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(response.read().decode())
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first_s = first_s or time.perf_counter() - began_s
                usage = json.loads(line.removeprefix("data: ")).get("usage")
                if usage:
                    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert first_s is not None, "no token came"
        return Answer(first_s, num_cached)

    def kill(self) -> None:
        """As a crash of the machine's memory manager would."""
        self._client.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # the engine's process is of another session
            for pid in _children_of(self._process.pid):
                os.kill(pid, signal.SIGKILL)


def _children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def segments(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*/*.seg"))


def drop_from_page_cache(folder: Path) -> None:
    for path in segments(folder):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(folder: Path) -> tuple[int, float]:
    """Bytes of all segments, and the seconds that reading them takes."""
    buffer = bytearray(PLAIN_BYTES)
    num_bytes, began_s = 0, time.perf_counter()
    for path in segments(folder):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes, time.perf_counter() - began_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=2.0)
    parser.add_argument("--folder", help="for the cache; on the disk that is measured")
    parser.add_argument("words", nargs="*", help="further options of the servers, after --")
    options = parser.parse_args(arguments)
    rng = random.Random(0)
    cold, warm, floors, steps, found = [], [], [], [], []
    for number in range(options.rounds):
        prompt = [rng.randrange(100, 30_000) for _ in range(options.tokens)]
        folder = Path(tempfile.mkdtemp(prefix="quire-cache-", dir=options.folder))
        try:
            without = Server(options.model, options.words)
            cold.append(without.ask(options.model, prompt).first_token_s)
            without.kill()
            words = [*options.words, "--cache-dir", str(folder)]
            first = Server(options.model, words)
            first.ask(options.model, prompt)
            time.sleep(options.idle_s)
            first.kill()
            drop_from_page_cache(folder)
            num_bytes, read_s = plain_read(folder)
            drop_from_page_cache(folder)
            second = Server(options.model, words)
            answer = second.ask(options.model, prompt)
            steps.append(second.ask(options.model, prompt).first_token_s)
            second.kill()
            warm.append(answer.first_token_s)
            found.append(answer.num_cached_tokens)
            floors.append(read_s)
            print(
                f"round {number + 1}: computed {cold[-1]:.3f} s; restored {warm[-1]:.3f} s,"
                f" {found[-1]} of {len(prompt)} tokens; plain read of {num_bytes / 2**20:.0f} MiB"
                f" {read_s:.3f} s; again {steps[-1]:.3f} s",
                flush=True,
            )
        finally:
            shutil.rmtree(folder)
    computed_s, restored_s = statistics.median(cold), statistics.median(warm)
    bound_s = 1.2 * statistics.median(floors) + statistics.median(steps) + 0.05
    print(f"median: computed {computed_s:.3f} s, restored {restored_s:.3f} s:", end=" ")
    print(f"{computed_s / restored_s:.1f}x; bound {bound_s:.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
