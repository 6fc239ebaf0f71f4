"""The waiting queue, in the order of a policy.

The scheduler adds and removes sequences; the queue does not check whether candidates fit.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import merge

from quire.core.scheduling.policy import Bucket, Policy, Rank
from quire.core.sequence import Sequence, SequenceState

NUM_HEADS_RERANKED = 4
RERANK_WINDOW = 32

_Entry = tuple[Rank, Sequence]


class WaitingQueue:
    """Buckets of waiting sequences, each in rank order; the policy says which bucket is next.

    Invariant: `_places` has each waiting sequence once, with its bucket and the rank under which it
    was inserted; no bucket is empty.

    A bucket is a sorted list: finding a place takes O(log n) comparisons, and an insertion is one
    move of memory (3 us at worst with 10,000 waiting). Each choice looks at the first sequence of
    each bucket.
    """

    def __init__(
        self, policy: Policy, count_matched_tokens: Callable[[Sequence], int] | None = None
    ) -> None:
        """count_matched_tokens: the tokens that the prefix cache has of a sequence now; needed by a
        policy that `reads_matches`."""
        assert count_matched_tokens is not None or not policy.reads_matches
        self._policy = policy
        self._count_matched_tokens = count_matched_tokens
        self._buckets: dict[Bucket, list[_Entry]] = {}
        # Where each sequence is, and the number of tokens with which it was counted.
        self._places: dict[Sequence, tuple[Bucket, Rank, int]] = {}
        #: Number of tokens of all waiting sequences. Of a sequence that waited to be forked when it
        #: was added, only the tokens that it does not share with its parent.
        self.num_tokens = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._places

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences by rank, over all buckets. The queue must not change during the
        iteration."""
        return (sequence for _, sequence in merge(*self._buckets.values()))

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """Rank and add a new sequence, whose `arrival_s` and `order` are set."""
        self._policy.on_enter(sequence, now_s)
        sequence.rank = self._read_rank(sequence, now_s)
        self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence under its `rank`, which is unique."""
        assert sequence not in self._places, sequence
        bucket, rank = self._policy.bucket(sequence), sequence.rank
        num_shared = 0 if sequence.parent is None else sequence.num_common_tokens
        num_tokens = sequence.num_tokens - num_shared
        self._places[sequence] = bucket, rank, num_tokens
        self.num_tokens += num_tokens
        insort(self._buckets.setdefault(bucket, []), (rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, even if its state and rank have changed since it was added."""
        bucket, rank, num_tokens = self._places.pop(sequence)
        self.num_tokens -= num_tokens
        entries = self._buckets[bucket]
        index = bisect_left(entries, (rank,))
        assert entries[index][1] is sequence
        del entries[index]
        if not entries:
            del self._buckets[bucket]

    def head(self) -> Sequence | None:
        """The sequence that is next; None if none waits."""
        return next(self.candidates(), None)

    def candidates(self) -> Iterator[Sequence]:
        """All sequences, each chosen by the policy's keys at the time when it is drawn.

        The queue may change during the iteration: a removed sequence is not drawn, and an added one
        is drawn unless it stands before the last one drawn from its bucket.
        """
        drawn: dict[Bucket, Rank] = {}
        while True:
            choice: tuple[float, Rank] | None = None
            for bucket, entries in self._buckets.items():
                index = _index_after(entries, drawn[bucket]) if bucket in drawn else 0
                if index == len(entries):
                    continue
                key = self._policy.bucket_key(bucket), entries[index][0]
                if choice is None or key < choice:
                    choice, chosen_bucket, sequence = key, bucket, entries[index][1]
            if choice is None:
                return
            drawn[chosen_bucket] = choice[1]
            yield sequence

    def refresh(self, now_s: float) -> None:
        """Before a step, update the ranks of a few sequences that have never run, if the policy
        `reranks`.

        First it ranks the head again, then the new head, until a head keeps its place. Then it
        ranks one of the first RERANK_WINDOW sequences of the head's bucket, a different one at each
        call, since the rank may have improved. At most NUM_HEADS_RERANKED + 1 ranks are read,
        however many wait.
        """
        if not self._policy.reranks:
            return
        for _ in range(NUM_HEADS_RERANKED):
            head = self.head()
            if head is None or not self._rerank(head, now_s):
                break
        head = self.head()
        if head is None:
            return
        entries = self._buckets[self._places[head][0]]
        self._turn = (self._turn + 1) % min(len(entries), RERANK_WINDOW)
        if self._turn:
            self._rerank(entries[self._turn][1], now_s)

    def _rerank(self, sequence: Sequence, now_s: float) -> bool:
        """Rank a sequence again unless it has run; returns whether its rank changed."""
        if sequence.state is not SequenceState.WAITING:
            return False
        rank = self._read_rank(sequence, now_s)
        if rank == sequence.rank:
            return False
        self.remove(sequence)
        sequence.rank = rank
        self.add(sequence)
        return True

    def _read_rank(self, sequence: Sequence, now_s: float) -> Rank:
        if self._policy.reads_matches:
            assert self._count_matched_tokens is not None
            parent = sequence.parent
            if parent is not None and parent.num_computed_tokens < sequence.num_common_tokens:
                # The tokens that its parent has computed must not put a fork ahead of its parent.
                sequence.num_matched_tokens = parent.num_matched_tokens
            else:
                sequence.num_matched_tokens = self._count_matched_tokens(sequence)
        return (*self._policy.rank(sequence, now_s), sequence.order)


def _index_after(entries: list[_Entry], rank: Rank) -> int:
    """Index of the first entry with a larger rank."""
    index = bisect_left(entries, (rank,))
    return index + (index < len(entries) and entries[index][0] == rank)
