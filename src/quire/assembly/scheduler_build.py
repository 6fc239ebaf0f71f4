"""Makes the scheduler of an engine, with its residencies and what speculates for it.

Called by `build`.
"""

from quire.assembly.model_kind import ModelKind
from quire.assembly.rank_build import RankBuild
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.policy import Policy
from quire.core.scheduling.proposals import Speculator
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.scheduler import Scheduler
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions
from quire.speculation.speculation_options import (
    AUTO,
    AUTO_PROPOSERS,
    DRAFTERS,
    OFF,
    PROPOSERS,
    SpeculationOptions,
)
from quire.speculation.speculator import BestGuess


def make_scheduler(
    kind: ModelKind, memory: KVCacheManager, policy: Policy, rank: RankBuild
) -> Scheduler:
    """The scheduler over the memory of a rank that is built. Raises ConfigurationError if drafts
    can't be verified, or would change outputs."""
    checked = kind.options
    if memory.moves is not None and rank.runner.drafter is not None:
        memory.moves.loads.on_order = rank.runner.drafter.forget
    contents = rank.contents
    return Scheduler(
        SchedulerConfig(**checked.part(SchedulerConfig)),
        memory,
        policy,
        adapters=Residency(checked.num_lora_slots, rank.adapters),
        contents=None if contents is None else Residency(contents.num_slots, contents),
        speculator=_speculator(checked, rank, kind),
        model_drafts=rank.model_drafts,
    )


def answer_facts(scheduler: Scheduler) -> dict[str, int]:
    """The part of the memory ledger that earlier answers may take, if the speculator keeps any."""
    speculator = None if scheduler.drafting is None else scheduler.drafting.speculator
    max_bytes = speculator.max_answer_bytes if isinstance(speculator, BestGuess) else 0
    return {"answer_bytes": max_bytes} if max_bytes else {}


def _speculator(checked: EngineOptions, rank: RankBuild, kind: ModelKind) -> Speculator | None:
    """The speculator that the options ask for; None if there are no drafts. Raises
    ConfigurationError if drafts can't be verified, or would change outputs."""
    names = checked.speculation
    if names == OFF:
        return None
    reason = None
    if not kind.generates:
        reason = "the model generates no tokens"
    elif rank.device.type == "cuda" and not checked.batch_invariant:
        reason = "on a GPU drafts would change tokens unless batch_invariant is set"
    if reason is not None and names != AUTO:
        raise ConfigurationError(f"speculation is {names!r}, but {reason}; leave it out")
    # torch chooses the order of sums by the number of rows, and so may choose other tokens.
    if rank.device.type == "cpu" and not rank.runner.is_native and names == AUTO:
        reason = "torch computes, and may choose other tokens with drafts than without"
    if reason is not None:
        if checked.speculative_model is not None:
            raise ConfigurationError(
                f"speculative_model is {checked.speculative_model!r}, but speculation is 'auto',"
                f" which verifies no drafts here: {reason}; leave it out, or say what speculates"
            )
        return None
    options = SpeculationOptions(**checked.part(SpeculationOptions))
    chosen = AUTO_PROPOSERS if names == AUTO else names.split(",")
    proposers = {name: PROPOSERS.get(name)(options) for name in chosen if name not in DRAFTERS}
    return BestGuess(proposers, "" if kind.draft is None else kind.draft.method)
