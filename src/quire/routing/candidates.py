"""One request to route, and the replicas that a policy chooses from."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.routing.delay_index import ReplicaDelay
from quire.routing.fleet import Fleet
from quire.routing.replica import PrefillSpeed, Replica

EVERYONE = -1
"""The mask of all replicas."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The properties of a request that the choice of its replica depends on."""

    request_id: str
    #: The chained digests of the prompt's full blocks, computed by `core.memory.hash_chain` with
    #: the fleet's secret.
    digests: Sequence[bytes]
    num_prompt_tokens: int
    #: Number of sequences that the request generates.
    n: int = 1
    #: The expected number of output tokens of each sequence.
    num_output_tokens: float = 0.0
    tenant: str = ""


class Candidates:
    """All replicas that accept requests, and how much of one request's prompt each of them has
    cached. There is at least one replica.

    In a mask, bit i stands for the replica with index i.
    """

    def __init__(
        self,
        request: RoutedRequest,
        now_s: float,
        fleet: Fleet,
        masks: Sequence[int],
        num_tokens: Sequence[int],
    ) -> None:
        """`masks` and `num_tokens` have an entry for each prefix of the prompt that some replica
        has cached, shortest first: the mask of the replicas that have the prefix, and its length in
        tokens. `now_s` is the time on the clock of the router's caller."""
        self.request = request
        self.now_s = now_s
        self._fleet = fleet
        self._masks = masks
        self._num_tokens = num_tokens

    @property
    def replicas(self) -> Sequence[Replica]:
        """All candidates, in the order of their indices."""
        return self._fleet.accepting

    @property
    def busy_share(self) -> float:
        """Share of the accepting replicas that had prompts to compute, averaged over the arrivals
        of recent requests."""
        return self._fleet.busy_share

    # ---- one replica ------------------------------------------------------------------------

    def num_known(self, replica: Replica) -> int:
        """Number of entries of `masks` whose prefix the replica has cached; these are always the
        shortest prefixes."""
        masks, index = self._masks, replica.index
        # Each mask contains the next one, so the replica's bit is set in the first masks and clear
        # in the rest.
        return bisect_left(masks, True, key=lambda mask: not mask >> index & 1)

    def num_cached_tokens(self, replica: Replica) -> int:
        """Number of prompt tokens that the replica is assumed to have cached. The last token never
        counts, since it is always computed."""
        num_known = self.num_known(replica)
        return self._served(num_known - 1) if num_known else 0

    def prefill_s(self, replica: Replica) -> float:
        """Seconds to compute the uncached part of the prompt on this replica, without queueing
        time."""
        num_cached = self.num_cached_tokens(replica)
        return replica.speed.seconds(self.request.num_prompt_tokens, num_cached)

    def wait_s(self, replica: Replica) -> float:
        """Seconds until the replica has computed the prompts that were placed there earlier."""
        return replica.wait_s(self.now_s)

    # ---- all replicas, without a loop --------------------------------------------------------

    def holders(self) -> list[Replica]:
        """The replicas with the longest cached prefix; all replicas if no replica has cached a
        prefix."""
        for mask in reversed(self._masks):
            found = [replica for replica in self.replicas if mask >> replica.index & 1]
            if found:
                return found
        return list(self.replicas)

    def prefixes(self) -> Iterator[tuple[int, int]]:
        """For each cached prefix, longest first: its number of tokens and the mask of the replicas
        that hold it. The last item is the empty prefix, which all replicas hold. Each mask contains
        the previous one."""
        last = 0
        for at in range(len(self._masks) - 1, -1, -1):
            if self._masks[at] != last:
                last = self._masks[at]
                yield self._served(at), last
        yield 0, EVERYONE

    def speeds(self) -> Mapping[PrefillSpeed, int]:
        """Each distinct speed with the mask of the replicas that have it."""
        return self._fleet.speeds

    @property
    def mean_speed(self) -> PrefillSpeed:
        """The average speed of all replicas."""
        return self._fleet.mean_speed

    def least(self, mask: int, below_s: float = math.inf) -> ReplicaDelay | None:
        """The replica in `mask` with the least `RoutingPolicy.expected_delay_s`; None if that delay
        is not below `below_s`."""
        return self._fleet.delays.least(mask, below_s)

    def expected_delay_s(self, replica: Replica) -> float:
        """The replica's expected delay in seconds, rounded as in `least`."""
        return self._fleet.delays.seconds(replica.index)

    def replica(self, index: int) -> Replica:
        """The replica with this index."""
        return self._fleet.by_index[index]

    def _served(self, at: int) -> int:
        return min(self._num_tokens[at], self.request.num_prompt_tokens - 1)
