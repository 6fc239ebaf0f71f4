"""The replicas that a router knows, by name, index, prefill speed and expected delay."""

from quire.routing.delay_index import DelayIndex
from quire.routing.replica import PrefillSpeed, Replica, ReplicaFacts, graded_slowness

ARRIVALS = 200
"""busy_share is averaged over about this many requests."""


class Fleet:
    """The replicas of a router; replicas may be added and removed at any time.

    Invariant: `delays` has exactly the accepting replicas. `speeds` maps each speed of a replica to
    the bit mask of the indices of the replicas that have it.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Replica] = {}
        self.by_index: dict[int, Replica] = {}
        #: The accepting replicas, in the order of their indices.
        self.accepting: list[Replica] = []
        self.delays = DelayIndex()
        self.speeds: dict[PrefillSpeed, int] = {}
        #: The average prefill speed of all replicas; zeros while there are no replicas.
        self.mean_speed = PrefillSpeed(0.0, 0.0)
        #: Share of the accepting replicas with prompts to compute, averaged over recent arrivals.
        self.busy_share = 0.0
        self._num_seen = 0
        self._busy: set[int] = set()
        self._speed_of: dict[tuple[int, int], PrefillSpeed] = {}
        self._free_indices: list[int] = []

    def add(self, name: str, facts: ReplicaFacts) -> Replica:
        """Add a replica that has no requests. Its name must be new."""
        assert name not in self.by_name, f"replica {name!r} was already added"
        speed = self._known_speed(PrefillSpeed.of(facts))
        index = self._free_indices.pop() if self._free_indices else len(self.by_index)
        replica = Replica(name, index, facts, speed)
        self.by_name[name] = self.by_index[index] = replica
        self._add_to_speed(replica)
        self._list_accepting()
        self.delays.set(index, 0.0)
        return replica

    def remove(self, name: str) -> Replica:
        """Remove a known replica."""
        replica = self.by_name.pop(name)
        del self.by_index[replica.index]
        self._busy.discard(replica.index)
        self.delays.discard(replica.index)
        self._remove_from_speed(replica)
        self._free_indices.append(replica.index)
        self._list_accepting()
        return replica

    def set_accepting(self, name: str, accepts: bool) -> Replica:
        """Set whether new requests may be placed on a replica. If `accepts`, the caller has to add
        the replica to `delays`."""
        replica = self.by_name[name]
        replica.accepts = accepts
        if not accepts:
            self.delays.discard(replica.index)
        self.update_busy(replica)
        self._list_accepting()
        return replica

    def set_slowness(self, name: str, measured: float) -> Replica | None:
        """Set the ratio of a replica's measured step times to the times that its cost model
        predicts. Returns the replica if its rounded speed has changed, else None."""
        replica = self.by_name[name]
        slowness = graded_slowness(measured, replica.slowness)
        if slowness == replica.slowness:
            return None
        self._remove_from_speed(replica)
        told = PrefillSpeed.of(replica.facts)
        replica.set_speed(slowness, self._known_speed(told.slowed(slowness)))
        self._add_to_speed(replica)
        return replica

    def update_busy(self, replica: Replica) -> None:
        """Update the set of busy replicas after a replica's number of prompts has changed."""
        if replica.num_prompts and replica.accepts:
            self._busy.add(replica.index)
        else:
            self._busy.discard(replica.index)

    def record_arrival(self) -> None:
        """Record the arrival of a request: update the average `busy_share` with the share of
        replicas that are busy now."""
        self._num_seen += 1
        change = len(self._busy) / len(self.accepting) - self.busy_share
        self.busy_share += change / min(self._num_seen, ARRIVALS)

    def _known_speed(self, own: PrefillSpeed) -> PrefillSpeed:
        return self._speed_of.setdefault(own.grade, own)

    def _add_to_speed(self, replica: Replica) -> None:
        self.speeds[replica.speed] = self.speeds.get(replica.speed, 0) | 1 << replica.index
        self._update_mean_speed()

    def _remove_from_speed(self, replica: Replica) -> None:
        left = self.speeds[replica.speed] & ~(1 << replica.index)
        if left:
            self.speeds[replica.speed] = left
        else:
            del self.speeds[replica.speed]
        self._update_mean_speed()

    def _update_mean_speed(self) -> None:
        counts = {speed: mask.bit_count() for speed, mask in self.speeds.items()}
        total = max(1, sum(counts.values()))
        self.mean_speed = PrefillSpeed(
            sum(speed.token_s * count for speed, count in counts.items()) / total,
            sum(speed.pair_s * count for speed, count in counts.items()) / total,
        )

    def _list_accepting(self) -> None:
        accepting = [replica for replica in self.by_name.values() if replica.accepts]
        self.accepting = sorted(accepting, key=lambda replica: replica.index)
