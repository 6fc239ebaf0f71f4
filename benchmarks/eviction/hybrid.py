"""`python -m benchmarks.eviction.hybrid`: prefix hits of hybrids, beside one that knows the future.

    python -m benchmarks.eviction.hybrid --kinds full,window,state --order round,random
    python -m benchmarks.eviction.hybrid --trace FILE --requests 0:3000

Sessions take turns over one pool: each request has the whole history of its session and something
new. A scheduler and its memory serve them, without a model. Beside them two oracles with the same
pool. Both keep of each session what a hit needs and no block more: the full groups' prefix, one run
of each window, one state. One gives up the session that was used least recently. The other knows
who comes next, and gives up, block by block, the tails of those that come last; a part of a prefix
is a hit for it, as if windows and states could be cut. No real cache can have more hits.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.eviction.study import names_of, slice_of
from benchmarks.eviction.traces import read_trace
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.eviction import EVICTION_ORDERS
from quire.core.memory.growth import Growth
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence as Branch
from quire.core.step import StepResult

BLOCK_SIZE, PAGE = 16, 64
WINDOW = 128
KINDS = {
    "full": (KVGroup((0,), KVKind.FULL, PAGE),),
    "window": (
        KVGroup((0,), KVKind.FULL, PAGE),
        *(KVGroup((layer,), KVKind.WINDOW, PAGE, WINDOW) for layer in range(1, 6)),
    ),
    "state": (
        KVGroup((0,), KVKind.FULL, PAGE),
        KVGroup((0,), KVKind.STATE, PAGE, None, 12),
    ),
    "window+state": (
        KVGroup((0,), KVKind.FULL, PAGE),
        KVGroup((1,), KVKind.WINDOW, PAGE, WINDOW),
        KVGroup((0,), KVKind.STATE, PAGE, None, 12),
    ),
}
OUTPUT_TOKENS = 24
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and what it is answered. session: whose history it continues, of which it has the
    first num_seen tokens."""

    session: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    num_seen: int


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens found, of those that an earlier turn of the same session had."""

    found: float
    seen: int

    @property
    def percent(self) -> float:
        return 100 * self.found / max(1, self.seen)


class Memory:
    """A scheduler that serves one request at a time, each token a number."""

    def __init__(self, groups: tuple[KVGroup, ...], num_blocks: int, order: str) -> None:
        config = KVCacheConfig(groups, num_blocks, BLOCK_SIZE, True, b"study", order)
        self.manager = KVCacheManager(config)
        self._scheduler = Scheduler(SchedulerConfig(4, CHUNK), self.manager)
        self._num_served = 0

    def serve(self, turn: Turn) -> Branch:
        """The sequence when it has ended."""
        self._num_served += 1
        root = self.manager.prefixes.start_chain("")
        params = DecodingParams(len(turn.answer))
        branch = Branch(str(self._num_served), list(turn.prompt), params, chain_root=root)
        self._scheduler.add([branch])
        while self._scheduler.has_unfinished:
            plan = self._scheduler.schedule(0.0)
            assert plan is not None
            closes = branch.num_pending_tokens > 0
            rows = [branch.row] if closes and branch.row is not None else []
            answers = [(turn.answer[branch.num_output_tokens],) for _ in rows]
            self._scheduler.apply(StepResult(plan.step_id, rows, answers))
        return branch

    def would_find(self, history: Sequence[int]) -> int:
        """Tokens of a session that it would find if that came next."""
        prefixes = self.manager.prefixes
        root = prefixes.start_chain("")
        branch = Branch("next", [*history, 1], DecodingParams(1), chain_root=root)
        return min(prefixes.match(branch).num_tokens, len(history) - 1)


def replay(
    groups: tuple[KVGroup, ...],
    turns: Iterable[Turn],
    num_blocks: int,
    order: str,
    *,
    of_all: bool = False,
) -> Hits:
    """The hits of the engine's memory.

    of_all: before each request, of all sessions that have begun, not of that which comes. Where
    any is as likely to come, that is what is to be expected, without the luck of the draw.
    """
    memory = Memory(groups, num_blocks, order)
    histories: dict[int, tuple[int, ...]] = {}
    found = seen = 0
    for turn in turns:
        if of_all:
            found += sum(map(memory.would_find, histories.values()))
            seen += sum(len(history) - 1 for history in histories.values())
        branch = memory.serve(turn)
        histories[turn.session] = turn.prompt + turn.answer
        if of_all:
            continue
        found += min(branch.num_cached_tokens, turn.num_seen)
        seen += turn.num_seen
    return Hits(found, seen)


@dataclass
class _Kept:
    """A session: the tokens of its prefix, and the time of its next turn. A guess of this time is
    minus the time of the last turn."""

    num_tokens: int = 0
    next_turn: int = sys.maxsize


@dataclass
class Oracle:
    """See the module's text. groups: whose memory it has."""

    groups: tuple[KVGroup, ...]
    num_blocks: int
    foresees: bool = True
    kept: dict[int, _Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.growth = Growth(self.groups, BLOCK_SIZE)

    def replay(self, turns: Sequence[Turn], *, of_all: bool = False) -> Hits:
        """The hits; of_all: see the function `replay`."""
        following, coming = [sys.maxsize] * len(turns), dict[int, int]()
        for index in range(len(turns) - 1, -1, -1):
            following[index] = coming.get(turns[index].session, sys.maxsize)
            coming[turns[index].session] = index
        lengths: dict[int, int] = {}
        found = seen = 0
        for index, turn in enumerate(turns):
            if of_all:
                found += sum(kept.num_tokens for kept in self.kept.values())
                seen += sum(lengths.values())
            hit = min(turn.num_seen, self.kept.pop(turn.session, _Kept()).num_tokens)
            length = len(turn.prompt) + len(turn.answer) - 1
            lengths[turn.session] = length
            if not of_all:
                found += hit
                seen += turn.num_seen
            self._make_room(self.num_blocks - self._most_held(hit, length))
            if not self.foresees or following[index] < len(turns):
                self.kept[turn.session] = _Kept(
                    length, following[index] if self.foresees else -index
                )
                self._make_room(self.num_blocks)
        return Hits(found, seen)

    def _size(self, num_tokens: int) -> int:
        """Blocks of a prefix that can be gone on from; a part of one takes its part of them."""
        rules, states = self.growth.growing, self.growth.state_size
        end = -(-num_tokens // BLOCK_SIZE)
        return sum(end - rule.first_needed(num_tokens) for rule in rules) + states

    def _most_held(self, num_found: int, num_tokens: int) -> int:
        """Blocks that a request holds at most at once, which no cache can do without.

        A step reads what its windows saw before it, and writes all that it computes; what it goes
        on from is held until it was copied.
        """
        copied = len(self.growth.growing) if num_found % BLOCK_SIZE else 0
        most, end = 0, num_found
        while end < num_tokens:
            start, end = end, min(end + CHUNK, num_tokens)
            last = -(-end // BLOCK_SIZE)
            held = sum(last - rule.first_needed(start) for rule in self.growth.windows)
            most = max(most, held + (copied if start == num_found else 0))
        most += len(self.growth.unbounded) * -(-num_tokens // BLOCK_SIZE)
        return most + self.growth.state_size * (2 if num_found else 1)

    def _make_room(self, num_blocks: float) -> None:
        """Drop tails of the sessions whose turns come last, until the rest takes num_blocks."""
        excess = sum(self._size(kept.num_tokens) for kept in self.kept.values()) - num_blocks
        for session in sorted(self.kept, key=lambda name: -self.kept[name].next_turn):
            if excess <= 0:
                return
            kept = self.kept[session]
            size = self._size(kept.num_tokens)
            if size <= excess or not (self.foresees or len(self.groups) == 1):
                del self.kept[session]
                excess -= size
            else:  # of its blocks that many, and the same part of its tokens
                kept.num_tokens = int(kept.num_tokens * (1 - excess / size))
                return


def sessions(num_sessions: int, num_turns: int, order: str, seed: int = 0) -> list[Turn]:
    """Sessions that begin with 300 to 700 tokens and go on with 20 to 100 more each turn.

    order: "round": one after the other; "random": whoever comes.
    """
    rng = random.Random(seed)
    history: dict[int, tuple[int, ...]] = {}
    turns: list[Turn] = []

    def draw(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, 30_000) for _ in range(rng.randint(least, most)))

    for place in range(num_sessions * num_turns):
        name = place % num_sessions if order == "round" else rng.randrange(num_sessions)
        before = history.get(name, ())
        prompt = before + (draw(20, 100) if before else draw(300, 700))
        answer = draw(OUTPUT_TOKENS, OUTPUT_TOKENS)
        turns.append(Turn(name, prompt, answer, max(0, len(before) - 1)))
        history[name] = prompt + answer
    return turns


def traced_sessions(path: Path, requests: slice) -> list[Turn]:
    """The turns of a trace, whose blocks stand for blocks of BLOCK_SIZE tokens.

    A request continues a session if it has all its full blocks; what else it shares with others, as
    a system prompt, is not counted. Answers are not in traces.
    """
    sessions_by_end: dict[int, int] = {}
    lengths: dict[int, int] = {}
    turns: list[Turn] = []
    for number, access in enumerate(read_trace(path)[requests]):
        ids = access.block_ids[:-1]  # the last may be partly filled
        if not ids:
            continue
        ends = [at for at, block in enumerate(ids) if block in sessions_by_end]
        session = sessions_by_end.pop(ids[ends[-1]]) if ends else number
        prompt = [1 + block * BLOCK_SIZE + at for block in ids for at in range(BLOCK_SIZE)] + [1]
        turns.append(Turn(session, tuple(prompt), (1,), lengths.get(session, 0)))
        sessions_by_end[ids[-1]], lengths[session] = session, BLOCK_SIZE * len(ids)
    return turns


def working_set(groups: tuple[KVGroup, ...], turns: Iterable[Turn]) -> float:
    """Blocks of all sessions as long as they get."""
    longest: dict[int, int] = {}
    for turn in turns:
        longest[turn.session] = max(longest.get(turn.session, 0), len(turn.prompt))
    return sum(Oracle(groups, 0)._size(length) for length in longest.values())


def table(
    groups: tuple[KVGroup, ...],
    workloads: Sequence[list[Turn]],
    shares: Sequence[float],
    *,
    of_all: bool = False,
) -> list[str]:
    """Markdown: hits in percent of what was seen, by pool; in brackets, by each oracle's.

    Of several workloads, all together. Requests that are longer than a pool are left out there.
    of_all: see `replay`; nobody knows the future then.
    """
    growth = Growth(groups, BLOCK_SIZE)
    names = [*([] if of_all else ["foresight"]), "oracle LRU", *EVICTION_ORDERS]
    lines = ["| pool | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for share in sorted(shares, reverse=True):
        hits: dict[str, list[Hits]] = {name: [] for name in names}
        for whole in workloads:
            num_blocks = int(share * working_set(groups, whole))
            turns = [
                turn
                for turn in whole
                if growth.most_to_hold(len(turn.prompt) + len(turn.answer)) <= num_blocks
            ]
            if not of_all:
                hits["foresight"].append(Oracle(groups, num_blocks).replay(turns))
            recent = Oracle(groups, num_blocks, foresees=False)
            hits["oracle LRU"].append(recent.replay(turns, of_all=of_all))
            for order in EVICTION_ORDERS:
                hits[order].append(replay(groups, turns, num_blocks, order, of_all=of_all))
        total = {
            name: Hits(sum(one.found for one in each), sum(one.seen for one in each))
            for name, each in hits.items()
        }
        cells = [f"{share:.0%}"]
        for name, one in total.items():
            ratios = [
                f"{one.found / max(1, total[oracle].found):.3f}"
                for oracle in ("foresight", "oracle LRU")
                if oracle in total and name in EVICTION_ORDERS
            ]
            cells.append(f"{one.percent:.1f}%" + (f" ({', '.join(ratios)})" if ratios else ""))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parse(arguments)
    for kind in options.kinds:
        named = {
            f"{options.sessions} sessions, {order}": [
                sessions(options.sessions, options.turns, order, seed)
                for seed in range(options.seeds)
            ]
            for order in options.order
        }
        if options.trace is not None:
            named = {options.trace.name: [traced_sessions(options.trace, options.requests)]}
        for name, workloads in named.items():
            print(f"{kind}; {name}: {sum(map(len, workloads))} requests")
            lines = table(KINDS[kind], workloads, options.pools, of_all=options.of_all)
            print("\n".join(lines), flush=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eviction.hybrid",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", type=names_of(KINDS), default=list(KINDS))
    parser.add_argument("--order", type=names_of(("round", "random")), default=["round", "random"])
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1, help="draws, whose results are added")
    parser.add_argument(
        "--of-all",
        action="store_true",
        help="count what every session would find before each request, not the one that comes",
    )
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format, instead")
    parser.add_argument("--requests", type=slice_of, default=slice(None), help="FIRST:LAST of it")
    parser.add_argument(
        "--pools",
        type=lambda text: [float(word) for word in text.split(",")],
        default=[0.25, 0.5, 0.75, 1.0, 1.1],
        help="parts of what all sessions take at their longest",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
