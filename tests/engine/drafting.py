"""A proposer that knows the answers, and errs at random positions."""

import random

from quire.core.sampling_params import SamplingParams
from quire.core.scheduling.cost_model import StepLoad, typical_model
from quire.core.scheduling.drafts import Drafting
from quire.core.scheduling.pacing import ConstantPacer, LearningPacer, StepPacer
from quire.core.scheduling.proposals import Proposal
from quire.core.sequence import Sequence
from quire.engine.engine import Engine
from quire.engine_client.results import RequestOutput

ERROR_RATE = 0.15
MOST_DRAFTS = 7

Key = tuple[tuple[int, ...], int | None, int]


def key_of(sequence: Sequence) -> Key:
    prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
    return prompt, sequence.params.seed, sequence.branch_index


class Recorded:
    """Proposes recorded answers, with errors at random positions."""

    def __init__(self, answers: dict[Key, list[int]]) -> None:
        self.answers = answers
        self.rng = random.Random(5)

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        answer = self.answers.get(key_of(sequence), [])
        drafts = answer[sequence.num_output_tokens :][:most]
        token_ids = tuple(token ^ (self.rng.random() < ERROR_RATE) for token in drafts)
        return Proposal(token_ids, (1.0,) * len(token_ids), "recorded")

    def learn(self, sequence: Sequence, proposal: Proposal, num_accepted: int) -> None: ...

    def end(self, sequence: Sequence) -> None: ...


def use_proposer(engine: Engine, answers: dict[Key, list[int]], *, rests: bool = False) -> None:
    """Have the engine's steps verify drafts of the answers, whatever they cost.

    rests: whether each step, at random, asks for no drafts, so that rows that decode plainly and
    rows with drafts take turns.
    """
    scheduler = engine.scheduler
    if isinstance(scheduler.pacer, LearningPacer):
        scheduler.pacer = ConstantPacer()
    elif isinstance(scheduler.pacer, StepPacer):
        # Predictions that follow steps on a busy machine may say that no draft pays.
        scheduler.pacer.model = typical_model(StepLoad(num_decodes=1), 0.01)
        scheduler.pacer.observe = lambda step_id, seconds: None
    if scheduler.drafting is None:
        running, slots = scheduler.running_set, scheduler._slots
        scheduler.drafting = Drafting(
            Recorded(answers), scheduler.memory, running, slots, MOST_DRAFTS
        )
    drafting = scheduler.drafting
    drafting.speculator = Recorded(answers)
    # Ask whenever there is no rest, although that takes much of a tiny model's time.
    rng = random.Random(6)

    def begin() -> None:
        drafting._num_to_rest = 2 if rests and rng.random() < 0.5 else 0
        Drafting.begin(drafting)

    drafting.begin = begin


def recorded(outputs: list[RequestOutput], params: list[SamplingParams]) -> dict[Key, list[int]]:
    return {
        (tuple(output.prompt_token_ids), wish.seed, index): list(branch.token_ids)
        for output, wish in zip(outputs, params, strict=True)
        for index, branch in enumerate(output.outputs)
    }


def check_counts(engine: Engine) -> None:
    """Drafts were right and wrong, and no block is held any more."""
    stats = engine.stats()
    assert stats.num_held_blocks == 0
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
