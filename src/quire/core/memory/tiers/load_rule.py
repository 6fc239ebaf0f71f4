"""Whether what a tier has is loaded, or computed again: what is predicted to be faster.

Loading takes what the tier says. Computing takes what it took lately: a straight line in the tokens
and in the pairs of tokens that attend to each other. A chunk's pairs grow with its place, so of two
blocks the later one takes longer to compute and as long to load: if it pays to load any run of
blocks, it pays to load it to its end (the sum of a line and a convex function's complement has its
least value at an end). So there are two choices only.
"""

# Of what was measured before, so much counts when a step is added.
DECAY = 0.98
# Steps that compute fewer tokens say little about prompts.
MIN_STEP_TOKENS = 32


class ComputeTime:
    """Learns how long tokens of prompts take: least squares over the last steps."""

    def __init__(self) -> None:
        self._tokens_tokens = self._tokens_pairs = self._pairs_pairs = 0.0
        self._tokens_s = self._pairs_s = 0.0

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """A step has ended that computed so many tokens, which attend to num_pairs in all."""
        if num_tokens < MIN_STEP_TOKENS or seconds <= 0.0:
            return
        # A step's error is about proportional to its length: so each counts the same.
        tokens, pairs = num_tokens / seconds, num_pairs / seconds
        self._tokens_tokens = DECAY * self._tokens_tokens + tokens * tokens
        self._tokens_pairs = DECAY * self._tokens_pairs + tokens * pairs
        self._pairs_pairs = DECAY * self._pairs_pairs + pairs * pairs
        self._tokens_s = DECAY * self._tokens_s + tokens
        self._pairs_s = DECAY * self._pairs_s + pairs

    def predict_s(self, first_token: int, end_token: int) -> float | None:
        """How long it takes to compute these tokens of a prompt; None before anything is known."""
        if not self._tokens_tokens:
            return None
        num_tokens = end_token - first_token
        num_pairs = pairs_of(first_token, num_tokens)
        per_token, per_pair = self._solve()
        return per_token * num_tokens + per_pair * num_pairs

    def _solve(self) -> tuple[float, float]:
        """Seconds a token and a pair, neither negative."""
        determinant = self._tokens_tokens * self._pairs_pairs - self._tokens_pairs**2
        if determinant > 1e-9 * self._tokens_tokens * self._pairs_pairs:
            per_token = self._tokens_s * self._pairs_pairs - self._pairs_s * self._tokens_pairs
            per_pair = self._pairs_s * self._tokens_tokens - self._tokens_s * self._tokens_pairs
            if per_token > 0.0 and per_pair >= 0.0:
                return per_token / determinant, per_pair / determinant
            if per_token <= 0.0:
                return 0.0, self._pairs_s / self._pairs_pairs
        return self._tokens_s / self._tokens_tokens, 0.0


def pairs_of(num_computed_tokens: int, num_new_tokens: int) -> int:
    """The tokens that each of a chunk attends to, summed."""
    return num_new_tokens * num_computed_tokens + num_new_tokens * (num_new_tokens + 1) // 2
