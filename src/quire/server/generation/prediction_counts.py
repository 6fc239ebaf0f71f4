"""Counts the tokens of a prediction that the choices of a call have, for the usage.

The counts depend on the tokens alone: not on the drafts that steps verified, which depend on the
load, nor on a crash of the engine. Called by `chat_answer`.
"""

from collections.abc import Iterator, Sequence

from quire.engine_client.results import Delta
from quire.speculation.prediction import PredictionCursor

_TOKENS_PER_PIECE = 256


class PredictionCounts:
    """The counts of one call, summed over its choices.

    Invariant: `_cursors` has the choices that have begun and not ended.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        """prediction: the tokens that the client expects of each choice."""
        self._prediction = prediction
        self._cursors: dict[int, PredictionCursor] = {}
        self._num_accepted = 0
        #: Predicted tokens that the choices that have ended do not have.
        self.num_rejected = 0

    @property
    def num_accepted(self) -> int:
        """Predicted tokens that the choices have so far."""
        running = sum(cursor.num_accepted for cursor in self._cursors.values())
        return self._num_accepted + running

    def follow(self, choice: int, delta: Delta) -> Iterator[bytes]:
        """Take in the next tokens of a choice. Yields b"" after each piece of work, so that other
        calls may be answered in between."""
        cursor = self._cursors.get(choice)
        if cursor is None:
            cursor = self._cursors[choice] = PredictionCursor(self._prediction)
        for begin in range(0, len(delta.token_ids), _TOKENS_PER_PIECE):
            cursor.follow(delta.token_ids[begin : begin + _TOKENS_PER_PIECE])
            yield b""
        if delta.finish_reason is not None:
            del self._cursors[choice]
            self._num_accepted += cursor.num_accepted
            self.num_rejected += cursor.num_rejected
