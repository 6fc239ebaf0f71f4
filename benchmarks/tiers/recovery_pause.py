"""How long open streams pause when a server's engine is killed, with a cache folder and without.

    python -m benchmarks.tiers.recovery_pause --model FOLDER [--streams 4] [--tokens 3000] \\
        [--rounds 3] [--folder FOLDER] [-- further options of the servers]

--streams streams, each with its own prompt of --tokens tokens, are read until each has
some tokens and a second has passed; then the engine's process is killed with kill -9. Its
supervisor starts another one, which resumes the streams: it computes their prompts and what was
generated, or loads them. Of each stream: the longest time between two tokens; of a round the
longest of these. The start of the new process (Python, torch, the weights) is in it: it is measured
by a stream with a prompt of one token, which waits for little else.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import psutil

from benchmarks.tiers.warm_restart import Server, new_prompt

NEW_TOKENS = 400
BEFORE_S = 1.0
LIMIT_S = 120.0


@dataclass(slots=True)
class Stream:
    """A stream that is read by its own thread. times_s: when its events came."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def read(self, url: str, model: str) -> None:
        body = {"model": model, "prompt": self.prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        with (
            httpx.Client(base_url=url, timeout=LIMIT_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self.token_ids += choice["token_ids"]
                    self.times_s.append(time.perf_counter())

    @property
    def longest_pause_s(self) -> float:
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max(after - before for before, after in pairs)


def measure(server: Server, model: str, prompts: Sequence[list[int]]) -> list[Stream]:
    """The streams, the engine killed in their middle."""
    streams = [Stream(prompt) for prompt in prompts]
    threads = [threading.Thread(target=stream.read, args=(server.url, model)) for stream in streams]
    for thread in threads:
        thread.start()
    while not all(stream.token_ids for stream in streams):
        time.sleep(0.01)
    time.sleep(BEFORE_S)
    assert all(thread.is_alive() for thread in threads), "they ended before the kill"
    (engine,) = psutil.Process(server.pid).children()
    os.kill(engine.pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert all(len(stream.token_ids) == NEW_TOKENS for stream in streams)
    return streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a token differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=3000, help="of a prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="for the cache; on the disk that is measured")
    parser.add_argument("words", nargs="*", help="further options of the servers, after --")
    options = parser.parse_args(arguments)
    rng, are_equal = random.Random(0), True
    pauses: dict[str, list[float]] = {"start alone": [], "computed": [], "loaded": []}
    for number in range(options.rounds):
        prompts = [new_prompt(rng, options.tokens) for _ in range(options.streams)]
        found = {}
        for kind, given in (("start alone", [[5]]), ("computed", prompts), ("loaded", prompts)):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                words = ["--cache-dir", folder] if kind == "loaded" else []
                server = Server(options.model, [*options.words, *words])
                streams = measure(server, options.model, given)
                server.kill()
            found[kind] = [stream.token_ids for stream in streams]
            pauses[kind].append(max(stream.longest_pause_s for stream in streams))
        are_equal &= found["computed"] == found["loaded"]
        print(f"round {number + 1}: longest pause, s:", end=" ")
        print({kind: round(values[-1], 2) for kind, values in pauses.items()}, flush=True)
    medians = {kind: statistics.median(values) for kind, values in pauses.items()}
    print("median:", {kind: round(value, 2) for kind, value in medians.items()}, end="; ")
    rest = {kind: value - medians["start alone"] for kind, value in medians.items()}
    print(f"beyond the start: computed {rest['computed']:.2f} s, loaded {rest['loaded']:.2f} s")
    print("tokens equal" if are_equal else "TOKENS DIFFER")
    return int(not are_equal)


if __name__ == "__main__":
    sys.exit(main())
