"""Bugs planted around contents and their slots are caught by the fake runner or the clients.

As in `test_seeded_bugs`, with which this shares what it does: the accounting laws are switched off,
so that what catches a bug is that a row reads, or gets, something wrong.
"""

import dataclasses
import functools
from typing import Any

import pytest
from tests.simulation.test_seeded_bugs import Patch, failure_of, in_plans, replace

from quire.core.content_spans import DIGEST_CHARACTERS, spans_between
from quire.core.memory import kv_cache_manager, prefix_cache, prefix_index
from quire.core.memory.hash_chain import HashChains
from quire.core.memory.tiers import tier_match
from quire.core.request import Request
from quire.core.scheduling import pacing
from quire.core.scheduling.content_loads import ContentLoads
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.running_set import RunningSet
from quire.core.sequence import Sequence
from quire.core.step import StepPlan
from quire.simulation.report import add_up
from quire.simulation.simulator import Simulator, run
from quire.simulation.workload import SimulationConfig

CONFIG = SimulationConfig(
    seed=5,
    num_requests=80,
    num_blocks=40,
    max_num_batched_tokens=16,
    num_branches=(1, 3),
    beam_rate=0.1,
    near_rate=0.4,
    repeat_rate=0.3,
    fork_rate=0.1,
    num_cache_domains=1,
    content_rate=0.8,
    num_contents=4,
    num_content_slots=2,
    adapter_rate=0.2,
    overlap=1,
)
TIERS: dict[str, Any] = {
    "kinds": "full,state:2",
    "num_blocks": 40,
    "tier": (("block_s", 1e-5), ("latency_s", 0.001)),
    "near_rate": 0.9,
    "prompt_tokens": (4, 24),
    "output_tokens": (1, 4),
    "num_requests": 200,
}


SHORT: dict[str, Any] = {
    "block_size": 8,
    "prompt_tokens": (4, 20),
    "output_tokens": (1, 2),
    "content_rate": 0.5,
    "near_rate": 0.9,
    "num_requests": 200,
}


def drop_spans(original: Any) -> Any:
    """A function without its last argument, the spans."""
    return lambda *given: original(*given[:-1])


def hash_spans_by_length(original: Any) -> Any:
    """Names of blocks take in where contents are, but not which."""

    def extend(self: HashChains, chain: Any, root: bytes, ids: Any, spans: Any = ()) -> Any:
        unnamed = tuple(span._replace(digest="00" * 16) for span in spans)
        return original(self, chain, root, ids, unnamed)

    return extend


def pack_spans_by_length(original: Any) -> Any:
    def packed(ids: Any, first: int, end: int, spans: Any = ()) -> bytes:
        return original(ids, first, end, [span._replace(digest="00" * 16) for span in spans])

    return packed


def publish_tails_as_text(original: Any) -> Any:
    def publish_tail(self: Any, sequence: Sequence) -> None:
        spans, sequence.content_spans = sequence.content_spans, ()
        original(self, sequence)
        sequence.content_spans = spans

    return publish_tail


def count_a_digest_that_is_cut_off(original: Any) -> Any:
    """Two contents are equal if all but the last bytes of their digests are."""

    def num_packed(data: bytes) -> int:
        is_cut_off = len(data) % 4 == 3 and data[-19:-18] >= b"\x80"
        return original(data) + is_cut_off

    return num_packed


def branch_as_text(original: Any) -> Any:
    def branch(self: Sequence, *given: Any) -> Sequence:
        child: Sequence = original(self, *given)
        child.content_spans = ()
        return child

    return branch


def resume_as_text(original: Any) -> Any:
    def resume(self: Request, *given: Any, **more: Any) -> Request:
        return dataclasses.replace(original(self, *given, **more), content_spans=())

    return resume


def give_slots_in_use_away(original: Any) -> Any:
    def find_victim(self: Residency) -> str | None:
        found = original(self)
        return next(iter(self._slots), None) if found is None else found

    return find_victim


def load_what_is_read(original: Any) -> Any:
    """A content counts as ready while it is being read."""
    return lambda self, digest: original(self, digest) or True


def take_unready_loads(original: Any) -> Any:
    def take_load(self: Residency, digest: str) -> Any:
        self._ready |= self._reading & {digest}
        self._reading.discard(digest)
        return original(self, digest)

    return take_load


def look_one_position_too_late(original: Any) -> Any:
    def prepare(self: ContentLoads, sequence: Sequence, first: int, num_wanted: int) -> int:
        return min(num_wanted, original(self, sequence, first, num_wanted) + 1)

    return prepare


def load_only_what_begins(original: Any) -> Any:
    """A chunk in the middle of a content counts on an earlier step's load."""

    def load(self: ContentLoads, sequence: Sequence, first: int, end: int) -> None:
        for span in spans_between(sequence.content_spans, first, end):
            if span.first_position >= first:
                original(self, sequence, span.first_position, span.end)

    return load


def keep_slots_after_a_failure(original: Any) -> Any:
    def drop_rows(self: RunningSet) -> None:
        contents = self.content_loads.residency
        slots = dict(contents._slots)
        original(self)
        contents._slots.update(slots)

    return drop_rows


def use_no_content(original: Any) -> Any:
    """Contents are not in use while the plan is made that reads them."""

    def count(self: Residency, digest: str) -> Any:
        return original(self, digest) if len(digest) != DIGEST_CHARACTERS else None

    return count


def lose_loads(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, content_loads=plan.content_loads[1:])


def load_into_one_slot(plan: StepPlan) -> StepPlan:
    loads = [load._replace(slot=0) for load in plan.content_loads]
    return dataclasses.replace(plan, content_loads=tuple(loads))


def admit_without_spans(plan: StepPlan) -> StepPlan:
    admit = [
        admission._replace(content_spans=()) if admission.num_computed_tokens else admission
        for admission in plan.admit
    ]
    return dataclasses.replace(plan, admit=tuple(admit))


def admit_with_shifted_spans(plan: StepPlan) -> StepPlan:
    admit = [
        admission._replace(
            content_spans=tuple(
                span._replace(first_position=span.first_position + 1)
                for span in admission.content_spans
            )
        )
        for admission in plan.admit
    ]
    return dataclasses.replace(plan, admit=tuple(admit))


def both(*patches: Patch) -> Patch:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for patch in patches:
            patch(monkeypatch)

    return plant


def cut_anywhere(original: Any) -> Any:
    return lambda spans, position: position


def chunk_anywhere(original: Any) -> Any:
    return lambda spans, first, most: most


MUTATIONS: dict[str, Patch] = {
    "a chunk splits a content": replace(pacing, "chunk_within", chunk_anywhere),
    "a hit splits a content": replace(prefix_index, "last_cut", cut_anywhere),
    "a preemption splits a content": replace(kv_cache_manager, "last_cut", cut_anywhere),
    "blocks are named by placeholders": replace(HashChains, "extend", drop_spans),
    "blocks are named by where contents are": replace(HashChains, "extend", hash_spans_by_length),
    "parts of blocks are matched by where contents are": replace(
        prefix_index, "pack", pack_spans_by_length
    ),
    "tails are published as text": replace(
        prefix_index.PrefixIndex, "publish_tail", publish_tails_as_text
    ),
    "parts of blocks are matched by placeholders": replace(prefix_index, "pack", drop_spans),
    "contents are told apart by their first bytes": replace(
        prefix_cache, "num_packed", count_a_digest_that_is_cut_off
    ),
    "tiers' tails are matched by placeholders": both(
        replace(tier_match, "pack", drop_spans), replace(prefix_index, "pack", drop_spans)
    ),
    "a branch forgets its contents": replace(Sequence, "branch", branch_as_text),
    "a resumed request forgets its contents": replace(Request, "resume", resume_as_text),
    "a content's slot is given away while in use": replace(
        Residency, "_find_victim", give_slots_in_use_away
    ),
    "a content is not kept for the plan that reads it": both(
        replace(Residency, "acquire", use_no_content),
        replace(Residency, "release", use_no_content),
    ),
    "a content is loaded while it is read": both(
        replace(Residency, "prepare", load_what_is_read),
        replace(Residency, "take_load", take_unready_loads),
    ),
    "a chunk ends one position too late": replace(
        ContentLoads, "prepare", look_one_position_too_late
    ),
    "a content is loaded only where it begins": replace(
        ContentLoads, "load", load_only_what_begins
    ),
    "slots outlive a failed step": replace(RunningSet, "drop_rows", keep_slots_after_a_failure),
    "a load is lost": in_plans(lose_loads),
    "all loads go to one slot": in_plans(load_into_one_slot),
    "a row that continues has no contents": in_plans(admit_without_spans),
    "a row's contents are one position late": in_plans(admit_with_shifted_spans),
}


WHOLE: dict[str, Any] = {"has_whole_contents": True, "kinds": "window:9,full"}

WORLDS: dict[str, Any] = {
    "a chunk splits a content": WHOLE,
    "a hit splits a content": WHOLE,
    "a preemption splits a content": WHOLE
    | {"kinds": "full", "num_blocks": 20, "prompt_tokens": (20, 40), "policy": "priority"},
    "tails are published as text": SHORT,
    "contents are told apart by their first bytes": SHORT,
    "a content is loaded only where it begins": {
        "num_content_slots": 1,
        "max_num_batched_tokens": 9,
        "prompt_tokens": (20, 40),
    },
    "tiers' tails are matched by placeholders": TIERS,
    "slots outlive a failed step": {"step_failure_rate": 0.1},
    "a resumed request forgets its contents": {"crash_rate": 0.05},
}
"""What a mutation needs to show itself, beyond CONFIG."""

SEEDS = (5, 6, 7, 8)
"""Some bugs need a coincidence; one of these seeds has it."""


@pytest.fixture(autouse=True)
def no_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "_check", lambda self: None)


run_without_bug = functools.cache(run)


def test_without_a_mutation_all_is_well() -> None:
    report = add_up([run_without_bug(config_of(name)) for name in ("", *WORLDS)], seed=5)
    assert report.num_content_loads > 0 and report.num_adapter_loads > 0
    assert report.num_partial_hits > 0 and report.num_hit_tokens > 0
    assert report.num_preemptions > 0 and report.num_crashes > 0 and report.num_failed_steps > 0
    assert report.num_forks > 0 and report.num_beams > 0 and report.num_loaded_tokens > 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(name)
    run_without_bug(config)
    MUTATIONS[name](monkeypatch)
    message = next(filter(None, map(functools.partial(failure_of, config), SEEDS)), None)
    assert message is not None, "no check noticed"


def config_of(name: str) -> SimulationConfig:
    return dataclasses.replace(CONFIG, **WORLDS.get(name, {}))
