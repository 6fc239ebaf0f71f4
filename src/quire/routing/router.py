"""Places requests on the replicas of a fleet.

It keeps the load of each and what is cached where; a policy chooses:

    add_replica, remove_replica, set_accepting, forget_prefixes    as replicas come and go
    place -> on_first_token -> on_end                              for each request

Pure: a front calls it when it sends a request and when tokens or ends come back. Several fronts
have a router each, which knows what its own front placed.
"""

from dataclasses import dataclass

from quire.errors import NoReplicaError
from quire.routing.candidates import Candidates, RoutedRequest
from quire.routing.policy import RoutingPolicy
from quire.routing.prefix_view import PrefixView
from quire.routing.replica import Replica, ReplicaFacts


@dataclass(slots=True)
class _Placed:
    """What a request put on its replica."""

    replica: Replica
    num_sequences: int
    num_uncached_tokens: int
    prefill_s: float
    num_decode_tokens: int
    is_decoding: bool = False


class ReplicaRouter:
    """The fleet as one front sees it.

    Invariant: the load of each replica is the sum over the requests that were placed there and have
    not ended; each is accounted once.
    """

    def __init__(self, policy: RoutingPolicy, block_size: int) -> None:
        """block_size: tokens of the blocks that digests name."""
        self.policy = policy
        self.block_size = block_size
        self.prefixes = PrefixView()
        self._replicas: dict[str, Replica] = {}
        self._accepting: list[Replica] = []
        self._free_indices: list[int] = []
        self._placed: dict[str, _Placed] = {}

    @property
    def replicas(self) -> list[Replica]:
        """All that were added and not removed."""
        return list(self._replicas.values())

    @property
    def num_requests(self) -> int:
        """Placed and not ended."""
        return len(self._placed)

    # ---- replicas ---------------------------------------------------------------------------

    def add_replica(self, name: str, facts: ReplicaFacts) -> None:
        """A replica with an empty cache joins, and accepts requests. Its name must be new."""
        assert name not in self._replicas, f"replica {name!r} is there"
        index = self._free_indices.pop() if self._free_indices else len(self._replicas)
        self._replicas[name] = Replica(name, index, facts)
        self.prefixes.add_replica(index, facts.num_blocks)
        self._list_accepting()

    def remove_replica(self, name: str) -> None:
        """It is dead, cut off or gone: its cache and its load are forgotten. `on_end` of what it
        had may still come, and changes nothing."""
        replica = self._replicas.pop(name)
        self.prefixes.remove_replica(replica.index)
        self._free_indices.append(replica.index)
        for request_id in [
            request_id for request_id, placed in self._placed.items() if placed.replica is replica
        ]:
            del self._placed[request_id]
        self._list_accepting()

    def set_accepting(self, name: str, accepts: bool) -> None:
        """Whether new requests may be placed there; those that it has stay."""
        self._replicas[name].accepts = accepts
        self._list_accepting()

    def forget_prefixes(self, name: str) -> None:
        """Its cache was emptied."""
        self.prefixes.forget(self._replicas[name].index)

    def _list_accepting(self) -> None:
        accepting = [replica for replica in self._replicas.values() if replica.accepts]
        self._accepting = sorted(accepting, key=lambda replica: replica.index)

    # ---- requests ---------------------------------------------------------------------------

    def place(self, request: RoutedRequest, now_s: float) -> str:
        """The name of the replica that gets it; its load counts from now on.

        Raises NoReplicaError where none accepts requests. A request that moves elsewhere is ended
        and placed again, under the same id.
        """
        assert request.request_id not in self._placed, f"{request.request_id!r} is placed"
        if not self._accepting:
            raise NoReplicaError(
                f"none of the {len(self._replicas)} replicas takes requests; retry when one has"
                " started"
            )
        positions = self.prefixes.positions
        kept = positions.of_chain(request.digests)
        masks = self.prefixes.masks(kept)
        sizes = [end * self.block_size for end in positions.ends[: len(masks)]]
        candidates = Candidates(request, self._accepting, masks, sizes, now_s)
        replica = self.policy.choose(candidates)
        num_tokens = request.num_prompt_tokens
        num_cached = candidates.num_cached_tokens(replica)
        placed = _Placed(
            replica,
            request.n,
            num_tokens - num_cached,
            replica.own_prefill_s(num_tokens, num_cached),
            request.n * (num_tokens + int(request.num_output_tokens / 2)),
        )
        self._placed[request.request_id] = placed
        replica.take(placed.num_uncached_tokens, placed.prefill_s)
        num_blocks = -(
            -(num_tokens + int(request.n * request.num_output_tokens)) // self.block_size
        )
        self.prefixes.place(replica.index, kept, candidates.num_known(replica), num_blocks)
        return replica.name

    def on_first_token(self, request_id: str, now_s: float) -> None:
        """Its prompt is computed. Later calls change nothing, nor one for a request that is not
        placed."""
        placed = self._placed.get(request_id)
        if placed is None or placed.is_decoding:
            return
        placed.is_decoding = True
        placed.replica.end_prompt(placed.num_uncached_tokens, placed.prefill_s)
        placed.replica.start_decoding(placed.num_sequences, placed.num_decode_tokens)

    def on_end(self, request_id: str, now_s: float) -> None:
        """It has finished, was aborted, or goes on elsewhere. Nothing, where it is not placed."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        if placed.is_decoding:
            placed.replica.end_decoding(placed.num_sequences, placed.num_decode_tokens)
        else:
            placed.replica.end_prompt(placed.num_uncached_tokens, placed.prefill_s)
        placed.replica.end()

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless the loads are those of the requests that are placed."""
        self.prefixes.check()
        for replica in self._replicas.values():
            own = [placed for placed in self._placed.values() if placed.replica is replica]
            prompts = [placed for placed in own if not placed.is_decoding]
            assert replica.num_requests == len(own) and replica.num_prompts == len(prompts)
            assert replica.num_uncached_tokens == sum(each.num_uncached_tokens for each in prompts)
            decoding = [placed for placed in own if placed.is_decoding]
            assert replica.num_decodes == sum(placed.num_sequences for placed in decoding)
            assert replica.num_decode_tokens == sum(each.num_decode_tokens for each in decoding)
