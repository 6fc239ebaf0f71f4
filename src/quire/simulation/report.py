"""What happened in a simulation, in counts and times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields

from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import EditKind, StepPlan


@dataclass(slots=True)
class SimulationReport:
    """What happened. Equal configs give equal reports, but for steps_per_s (wall clock).

    All times are in seconds of the virtual clock, steps_per_s aside.

    num_requests: that arrived. num_sequences: branches of those that were accepted, forks and beams
        included. num_refused: requests and forks that could never have fitted.
    num_forks: by clients, num_joined_forks: rows that went on from another's logits, num_beams:
        searches. num_constrained: requests whose tokens obey a grammar.
    finished: reason -> branches. aborted_in: state -> branches. num_answered: branches that got a
        token. num_output_tokens: of all branches. served_tokens: the same by tenant.
    first_token_s: from arrival to the first token, summed over those that got one;
        max_first_token_s: the longest; first_token_waits_s: each. latencies_s: from arrival to the
        end of each branch that ended by itself, at a stop or at its limit.
    num_preemptions: times that a sequence had to give blocks back. num_preempted_tokens: computed
        tokens of sequences when they were preempted. num_recomputed_tokens: those of them that were
        computed again.
    num_copied_blocks: all. num_cow_blocks: those that were about to be written by one of several
        holders that run. num_partial_hits: admissions that went on from a copy of a block.
    num_query_tokens: prompt tokens looked up in the prefix cache. num_hit_tokens: found there.
        misses: reason -> prompts, see `prefix_miss`. num_evicted_blocks: cached contents lost.
    num_loads: prefixes that another tier was asked for; num_loaded_tokens: that came so.
        num_late_loads: given up, since they took too long; num_declined_loads: computing was
        predicted to be faster. num_stored_blocks: that tiers took. tier_faults: by name.
    num_adapter_loads: into slots.
    num_failed_steps, num_interrupts, num_crashes: injected. num_resumed: branches that went on
        after crashes.
    max_num_waiting, max_num_running: the most at once. virtual_s: when the last answer ended.
    digest: over all plans and results, in order.
    """

    seed: int
    num_steps: int = 0
    num_requests: int = 0
    num_sequences: int = 0
    num_refused: int = 0
    num_forks: int = 0
    num_joined_forks: int = 0
    num_beams: int = 0
    num_constrained: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    aborted_in: dict[str, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    served_tokens: dict[str, int] = field(default_factory=dict)
    num_answered: int = 0
    first_token_s: float = 0.0
    max_first_token_s: float = 0.0
    first_token_waits_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_copied_blocks: int = 0
    num_cow_blocks: int = 0
    num_partial_hits: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    num_evicted_blocks: int = 0
    num_loads: int = 0
    num_loaded_tokens: int = 0
    num_late_loads: int = 0
    num_declined_loads: int = 0
    num_stored_blocks: int = 0
    tier_faults: dict[str, int] = field(default_factory=dict)
    num_adapter_loads: int = 0
    num_failed_steps: int = 0
    num_interrupts: int = 0
    num_crashes: int = 0
    num_resumed: int = 0
    max_num_waiting: int = 0
    max_num_running: int = 0
    virtual_s: float = 0.0
    digest: str = ""
    steps_per_s: float = field(default=0.0, compare=False)

    def note_plan(self, plan: StepPlan, num_waiting: int) -> None:
        """Count what a plan says."""
        self.num_steps += 1
        self.max_num_running = max(self.max_num_running, plan.num_rows)
        self.max_num_waiting = max(self.max_num_waiting, num_waiting)
        self.num_joined_forks += sum(fork.joins_step for fork in plan.forks)
        if not plan.copies:
            return
        self.num_copied_blocks += len(plan.copies)
        replacing = [edit for edit in plan.table_edits if edit.kind is EditKind.REPLACE]
        self.num_cow_blocks += sum(len(edit.block_ids) for edit in replacing)
        targets = {copy.target for copy in plan.copies}
        self.num_partial_hits += sum(
            not targets.isdisjoint(admission.block_tables[0]) for admission in plan.admit
        )

    def take_counts(self, scheduler: Scheduler) -> None:
        """Add what scheduler and memory have counted themselves; once for each, at its end."""
        memory, preemptions = scheduler.memory, scheduler.running_set.stats
        self.num_preemptions += preemptions.num_preemptions
        self.num_preempted_tokens += preemptions.num_preempted_tokens
        self.num_recomputed_tokens += preemptions.num_recomputed_tokens
        self.num_failed_steps += scheduler.stats.num_failed_steps
        self.num_query_tokens += memory.prefixes.num_query_tokens
        self.num_hit_tokens += memory.prefixes.num_hit_tokens
        for reason, count in memory.prefixes.misses.items():
            if count:
                self.misses[reason.value] = self.misses.get(reason.value, 0) + count
        self.num_evicted_blocks += memory.num_evicted_blocks
        self.num_adapter_loads += scheduler.adapters.num_loads
        if memory.moves is not None:
            loads = memory.moves.loads.stats
            self.num_loads += loads.num_loads
            self.num_loaded_tokens += loads.num_loaded_tokens
            self.num_late_loads += loads.num_late
            self.num_declined_loads += loads.num_declined
            self.num_stored_blocks += memory.moves.stores.num_stored
            for name, number in memory.moves.tiers.counts().get("fake", {}).items():
                if name not in ("num_records", "loads_done") and number:
                    self.tier_faults[name] = self.tier_faults.get(name, 0) + int(number)


def printed_lines(report: SimulationReport) -> list[str]:
    """Field by field, as `python -m quire.simulation` prints it; of lists the percentiles."""
    lines = []
    for entry in fields(report):
        value = getattr(report, entry.name)
        if isinstance(value, list):
            shares = (50, 90, 99)
            value = "  ".join(f"p{share} {percentile(value, share):.3f}" for share in shares)
        elif entry.name == "steps_per_s":
            value = f"{value:.0f}"
        lines.append(f"{entry.name:22} {value}")
    return lines


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` percent of all are not above; nan where there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


LARGEST = {"max_num_waiting", "max_num_running", "max_first_token_s"}


def add_up(reports: list[SimulationReport], seed: int) -> SimulationReport:
    """One report of several runs: sums, and the largest of what is a maximum. Digests of runs are
    not added up, and steps_per_s is left to the caller."""
    total = SimulationReport(seed)
    for entry in fields(SimulationReport):
        values = [getattr(report, entry.name) for report in reports]
        if entry.name in LARGEST:
            setattr(total, entry.name, max(values, default=0))
        elif isinstance(getattr(total, entry.name), dict):
            counts = Counter[str]()
            for value in values:
                counts.update(value)
            setattr(total, entry.name, dict(sorted(counts.items())))
        elif isinstance(getattr(total, entry.name), list):
            setattr(total, entry.name, [number for value in values for number in value])
        elif entry.name not in ("seed", "digest", "steps_per_s"):
            setattr(total, entry.name, sum(values))
    return total
