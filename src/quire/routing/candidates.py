"""One request, and the replicas that may get it: all that a policy chooses from."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.routing.fleet import Fleet
from quire.routing.replica import PrefillSpeed, Replica
from quire.routing.standing_order import Standing

EVERYONE = -1
"""The mask of all replicas."""


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

    now_s: of the router's caller. Masks have bit i for the replica with index i.
    """

    def __init__(
        self,
        request: RoutedRequest,
        now_s: float,
        fleet: Fleet,
        masks: Sequence[int],
        num_tokens: Sequence[int],
    ) -> None:
        """masks, num_tokens: of each known prefix, shortest first, the replicas that have it and
        its tokens."""
        self.request = request
        self.now_s = now_s
        self._fleet = fleet
        self._masks = masks
        self._num_tokens = num_tokens

    @property
    def replicas(self) -> Sequence[Replica]:
        """All, in the order of their indices."""
        return self._fleet.accepting

    @property
    def busy_share(self) -> float:
        """How many of the replicas had prompts to compute, on average over the last requests."""
        return self._fleet.busy_share

    # ---- one replica ------------------------------------------------------------------------

    def num_known(self, replica: Replica) -> int:
        """How many of the known prefixes it has: the first so many."""
        masks, index = self._masks, replica.index
        return bisect_left(masks, True, key=lambda mask: not mask >> index & 1)

    def num_cached_tokens(self, replica: Replica) -> int:
        """Of the prompt, the tokens that it is taken to have; not the last, which is computed."""
        num_known = self.num_known(replica)
        return self._served(num_known - 1) if num_known else 0

    def prefill_s(self, replica: Replica) -> float:
        """What computing the rest of the prompt takes there, without a wait."""
        num_cached = self.num_cached_tokens(replica)
        return replica.speed.seconds(self.request.num_prompt_tokens, num_cached)

    def wait_s(self, replica: Replica) -> float:
        """Until the prompts that are there are computed."""
        return replica.wait_s(self.now_s)

    # ---- all, without a look at each --------------------------------------------------------

    def holders(self) -> list[Replica]:
        """Those that have the longest prefix that any of them has; all, where none has any."""
        for mask in reversed(self._masks):
            found = [replica for replica in self.replicas if mask >> replica.index & 1]
            if found:
                return found
        return list(self.replicas)

    def prefixes(self) -> Iterator[tuple[int, int]]:
        """Tokens of each prefix and the mask of its holders, longest first; at last 0 tokens, which
        everyone has. Each mask contains the one before."""
        last = 0
        for at in range(len(self._masks) - 1, -1, -1):
            if self._masks[at] != last:
                last = self._masks[at]
                yield self._served(at), last
        yield 0, EVERYONE

    def speeds(self) -> Mapping[PrefillSpeed, int]:
        """The speeds of all replicas, and who has them."""
        return self._fleet.speeds

    @property
    def mean_speed(self) -> PrefillSpeed:
        """Of all replicas."""
        return self._fleet.mean_speed

    def least(self, mask: int, below_s: float = math.inf) -> Standing | None:
        """The one of these with the least `standing_s` (of the policy), if that is below."""
        return self._fleet.order.least(mask, below_s)

    def standing_s(self, replica: Replica) -> float:
        """What `least` compares, in its steps."""
        return self._fleet.order.seconds(replica.index)

    def replica(self, index: int) -> Replica:
        """The one with this index."""
        return self._fleet.by_index[index]

    def _served(self, at: int) -> int:
        return min(self._num_tokens[at], self.request.num_prompt_tokens - 1)
