"""How long a server's first token takes after kill -9, with its cache on disk and without.

    python -m benchmarks.tiers.warm_restart --model FOLDER [--tokens 8192] [--rounds 3] \\
        [--bytes-per-s 500e6] [-- further options of the servers]

A server with an empty cache folder answers a prompt, and is left alone for --idle-s. Then its
processes are killed, the files are dropped from the page cache, and a new server answers the same
prompt with one token more: its time to first token, beside

- that of a server without a cache folder, which computes the prompt;
- the bound: 1.2 times what the bytes of the prompt's blocks take at the speed of a plain read of
  the same files (cold, in the same round, into a MiB that is in use; no faster than --bytes-per-s),
  a step of one token, as the second request of the prompt takes it, and 50 ms;
- the same with a plain read by a new process into memory that it has not touched yet, in huge pages
  as the KV cache has them, 3 s after the server has ended. A virtual machine that gives free memory
  back to its host takes longer to touch it than to read a disk.

--bytes-per-s slows the servers' disk down (see `slow_disk`). Rounds alternate; medians.

Then --prompts prompts of 512 tokens are sent one after the other, the server is killed at once, and
a new one is asked for all: how much is found of what was published more than 2 s before the kill.
"""

import argparse
import contextlib
import json
import os
import random
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

from benchmarks.tiers import slow_disk
from benchmarks.tiers.restore import PLAIN_BYTES

START_S = 180.0
SHORT_TOKENS, BLOCK = 512, 16
"""Of the prompts of which it is counted what is found, and of a block."""


@dataclass(frozen=True, slots=True)
class Answer:
    """first_token_s: from the request to its first token. num_cached_tokens: of the prompt."""

    first_token_s: float
    num_cached_tokens: int


class Server:
    """`quire serve`, whose processes are one group."""

    def __init__(
        self,
        model: str,
        words: Sequence[str],
        quire: Sequence[str] = (sys.executable, "-m", "quire"),
    ) -> None:
        """quire: the command."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]
        command = [*quire, "serve", model, "--port", str(self._port), *words]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=START_S)
        self._wait_until_ready()

    @property
    def url(self) -> str:
        return str(self._client.base_url)

    @property
    def pid(self) -> int:
        """The process id of the API server."""
        return self._process.pid

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


def plain_read(folder: Path, buffer: bytearray) -> tuple[int, float]:
    """Bytes of all segments, and the seconds that reading them takes, a buffer at a time."""
    num_bytes, began_s = 0, time.perf_counter()
    for path in segments(folder):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes, time.perf_counter() - began_s


NEW_PROCESS = """
import mmap, sys, time
paths = sys.argv[2:]
time.sleep(3)
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)  # as the KV cache's is
memory, at = memoryview(memory), 0
began_s = time.perf_counter()
for path in paths:
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(memory[at : at + (1 << 20)]):
            at += count
print(time.perf_counter() - began_s)
"""


def read_into_new_memory(folder: Path) -> float:
    """Seconds that a new process takes to read all segments."""
    paths = list(segments(folder))
    num_bytes = sum(path.stat().st_size for path in paths) + (1 << 20)
    command = [sys.executable, "-c", NEW_PROCESS, str(num_bytes), *map(str, paths)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds: to the first token, computed and restored, and of a step; of a plain read, and of
    one into new memory. num_bytes: of the segments. num_found: tokens of the prompt."""

    computed_s: float
    restored_s: float
    step_s: float
    read_s: float
    new_read_s: float
    num_bytes: int
    num_found: int


def measure(options: argparse.Namespace, quire: Sequence[str], rng: random.Random) -> Round:
    prompt = new_prompt(rng, options.tokens)
    with tempfile.TemporaryDirectory(prefix="quire-cache-", dir=options.folder) as name:
        folder = Path(name)
        without = Server(options.model, options.words, quire)
        computed_s = without.ask(options.model, prompt).first_token_s
        without.kill()
        words = [*options.words, "--cache-dir", str(folder)]
        first = Server(options.model, words, quire)
        first.ask(options.model, prompt)
        time.sleep(options.idle_s)
        first.kill()
        drop_from_page_cache(folder)
        num_bytes, read_s = plain_read(folder, bytearray(PLAIN_BYTES))
        drop_from_page_cache(folder)
        new_read_s = read_into_new_memory(folder)
        drop_from_page_cache(folder)
        second = Server(options.model, words, quire)
        answer = second.ask(options.model, prompt)
        step_s = second.ask(options.model, prompt).first_token_s
        second.kill()
    throttled_s = num_bytes / options.bytes_per_s
    return Round(
        *(computed_s, answer.first_token_s, step_s),
        *(max(read_s, throttled_s), max(new_read_s, throttled_s)),
        *(num_bytes, answer.num_cached_tokens),
    )


def new_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(100, 30_000) for _ in range(num_tokens)]


def report(rounds: Sequence[Round]) -> None:
    """Print the medians, and whether the bounds are kept."""

    def median(name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in rounds))

    restored_s = median("restored_s")
    print(
        f"median: computed {median('computed_s'):.3f} s, restored {restored_s:.3f} s:"
        f" {median('computed_s') / restored_s:.1f}x"
    )
    for name, what in (("read_s", "a plain read"), ("new_read_s", "a read into new memory")):
        bound_s = 1.2 * median(name) + median("step_s") + 0.05
        print(
            f"bound by {what}: {bound_s:.3f} s, {'kept' if restored_s <= bound_s else 'NOT KEPT'}"
        )


def measure_found(options: argparse.Namespace, quire: Sequence[str], rng: random.Random) -> None:
    """Print the share of blocks that are found, by how long before the kill they were published."""
    prompts = [new_prompt(rng, SHORT_TOKENS) for _ in range(options.prompts)]
    with tempfile.TemporaryDirectory(prefix="quire-cache-", dir=options.folder) as name:
        words = [*options.words, "--cache-dir", name]
        first = Server(options.model, words, quire)
        ends_s = []
        for prompt in prompts:
            first.ask(options.model, prompt)
            ends_s.append(time.monotonic())
        killed_s = time.monotonic()
        first.kill()
        second = Server(options.model, words, quire)
        found = [second.ask(options.model, prompt).num_cached_tokens for prompt in prompts]
        second.kill()
    whole = (SHORT_TOKENS - 1) // BLOCK
    old = [count for count, end_s in zip(found, ends_s, strict=True) if killed_s - end_s > 2]
    for counts, what in ((old, "more than 2 s before"), (found, "at any time before")):
        blocks = sum(min(count // BLOCK, whole) for count in counts)
        total = whole * len(counts)
        print(f"published {what}: {blocks} of {total} blocks found, {blocks / max(total, 1):.2%}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=2.0)
    parser.add_argument("--bytes-per-s", type=float, default=float("inf"))
    parser.add_argument("--prompts", type=int, default=20, help="0: none (%(default)s)")
    parser.add_argument("--folder", help="for the cache; on the disk that is measured")
    parser.add_argument("words", nargs="*", help="further options of the servers, after --")
    options = parser.parse_args(arguments)
    rng, rounds = random.Random(0), []
    quire = [sys.executable, "-m", "quire"]
    if options.bytes_per_s < float("inf"):
        quire = slow_disk.command(options.bytes_per_s)
    for number in range(options.rounds):
        rounds.append(each := measure(options, quire, rng))
        print(
            f"round {number + 1}: computed {each.computed_s:.3f} s; restored"
            f" {each.restored_s:.3f} s, {each.num_found} of {options.tokens} tokens; read of"
            f" {each.num_bytes / 2**20:.0f} MiB {each.read_s:.3f} s, into new memory"
            f" {each.new_read_s:.3f} s; again {each.step_s:.3f} s",
            flush=True,
        )
    if rounds:
        report(rounds)
    if options.prompts:
        measure_found(options, quire, rng)
    return 0


if __name__ == "__main__":
    sys.exit(main())
