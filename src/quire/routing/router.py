"""Routes each request to a replica of a fleet.

The router tracks the load and the cached prefixes of each replica. A policy chooses the replica.

    add_replica, remove_replica, set_accepting, forget_prefixes    when replicas change
    set_slowness                                                   after new measurements
    place -> on_first_token -> on_end                              for each request

It does no I/O: an API server calls it when it sends a request, gets a first token, or sees a
request end. Each of several API servers has its own router, which knows only the requests that this
server placed.
"""

from dataclasses import dataclass

from quire.errors import NoReplicaError
from quire.routing.candidates import Candidates, RoutedRequest
from quire.routing.fleet import Fleet
from quire.routing.policy import RoutingPolicy
from quire.routing.prefix_view import PrefixView
from quire.routing.replica import Replica, ReplicaFacts

NUM_REFRESHED = 4
"""Number of replicas whose expected delay is updated with each request."""
DECODE_MEMORY = 200
"""mean_decode_s is averaged over about this many requests."""


@dataclass(slots=True)
class _Placed:
    """The load that a request put on its replica."""

    replica: Replica
    num_sequences: int
    num_uncached_tokens: int
    num_decode_tokens: int
    #: Time of the first token; None before the first token.
    decodes_since_s: float | None = None


class ReplicaRouter:
    """The state of a fleet, as one API server tracks it.

    Invariant: the load of each replica is the sum over the requests that were placed there and have
    not ended. Each request counts once.
    """

    def __init__(self, policy: RoutingPolicy, block_size: int) -> None:
        """`block_size` is the number of tokens in a block, which has one digest."""
        self.policy = policy
        self.block_size = block_size
        self.fleet = Fleet()
        self.prefixes = PrefixView()
        #: The average time from a request's first token to its end, in seconds.
        self.mean_decode_s = 0.0
        self._placed: dict[str, _Placed] = {}
        self._num_decoded = self._refreshed = 0

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that were added and not removed."""
        return list(self.fleet.by_name.values())

    def num_uncached_tokens(self, request_id: str) -> int:
        """Number of prompt tokens that the request's replica had not cached, as estimated when the
        request was placed."""
        return self._placed[request_id].num_uncached_tokens

    # ---- replicas ---------------------------------------------------------------------------

    def add_replica(self, name: str, facts: ReplicaFacts) -> None:
        """Add a replica with an empty cache that accepts requests. Its name must be new."""
        replica = self.fleet.add(name, facts)
        self.prefixes.add_replica(replica.index, facts.num_blocks)

    def remove_replica(self, name: str) -> None:
        """Remove a replica that has stopped or can't be reached, with its cache and its load. Later
        calls of `on_end` for its requests have no effect."""
        replica = self.fleet.remove(name)
        self.prefixes.remove_replica(replica.index)
        for request_id in [
            request_id for request_id, placed in self._placed.items() if placed.replica is replica
        ]:
            del self._placed[request_id]

    def set_accepting(self, name: str, accepts: bool) -> None:
        """Set whether new requests may be placed on a replica. Requests placed earlier stay
        there."""
        replica = self.fleet.set_accepting(name, accepts)
        if accepts:
            self._update_delay(replica, 0.0)

    def set_slowness(self, name: str, measured: float, now_s: float) -> None:
        """Set the ratio of a replica's measured step times to the times that its cost model
        predicts."""
        replica = self.fleet.set_slowness(name, measured)
        if replica is not None:
            self._update_delay(replica, now_s)

    def forget_prefixes(self, name: str) -> None:
        """Record that a replica's cache was emptied."""
        self.prefixes.forget(self.fleet.by_name[name].index)

    # ---- requests ---------------------------------------------------------------------------

    def place(self, request: RoutedRequest, now_s: float) -> str:
        """Choose a replica for a request, count its load there, and return the replica's name.

        Raises NoReplicaError if no replica accepts requests. To move a request, end it and place it
        again under the same id.
        """
        request_id = request.request_id
        assert request_id not in self._placed, f"{request_id!r} is already placed"
        if not self.fleet.accepting:
            raise NoReplicaError(
                f"none of the {len(self.fleet.by_name)} replicas accepts requests; retry when a"
                " replica has started"
            )
        # First, update the busy share and the delays that the policy reads.
        self.fleet.record_arrival()
        self._refresh(now_s)
        # Then look up which replicas have cached which prefixes of the prompt, and let the policy
        # choose.
        positions = self.prefixes.positions
        kept = positions.of_chain(request.digests)
        masks = self.prefixes.masks(kept)
        sizes = [end * self.block_size for end in positions.ends[: len(masks)]]
        candidates = Candidates(request, now_s, self.fleet, masks, sizes)
        replica = self.policy.choose(candidates)
        # Last, add the request to its replica's load. On average, a sequence attends to half of its
        # output.
        num_tokens, num_known = request.num_prompt_tokens, candidates.num_known(replica)
        num_cached = candidates.num_cached_tokens(replica)
        self._placed[request_id] = _Placed(
            replica,
            request.n,
            num_tokens - num_cached,
            request.n * (num_tokens + int(request.num_output_tokens / 2)),
        )
        prefill_s = replica.speed.seconds(num_tokens, num_cached)
        replica.add_request(request_id, num_tokens - num_cached, prefill_s, now_s)
        num_tokens += int(request.n * request.num_output_tokens)
        self.prefixes.place(replica.index, kept, num_known, -(-num_tokens // self.block_size))
        self._update_delay(replica, now_s)
        return replica.name

    def on_first_token(self, request_id: str, now_s: float) -> None:
        """Count a request's prompt as computed. Has no effect after the first call, or if the
        request is not placed."""
        placed = self._placed.get(request_id)
        if placed is None or placed.decodes_since_s is not None:
            return
        placed.decodes_since_s = now_s
        placed.replica.start_decoding(
            request_id,
            placed.num_uncached_tokens,
            placed.num_sequences,
            placed.num_decode_tokens,
            now_s,
        )
        self._update_delay(placed.replica, now_s)

    def on_end(self, request_id: str, now_s: float) -> None:
        """Remove a request that has finished, was aborted or moves. Has no effect for a request
        that is not placed."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        replica, since_s = placed.replica, placed.decodes_since_s
        if since_s is None:
            replica.drop_prompt(request_id, placed.num_uncached_tokens)
        else:
            replica.end_decoding(placed.num_sequences, placed.num_decode_tokens)
            self._num_decoded += 1
            change_s = max(0.0, now_s - since_s) - self.mean_decode_s
            self.mean_decode_s += change_s / min(self._num_decoded, DECODE_MEMORY)
        self._update_delay(replica, now_s)

    def _update_delay(self, replica: Replica, now_s: float) -> None:
        """Update the index of delays after a replica's load has changed."""
        self.fleet.update_busy(replica)
        if replica.accepts:
            delay_s = self.policy.expected_delay_s(replica, now_s, self.mean_decode_s)
            self.fleet.delays.set(replica.index, delay_s)

    def _refresh(self, now_s: float) -> None:
        """Update the delays of the next NUM_REFRESHED replicas, round-robin: a replica's delay
        shrinks as it computes the prompts placed on it."""
        accepting, delays = self.fleet.accepting, self.fleet.delays
        num_accepting, at = len(accepting), self._refreshed
        for _ in range(min(NUM_REFRESHED, num_accepting)):
            at = (at + 1) % num_accepting
            replica = accepting[at]
            if replica.num_prompts:
                delay_s = self.policy.expected_delay_s(replica, now_s, self.mean_decode_s)
                delays.set(replica.index, delay_s)
        self._refreshed = at

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless each replica's load is the sum over its placed requests."""
        self.prefixes.check()
        assert all(self.fleet.speeds.values())
        for replica in self.replicas:
            at = [speed for speed, mask in self.fleet.speeds.items() if mask >> replica.index & 1]
            assert at == [replica.speed], (at, replica.speed)
            own = [placed for placed in self._placed.values() if placed.replica is replica]
            prompts = [placed for placed in own if placed.decodes_since_s is None]
            assert replica.num_requests == len(own) and replica.num_prompts == len(prompts)
            assert replica.num_uncached_tokens == sum(each.num_uncached_tokens for each in prompts)
            decoding = [placed for placed in own if placed.decodes_since_s is not None]
            assert replica.num_decodes == sum(placed.num_sequences for placed in decoding)
            assert replica.num_decode_tokens == sum(each.num_decode_tokens for each in decoding)
