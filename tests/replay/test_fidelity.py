"""A recording's replay finds as much in an endless prefix cache as the load that was recorded."""

import heapq
import random
from dataclasses import dataclass

import pytest
from benchmarks.server.recording import TalkLoad, draw_talks

from quire.replay.script import ModelBounds, ReplayScript
from quire.traces.prefix_ids import PrefixIds
from quire.traces.trace import Trace, TraceRequest

BOUNDS = ModelBounds(2**31, 4000)
ANSWER_S = 0.15


@dataclass(frozen=True)
class Served:
    number: int
    at_s: float
    prompt: list[int]
    output: list[int]


class EndlessCache:
    """Finds prompts to the token, and keeps all but the last token of an answer."""

    def __init__(self) -> None:
        self._prefixes: set[int] = set()
        self.num_hit_tokens = self.num_tokens = 0

    def ask(self, prompt: list[int]) -> None:
        prefix, num_found = 0, 0
        for token in prompt[:-1]:
            prefix = hash((prefix, token))
            if prefix not in self._prefixes:
                break
            num_found += 1
        self.num_hit_tokens += num_found
        self.num_tokens += len(prompt)

    def keep(self, tokens: list[int]) -> None:
        prefix = 0
        for token in tokens:
            prefix = hash((prefix, token))
            self._prefixes.add(prefix)


def serve(trace: Trace) -> tuple[float, list[Served]]:
    """The hit rate, and what was served in the order of the ends; answers are random tokens."""
    script, cache, chance = ReplayScript(trace, BOUNDS), EndlessCache(), random.Random(7)
    events: list[tuple[float, int, Served | None]] = [
        (due.at_s, due.number, None) for due in script.first
    ]
    heapq.heapify(events)
    served = []
    while events:
        now_s, number, ended = heapq.heappop(events)
        if ended is None:
            prompt = script.prompt(number)
            cache.ask(prompt)
            output = chance.choices(range(2**31), k=script.num_output_tokens(number))
            heapq.heappush(
                events, (now_s + ANSWER_S, number, Served(number, now_s, prompt, output))
            )
            continue
        cache.keep(ended.prompt + ended.output[:-1])
        served.append(ended)
        for due in script.end(number, now_s, ended.prompt, ended.output):
            heapq.heappush(events, (due.at_s, due.number, None))
    return cache.num_hit_tokens / cache.num_tokens, served


def recorded(served: list[Served], block_tokens: int) -> Trace:
    """As the server's recorder has it."""
    ids, ended_s = PrefixIds(block_tokens), {}
    arrivals = sorted(served, key=lambda each: each.at_s)
    numbers = {each.number: number for number, each in enumerate(arrivals)}
    requests: dict[int, TraceRequest] = {}
    for each in served:
        number = numbers[each.number]
        found = ids.add(number, "", each.prompt, [each.output])
        ended_s[number] = each.at_s + ANSWER_S
        parent = found.parent
        think_s = 0.0 if parent is None else each.at_s - ended_s[parent]
        if think_s < 0:
            parent, think_s = None, 0.0
        requests[number] = TraceRequest(
            each.at_s,
            len(each.prompt),
            len(each.output),
            found.prefix_ids,
            found.output_ids[0],
            parent=parent,
            think_s=think_s,
        )
    return Trace(
        block_tokens,
        tuple(requests[number] for number in sorted(requests)),
        ids.overlap.shared_tail_tokens or 0,
        ids.overlap.continued_share or 0.0,
    )


def test_hit_rates_are_within_half_a_point() -> None:
    """Of a load in which nothing is a multiple of the recording's blocks."""
    rate, served = serve(draw_talks(TalkLoad(300, 3.0)))
    trace = recorded(served, 64)
    assert trace.shared_tail_tokens and trace.continued_share
    again, _ = serve(trace)
    assert rate > 0.7
    assert again == pytest.approx(rate, abs=0.005)
