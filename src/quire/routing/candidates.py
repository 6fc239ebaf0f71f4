"""One request, and the replicas that may get it: all that a policy chooses from."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.routing.replica import Replica


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as far as its place depends on it.

    digests: of the prompt's full blocks, chained, as `core.memory.hash_chain` makes them with the
        fleet's secret. n: how many sequences it generates. num_output_tokens: expected of each.
    """

    request_id: str
    digests: Sequence[bytes]
    num_prompt_tokens: int
    n: int = 1
    num_output_tokens: float = 0.0
    tenant: str = ""


class Candidates:
    """The replicas that accept requests, at least one, and how much each has of one prompt.

    replicas: in the order of their indices. now_s: of the router's caller.
    """

    def __init__(
        self,
        request: RoutedRequest,
        replicas: Sequence[Replica],
        masks: Sequence[int],
        num_tokens: Sequence[int],
        now_s: float,
    ) -> None:
        """masks, num_tokens: of each known prefix, shortest first, the replicas that have it (bit i
        for index i) and its tokens."""
        self.request = request
        self.replicas = replicas
        self.now_s = now_s
        self._masks = masks
        self._num_tokens = num_tokens

    def num_known(self, replica: Replica) -> int:
        """How many of the known prefixes it has: the first so many."""
        masks, index = self._masks, replica.index
        return bisect_left(masks, True, key=lambda mask: not mask >> index & 1)

    def num_cached_tokens(self, replica: Replica) -> int:
        """Of the prompt, the tokens that it is taken to have; not the last, which is computed."""
        num_known = self.num_known(replica)
        if not num_known:
            return 0
        return min(self._num_tokens[num_known - 1], self.request.num_prompt_tokens - 1)

    def prefill_s(self, replica: Replica) -> float:
        """What computing the rest of the prompt takes there, without a wait."""
        return replica.own_prefill_s(
            self.request.num_prompt_tokens, self.num_cached_tokens(replica)
        )

    def holders(self) -> Iterator[Replica]:
        """Those that have the longest prefix that any of them has; all, where none has any."""
        for mask in reversed(self._masks):
            found = [replica for replica in self.replicas if mask >> replica.index & 1]
            if found:
                return iter(found)
        return iter(self.replicas)
