"""Predicts whether loading a prefix from a tier is faster than computing it again.

The tier predicts the time of a load. The time to compute is predicted from recent steps, as a
linear function of the number of tokens and of the number of (query, key) pairs. Later blocks have
more pairs, so they take longer to compute, but no longer to load. So if loading some leading blocks
saves time, loading all of them saves more, and the choice is between loading all and loading
nothing.
"""

# The factor by which earlier measurements are reduced when a step is added.
DECAY = 0.98
# Steps with fewer tokens are ignored, since they say little about prompts.
MIN_STEP_TOKENS = 32


class ComputeTime:
    """Estimates how long prompt tokens take to compute, by least squares over recent steps."""

    def __init__(self) -> None:
        self._tokens_tokens = self._tokens_pairs = self._pairs_pairs = 0.0
        self._tokens_s = self._pairs_s = 0.0

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Learn from a step that computed num_tokens, which attend to num_pairs tokens in all."""
        if num_tokens < MIN_STEP_TOKENS or seconds <= 0.0:
            return
        # A step's error is about proportional to its duration, so dividing by it weights steps
        # equally.
        tokens, pairs = num_tokens / seconds, num_pairs / seconds
        self._tokens_tokens = DECAY * self._tokens_tokens + tokens * tokens
        self._tokens_pairs = DECAY * self._tokens_pairs + tokens * pairs
        self._pairs_pairs = DECAY * self._pairs_pairs + pairs * pairs
        self._tokens_s = DECAY * self._tokens_s + tokens
        self._pairs_s = DECAY * self._pairs_s + pairs

    def predict_s(self, first_token: int, end_token: int) -> float | None:
        """Predicted seconds to compute these tokens of a prompt; None before anything was
        measured."""
        if not self._tokens_tokens:
            return None
        num_tokens = end_token - first_token
        num_pairs = pairs_of(first_token, num_tokens)
        per_token, per_pair = self._solve()
        return per_token * num_tokens + per_pair * num_pairs

    def _solve(self) -> tuple[float, float]:
        """Seconds for a token and for a pair; neither is negative."""
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
    """Number of tokens that a chunk's tokens attend to, summed over the tokens."""
    return num_new_tokens * num_computed_tokens + num_new_tokens * (num_new_tokens + 1) // 2
