"""The report of a simulation: counts and times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields

from quire.core.scheduling.scheduler import Scheduler
from quire.core.step import StepPlan
from quire.simulation.plan_rows import count_changes


@dataclass(slots=True)
class SimulationReport:
    """The counts and times of a simulation, in seconds of the virtual clock.

    Equal configs give equal reports, except for steps_per_s.
    """

    seed: int
    num_steps: int = 0
    #: Requests that arrived.
    num_requests: int = 0
    #: Branches of accepted requests, including forks and beams.
    num_sequences: int = 0
    #: Requests and forks that are refused because they do not fit into the empty pool.
    num_refused: int = 0
    #: Forks by clients.
    num_forks: int = 0
    #: Forks whose first token was sampled from the logits of their source row.
    num_joined_forks: int = 0
    #: Beam searches.
    num_beams: int = 0
    #: Requests with a grammar.
    num_constrained: int = 0
    #: Ended branches by finish reason.
    finished: dict[str, int] = field(default_factory=dict)
    #: Aborted branches by the state of their sequence.
    aborted_in: dict[str, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    #: Output tokens by tenant.
    served_tokens: dict[str, int] = field(default_factory=dict)
    #: Branches that got a token.
    num_answered: int = 0
    #: The sum of first_token_waits_s.
    first_token_s: float = 0.0
    #: The longest of first_token_waits_s.
    max_first_token_s: float = 0.0
    #: For each answered branch, the seconds from its arrival to its first token.
    first_token_waits_s: list[float] = field(default_factory=list)
    #: For each branch that ended at a stop or its length limit, the seconds from arrival to end.
    latencies_s: list[float] = field(default_factory=list)
    #: Number of times that a sequence was preempted, losing blocks.
    num_preemptions: int = 0
    #: Sum of the computed tokens that sequences had when they were preempted.
    num_preempted_tokens: int = 0
    #: Preempted tokens that were computed again.
    num_recomputed_tokens: int = 0
    num_copied_blocks: int = 0
    #: Blocks that were copied because a sequence was about to write to a block that others use.
    num_cow_blocks: int = 0
    #: Admissions that reused a copy of a partly filled block.
    num_partial_hits: int = 0
    #: Prompt tokens looked up in the prefix cache.
    num_query_tokens: int = 0
    #: Prompt tokens found in the prefix cache.
    num_hit_tokens: int = 0
    #: Prompts that missed, by `MissReason`.
    misses: dict[str, int] = field(default_factory=dict)
    #: Evicted contents of the prefix cache.
    num_evicted_blocks: int = 0
    #: Prefixes that were requested from another tier.
    num_loads: int = 0
    #: Prompt tokens that were loaded from another tier.
    num_loaded_tokens: int = 0
    #: Loads that were given up because they took too long.
    num_late_loads: int = 0
    #: Loads that were not started because computing was predicted to be faster.
    num_declined_loads: int = 0
    #: Blocks that tiers stored.
    num_stored_blocks: int = 0
    #: Injected faults of tiers, by name.
    tier_faults: dict[str, int] = field(default_factory=dict)
    #: Loads of adapters into slots.
    num_adapter_loads: int = 0
    #: Drafts that steps verified.
    num_drafts: int = 0
    #: Drafts that equalled the sampled tokens.
    num_accepted_drafts: int = 0
    #: Loads of contents into slots.
    num_content_loads: int = 0
    num_failed_steps: int = 0
    num_interrupts: int = 0
    num_crashes: int = 0
    #: Branches that were resumed after crashes.
    num_resumed: int = 0
    max_num_waiting: int = 0
    max_num_running: int = 0
    #: The time at which the last branch ended.
    virtual_s: float = 0.0
    #: A digest of all plans and results, to compare runs.
    digest: str = ""
    #: Steps per second of the wall clock.
    steps_per_s: float = field(default=0.0, compare=False)

    def count_plan(self, plan: StepPlan, num_waiting: int) -> None:
        """Count the changes of a plan."""
        self.num_steps += 1
        self.max_num_running = max(self.max_num_running, plan.num_rows)
        self.max_num_waiting = max(self.max_num_waiting, num_waiting)
        counts = count_changes(plan)
        self.num_joined_forks += counts.num_joined_forks
        if counts.num_copies:
            self.num_copied_blocks += counts.num_copies
            self.num_cow_blocks += counts.num_replaced_blocks
            self.num_partial_hits += counts.num_partial_hits

    def add_counts(self, scheduler: Scheduler) -> None:
        """Add the counts of a scheduler and its KV memory; called once, after their last step."""
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
        if scheduler.drafting is not None:
            self.num_drafts += scheduler.drafting.num_drafts
            self.num_accepted_drafts += scheduler.drafting.num_accepted_drafts
        self.num_content_loads += scheduler.contents.num_loads
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
    """The lines that `python -m quire.simulation` prints: each field, and percentiles of lists."""
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
    """The percentile of the values at `share`, from 0 to 100; nan without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


LARGEST = {"max_num_waiting", "max_num_running", "max_first_token_s"}


def add_up(reports: list[SimulationReport], seed: int) -> SimulationReport:
    """One report for several runs: counts are added up, and maxima are the largest of all.

    The report has no digest, and the caller sets steps_per_s.
    """
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
