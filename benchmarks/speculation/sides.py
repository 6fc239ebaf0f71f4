"""Runs one group of tasks on an engine with drafts and on one without, in turns.

Both engines live in one process. A run begins when every stream has its first token, so the time is
that of decoding. Time is this process's processor time, which other programs of the machine change
little, and the wall's. Both engines must give the same tokens.
"""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.core.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from benchmarks.speculation.replay import KnownAnswers
    from quire import LLM


class Job(NamedTuple):
    """A task in tokens."""

    prompt_token_ids: list[int]
    #: The known answer; None if the model answers by itself.
    answer: list[int] | None
    max_tokens: int
    schema: dict[str, Any] | None


class Counts(NamedTuple):
    """Times and counts of one run of an engine, or sums over several runs."""

    process_s: float = 0.0
    wall_s: float = 0.0
    #: Number of tokens, without the first of each stream.
    num_tokens: int = 0
    num_steps: int = 0
    #: Sum over the steps of the streams that got tokens.
    num_rows: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def plus(self, other: "Counts") -> "Counts":
        """The sums."""
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class Side:
    """An engine. Invariant: between two runs it has no requests."""

    def __init__(self, llm: "LLM", known: "KnownAnswers | None") -> None:
        """known: forces the answers; None if the model answers by itself."""
        self.llm = llm
        self._known = known

    def run(self, jobs: Sequence[Job]) -> tuple[Counts, list[list[int]]]:
        """Run the jobs at once. Returns the counts, and the tokens of each."""
        from quire import SamplingParams  # after the number of threads is fixed

        if self._known is not None:
            self._known.set_answers({at: job.answer or () for at, job in enumerate(jobs)})
        handles = [
            self.llm.start(
                {"prompt_token_ids": job.prompt_token_ids},
                SamplingParams(
                    temperature=0,
                    seed=at,
                    max_tokens=job.max_tokens,
                    ignore_eos=job.answer is not None,
                    structured_outputs=(
                        None if job.schema is None else StructuredOutputsParams(json=job.schema)
                    ),
                ),
            )
            for at, job in enumerate(jobs)
        ]
        requests, engine = self.llm._requests, self.llm.engine
        while any(not handle.output.token_ids for handle in handles):
            requests.advance()
        before = self._counts()
        while engine.has_work():
            requests.advance()
        counts = Counts(*(a - b for a, b in zip(self._counts(), before, strict=True)))
        token_ids = [list(handle.output.token_ids) for handle in handles]
        for handle in handles:
            handle.close()
        return counts, token_ids

    def warm(self, jobs: Sequence[Job]) -> None:
        """Compute the jobs' prompts, which the prefix cache keeps, and one token."""
        self.run([job._replace(max_tokens=1) for job in jobs])

    def _counts(self) -> Counts:
        stats = self.llm.engine.stats()
        return Counts(
            time.process_time(),
            time.perf_counter(),
            stats.num_generated_tokens,
            stats.num_steps,
            stats.num_generated_tokens - stats.num_accepted_drafts,
            stats.num_drafts,
            stats.num_accepted_drafts,
        )


class Comparison(NamedTuple):
    """The runs of one workload on both engines."""

    plain: list[Counts]
    drafting: list[Counts]

    @property
    def ratio(self) -> float:
        """Tokens per second of processor time with drafts, relative to those without: the median
        over the repeats."""
        return statistics.median(a.process_s / b.process_s for a, b in self._pairs())

    @property
    def best_ratio(self) -> float:
        """Like `ratio`, for each engine's shortest run."""
        shortest = [min(run.process_s for run in runs) for runs in self]
        return shortest[0] / shortest[1]

    @property
    def wall_ratio(self) -> float:
        """The median ratio of wall time."""
        return statistics.median(a.wall_s / b.wall_s for a, b in self._pairs())

    @property
    def plain_rate(self) -> float:
        """Tokens per second of processor time without drafts, in the shortest run."""
        return self.plain[0].num_tokens / min(run.process_s for run in self.plain)

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a stream got in a step with drafts, on average."""
        total = _sum(self.drafting)
        return total.num_tokens / total.num_rows

    @property
    def drafts_a_step(self) -> float:
        """Drafts that a step verified for a stream, on average."""
        total = _sum(self.drafting)
        return total.num_drafts / total.num_rows

    @property
    def acceptance(self) -> float:
        """The share of the verified drafts that were accepted."""
        total = _sum(self.drafting)
        return total.num_accepted / total.num_drafts if total.num_drafts else 0.0

    def _pairs(self) -> list[tuple[Counts, Counts]]:
        return list(zip(self.plain, self.drafting, strict=True))


def compare(
    plain: Side, drafting: Side, groups: Sequence[Sequence[Job]], repeats: int
) -> Comparison:
    """Run all groups on both engines, `repeats` times; each repeat begins with the other engine.

    Raises AssertionError if drafts changed a token.
    """
    for group in groups:
        plain.warm(group)
        drafting.warm(group)
    found = Comparison([], [])
    for repeat in range(repeats):
        totals = [Counts(), Counts()]
        for group in groups:
            outputs: list[list[list[int]]] = [[], []]
            for at in (0, 1) if repeat % 2 == 0 else (1, 0):
                counts, outputs[at] = (plain, drafting)[at].run(group)
                totals[at] = totals[at].plus(counts)
            assert outputs[0] == outputs[1], "drafts changed a token"
        found.plain.append(totals[0])
        found.drafting.append(totals[1])
    return found


def _sum(runs: Sequence[Counts]) -> Counts:
    total = Counts()
    for run in runs:
        total = total.plus(run)
    return total
