"""Whether one tenant can tell by the clock what another has in the cache: samples, statistics.

    python -m benchmarks.server.cache_timing --samples 300 [--disk]

A server with keys is started. In each round alice sends a prompt that nobody has sent before; then,
in random order, bob sends the same prompt, bob sends one that nobody has sent, and alice sends hers
again. The time is from sending a call to its whole answer, one token. If bob's two kinds of calls
come from one distribution, he learns nothing; alice's own repetition is the control, which must be
told apart. Mann and Whitney's test, two-sided; the share is how often a sample of the first kind is
faster than one of the second (0.5: not to be told apart).

With --disk the server has a cache folder and a small KV cache: before the three calls alice waits
until hers is stored, and sends three times what the KV cache holds: it lies on disk only. Then,
too, bob sends new prompts while alice's is being loaded, or computed: he sees how busy the server
is, as he does without a disk. This is reported, and does not count.

Ends with 1 where bob's calls differ (p < 0.01) or alice's can't be told apart. A true null fails
once in a hundred runs.
"""

import argparse
import http.client
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.server.load_client import free_port, get_status

HOST = "127.0.0.1"
KEYS = {"alice": "alice-key-1", "bob": "bob-key-1", "operator": "operator-key-1"}
SIGNIFICANT = 0.01
START_LIMIT_S = 120.0
FIRST_TOKEN, LAST_TOKEN = 300, 4000
"""Ordinary tokens of the embedded model."""

DISK_BLOCKS = 256
"""Of the KV cache where there is a disk: of 16 tokens each."""
DISK_SERVE = (
    f"--num-blocks {DISK_BLOCKS} --max-num-seqs 8 --cache-size 4GiB --cache-writes-per-day 1TiB"
).split()
STORE_S = 0.6
"""In which an idle server stores a prompt: 1/16 of these blocks in each turn, every 0.1 s."""

Times = dict[str, list[float]]


def mann_whitney(one: Sequence[float], two: Sequence[float]) -> tuple[float, float]:
    """(share of pairs in which `one` is smaller, two-sided p by the normal approximation).

    Mann, Whitney 1947; a tie is half a pair, and the variance is corrected for ties. Good from
    about 20 samples of each.
    """
    pooled = sorted([(value, 0) for value in one] + [(value, 1) for value in two])
    rank_sum, ties, at = 0.0, 0.0, 0
    while at < len(pooled):
        end = at
        while end < len(pooled) and pooled[end][0] == pooled[at][0]:
            end += 1
        middle = (at + 1 + end) / 2  # of the ranks at + 1 to end
        rank_sum += middle * sum(1 for _, group in pooled[at:end] if group == 0)
        ties += (end - at) ** 3 - (end - at)
        at = end
    m, n = len(one), len(two)
    num_larger = rank_sum - m * (m + 1) / 2  # pairs in which `one` is the larger
    variance = m * n / 12 * (m + n + 1 - ties / ((m + n) * (m + n - 1)))
    distance = max(0.0, abs(num_larger - m * n / 2) - 0.5)
    p = math.erfc(distance / math.sqrt(2 * variance)) if variance > 0 else 1.0
    return 1 - num_larger / (m * n), p


class Client:
    """One tenant's connection."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=60)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def time_s(self, prompt: Sequence[int]) -> float:
        """Seconds of a call for one token."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "ignore_eos": True}).encode()
        started_s = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        seconds = time.perf_counter() - started_s
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {content[:500]!r}")
        return seconds


@contextmanager
def served(arguments: Sequence[str]) -> Iterator[int]:
    """The port of a server with two tenants; it is ended afterwards."""
    port = free_port(HOST)
    keys = [word for name, key in KEYS.items() for word in ("--api-key", f"{name}:{key}")]
    command = [sys.executable, "-m", "quire", "serve", "--host", HOST, "--port", str(port)]
    command += ["--log-level", "warning"]
    process = subprocess.Popen([*command, *keys, *arguments], stdout=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + START_LIMIT_S
        while get_status(HOST, port, "/health") != 200:
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError("the server does not answer /health")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Prompts:
    """Prompts that nobody has sent."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self.random, self._num_tokens = random.Random(seed), num_tokens

    def fresh(self) -> list[int]:
        return [self.random.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(self._num_tokens)]

    def fill(self, client: Client) -> None:
        """Wait until all is stored; then three times what the KV cache of DISK_BLOCKS holds."""
        time.sleep(STORE_S)
        for _ in range(3 * DISK_BLOCKS * 16 // self._num_tokens):
            client.time_s(self.fresh())


def measure(port: int, num_samples: int, prompts: Prompts, *, has_disk: bool = False) -> Times:
    """Seconds of each kind of call, in turns."""
    fresh = prompts.fresh
    alice, bob = (Client(port, KEYS[name]) for name in ("alice", "bob"))
    for client in (alice, bob):  # the first calls of a connection are slower
        for _ in range(3):
            client.time_s(fresh())
    times: Times = {"bob, known to alice": [], "bob, new": [], "alice, again": []}
    for _ in range(num_samples):
        prompt = fresh()
        alice.time_s(prompt)
        if has_disk:
            prompts.fill(alice)
        calls = list(zip(times, (bob, bob, alice), (prompt, fresh(), prompt), strict=True))
        prompts.random.shuffle(calls)
        for kind, client, each in calls:
            times[kind].append(client.time_s(each))
    return times


def measure_beside(port: int, num_samples: int, prompts: Prompts) -> Times:
    """Seconds of bob's new calls beside one of alice's, which begins a little earlier."""
    alice, bob = (Client(port, KEYS[name]) for name in ("alice", "bob"))
    times: Times = {"bob, beside a load": [], "bob, beside computing": []}
    for _ in range(num_samples):
        known = prompts.fresh()
        alice.time_s(known)
        prompts.fill(alice)
        calls = list(zip(times, (known, prompts.fresh()), strict=True))
        prompts.random.shuffle(calls)
        for kind, each in calls:
            other = threading.Thread(target=alice.time_s, args=(each,))
            other.start()
            time.sleep(0.002)
            times[kind].append(bob.time_s(prompts.fresh()))
            other.join()
    return times


def loaded_tokens(port: int) -> int:
    """That the server has loaded from disk so far, as the operator sees it."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    headers = {"Authorization": f"Bearer {KEYS['operator']}"}
    connection.request("GET", "/health", headers=headers)
    stats = json.loads(connection.getresponse().read())["engine"]
    connection.close()
    return int(stats["tiers"]["num_loaded_tokens"])


def show(times: Times) -> None:
    """Print the table."""
    print(f"{'call':22} {'samples':>8} {'p10 ms':>9} {'median ms':>10} {'p90 ms':>9}")
    for kind, values in times.items():
        deciles = [1e3 * value for value in statistics.quantiles(values, n=10)]
        print(f"{kind:22} {len(values):8} {deciles[0]:9.2f} {deciles[4]:10.2f} {deciles[8]:9.2f}")


def report(times: Times) -> int:
    """Print the table and the tests; the exit code."""
    show(times)
    known, new, again = times.values()
    share, p = mann_whitney(known, new)
    print(f"bob: known to alice against new: share {share:.3f}, p = {p:.3g}")
    control_share, control_p = mann_whitney(again, new)
    print(f"control: alice again against new: share {control_share:.3f}, p = {control_p:.3g}")
    is_blind = p >= SIGNIFICANT
    can_see = control_p < SIGNIFICANT and control_share > 0.9
    print("bob learns nothing" if is_blind else "BOB CAN TELL", end="; ")
    print("a hit would be seen" if can_see else "but NOTHING could have been seen here")
    return 0 if is_blind and can_see else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=300, help="of each kind (%(default)s)")
    parser.add_argument("--tokens", type=int, default=800, help="of a prompt (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and order (%(default)s)")
    parser.add_argument("serve", nargs="*", help="further arguments of `quire serve`, after --")
    parser.add_argument("--disk", action="store_true", help="what alice has cached lies on disk")
    args = parser.parse_args(arguments)
    prompts = Prompts(args.tokens, args.seed)
    if not args.disk:
        with served(args.serve) as port:
            return report(measure(port, args.samples, prompts))
    with (
        tempfile.TemporaryDirectory() as folder,
        served([*DISK_SERVE, "--cache-dir", folder, *args.serve]) as port,
    ):
        code = report(measure(port, args.samples, prompts, has_disk=True))
        share = loaded_tokens(port) / (args.samples * args.tokens)
        print(f"of alice's repetitions {share:.1%} were loaded from disk")
        beside = measure_beside(port, args.samples // 3, prompts)
    show(beside)
    share, p = mann_whitney(*beside.values())
    print(f"bob: beside a load against beside computing: share {share:.3f}, p = {p:.3g}")
    return code


if __name__ == "__main__":
    sys.exit(main())
