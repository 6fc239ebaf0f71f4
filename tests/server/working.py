"""Runs work that is written in pieces: at once, or beside others on a clock of its own."""


class StepClock:
    """Each look takes a millisecond, so that a piece has the same steps on any machine."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 1e-3
        return self.now_s


def finished(work):
    """What a generator of pieces returns, and how often it pauses."""
    num_pauses = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, num_pauses
        num_pauses += 1
