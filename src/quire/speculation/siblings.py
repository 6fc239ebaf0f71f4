"""Proposes what other branches of the same request have generated.

Several samples of one prompt often say the same in part. A branch that is behind the others finds
its last tokens in their outputs, and proposes what followed there.
"""

from quire.core.sequence import Sequence
from quire.speculation.ngram import NgramIndex
from quire.speculation.proposer import Guess
from quire.speculation.speculation_options import SpeculationOptions

MAX_SIBLINGS = 8
"""Most branches in which a branch searches."""


class SiblingsProposer:
    """Proposes from the outputs of the request's other branches, ended ones included.

    Invariant: a request is forgotten when all of its branches have ended.
    """

    def __init__(self, least_match: int) -> None:
        """least_match: see `NgramIndex`."""
        self._least_match = least_match
        #: Request id -> its branches that have asked for a guess. A branch has an index once
        #: another branch was compared with it.
        self._branches: dict[str, dict[Sequence, NgramIndex | None]] = {}

    def propose(self, sequence: Sequence, most: int) -> Guess | None:
        """See `Proposer`."""
        branches = self._branches.setdefault(sequence.request_id, {})
        branches.setdefault(sequence, None)
        best: Guess | None = None
        others = [branch for branch in branches if branch is not sequence]
        for other in others[:MAX_SIBLINGS]:
            index = branches[other]
            if index is None:
                first = max(0, other.num_prompt_tokens - self._least_match)
                index = branches[other] = NgramIndex(self._least_match, first)
            guess = index.find_in(other.token_ids, sequence.token_ids, most)
            if guess is not None and (best is None or guess.grade > best.grade):
                best = guess
        return best

    def end(self, sequence: Sequence) -> None:
        """See `Proposer`."""
        branches = self._branches.get(sequence.request_id, {})
        if all(branch.is_finished for branch in branches):
            self._branches.pop(sequence.request_id, None)


def make_proposer(options: SpeculationOptions) -> SiblingsProposer:
    """The proposer "siblings"."""
    return SiblingsProposer(options.ngram_min_match)
