"""An engine that preempts much, whose steps don't depend on how long the earlier ones took."""

from quire import LLM
from quire.core.scheduling.pacing import ConstantPacer
from quire.simulation.baselines import NoGrowth


def preempt_much(llm: LLM) -> None:
    """Let sequences run without reserving blocks for their growth, and draft whatever it costs.

    If the pacer learned what steps take, the load of the machine would decide how much is drafted,
    and thereby which sequences run at the same time. So it would if contents were encoded for as
    long as a step takes: here one slice is encoded a step.
    """
    scheduler = llm.engine.scheduler
    scheduler.admission.capacity.forecast.lengths = NoGrowth()
    scheduler.pacer = ConstantPacer()
    contents = llm.engine.contents
    advance = contents.advance
    contents.advance = lambda limit_s: advance(0.0)  # type: ignore[method-assign]
