"""Proposes the tokens that a client said it expects (`prediction` in OpenAI's chat API).

Clients that have a text edited know most of the answer. A cursor follows the answer through the
predicted tokens: while each token equals the predicted one, it moves on. After a difference, it
goes to the next place of the prediction that has the answer's last tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence as Tokens
from weakref import WeakKeyDictionary

from quire.core.sequence import Sequence
from quire.speculation.proposer import Guess
from quire.speculation.speculation_options import SpeculationOptions
from quire.speculation.token_match import match_length

LEAST_MATCH = 2
"""Number of tokens that the prediction must have in common with the answer's end, after a
difference."""

MAX_PLACES = 64
"""Most places of a token that are compared after a difference."""

STEADY = 8
"""After this number of equal tokens, a cursor's guesses have the better grade (`Guess.grade`)."""


class PredictionCursor:
    """The place in a prediction that an answer's tokens have reached.

    Invariant: 0 <= `place` <= the prediction's length, and `num_accepted` <= that length.
    """

    __slots__ = ("_answer", "_places", "_prediction", "num_accepted", "num_equal", "place")

    def __init__(self, prediction: Tokens[int]) -> None:
        self._prediction = prediction
        self._answer: list[int] = []
        #: Token -> its places in the prediction; None until there was a difference.
        self._places: dict[int, list[int]] | None = None
        #: Index of the next predicted token.
        self.place = 0
        #: Number of tokens at the answer's end that equal the predicted ones.
        self.num_equal = 0
        #: Number of predicted tokens that the answer has, in order and each once.
        self.num_accepted = 0

    @property
    def num_rejected(self) -> int:
        """Number of predicted tokens that the answer does not have."""
        return len(self._prediction) - self.num_accepted

    @property
    def is_following(self) -> bool:
        """Whether the answer has reached a place of the prediction."""
        return self.num_equal > 0

    def follow(self, token_ids: Tokens[int]) -> None:
        """Take in the answer's next tokens."""
        prediction = self._prediction
        for token_id in token_ids:
            self._answer.append(token_id)
            if self.place < len(prediction) and prediction[self.place] == token_id:
                self.place += 1
                self.num_equal += 1
                self.num_accepted = min(self.num_accepted + 1, len(prediction))
            else:
                self.num_equal = 0
                self._search(token_id)

    def ahead(self, most: int) -> Tokens[int]:
        """The next predicted tokens, at most `most`."""
        return self._prediction[self.place : self.place + most]

    def _search(self, token_id: int) -> None:
        """Go to the place behind the longest match with the answer's last tokens, if any.

        Among equally long matches, the first one behind the present place is taken, or else the
        last one before it.
        """
        if self._places is None:
            self._places = {}
            for place, predicted in enumerate(self._prediction):
                self._places.setdefault(predicted, []).append(place)
        best, best_length = -1, LEAST_MATCH - 1
        for place in self._nearest(self._places.get(token_id, [])):
            length = match_length(self._prediction, place, self._answer)
            if length > best_length:
                best, best_length = place, length
        if best >= 0:
            self.place, self.num_equal = best + 1, best_length

    def _nearest(self, places: list[int]) -> list[int]:
        """At most MAX_PLACES of ascending places: those from the present one on, and then those
        before it, the nearest first."""
        at = bisect_left(places, self.place)
        behind = places[at : at + MAX_PLACES]
        return behind + places[max(0, at + len(behind) - MAX_PLACES) : at][::-1]


class PredictionProposer:
    """Proposes what follows in the prediction of a sequence's request."""

    def __init__(self) -> None:
        self._cursors: WeakKeyDictionary[Sequence, tuple[PredictionCursor, int]] = (
            WeakKeyDictionary()
        )

    def propose(self, sequence: Sequence, most: int) -> Guess | None:
        """See `Proposer`."""
        if not sequence.prediction_token_ids:
            return None
        cursor, num_seen = self._cursors.get(sequence, (None, sequence.num_prompt_tokens))
        if cursor is None:
            cursor = PredictionCursor(sequence.prediction_token_ids)
        if num_seen < len(sequence.token_ids):
            cursor.follow(sequence.token_ids[num_seen:])
            self._cursors[sequence] = cursor, len(sequence.token_ids)
        token_ids = cursor.ahead(most)
        if not cursor.is_following or not token_ids:
            return None
        is_steady = cursor.num_equal >= STEADY
        return Guess(token_ids, int(is_steady), 0.95 if is_steady else 0.7)

    def end(self, sequence: Sequence) -> None:
        """See `Proposer`."""
        self._cursors.pop(sequence, None)


def make_proposer(options: SpeculationOptions) -> PredictionProposer:
    """The proposer "prediction"."""
    return PredictionProposer()
