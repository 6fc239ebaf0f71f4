"""In hybrid models, demotes cached windows and states that no later sequence will start from.

In groups that keep all tokens, a later sequence can start from any position of a prefix. A window
or a state serves one position only. When a session has continued, its earlier positions are
useless, unless other sequences start from them, too. A sequence leaves two positions to start from:
the ends of its prompt and of its output. A follow-up starts from the output's end if its prompt
repeats the answer, else from the prompt's end (when the client leaves out the reasoning). Past hits
show which of the two ends is used.

Demoted contents stay findable until their blocks are needed. Only `kv_cache_manager` uses this.
"""

from collections import OrderedDict

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.growth import Growth
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.memory.resume_points import ResumePoints
from quire.core.memory.state_snapshots import StateSnapshots
from quire.core.sequence import Sequence


class HybridDemotion:
    """Demotes runs of windows and snapshots of states, except at the anchors of sequences."""

    def __init__(
        self,
        cache: PrefixCache,
        pool: BlockPool,
        growth: Growth,
        snapshots: StateSnapshots,
        resume_points: ResumePoints,
    ) -> None:
        #: Number of first hits at ends of outputs (num_tail_hits) and at ends of prompts.
        self.num_tail_hits = self.num_prompt_hits = 0
        self._cache = cache
        self._pool = pool
        self._growth = growth
        self._snapshots = snapshots
        self._resume_points = resume_points
        # Digest of a last full block -> number of hits that ended there; only the latest ones.
        self._num_ends: OrderedDict[bytes, int] = OrderedDict()

    def count_hit(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Record the position that a sequence starts from, and the positions whose windows and
        states it will leave.

        A position at which several hits end, such as the end of a system prompt, belongs to no
        single session.
        """
        size = self._growth.block_size
        anchors = {(sequence.num_prompt_tokens - 1) // size * size, *sequence.anchors}
        num_full = match.num_tokens // size
        if match.num_known_tokens > match.num_tokens:
            anchors.add(match.num_known_tokens)
            self._count_end(sequence.chain[match.num_known_tokens // size - 1])
        if 0 < num_full <= len(sequence.chain) and any(map(len, match.blocks)):
            if self._count_end(sequence.chain[num_full - 1]) > 1:
                anchors.add(num_full * size)
            else:
                self.num_tail_hits += bool(match.partial)
                self.num_prompt_hits += not match.partial
        sequence.anchors = tuple(sorted(anchors - {0}))

    def _count_end(self, digest: bytes) -> int:
        count = self._num_ends.pop(digest, 0) + 1
        self._num_ends[digest] = count
        if len(self._num_ends) > self._pool.num_blocks:
            self._num_ends.popitem(last=False)
        return count

    def demote_copied(self, match: PrefixMatch) -> None:
        """Demote partly filled blocks that a sequence has copied, because it continues in the
        copies."""
        size = self._growth.block_size
        for block in match.partial:
            content = self._pool.content[block]
            if content is not None and (self._cache.num_tokens(content[1]) or size) < size:
                self._pool.demote(block)

    def demote_dead_end(self, sequence: Sequence, num_confirmed: int) -> None:
        """When a sequence ends, with its written blocks published, demote the end (of its prompt or
        of its output) from which no follow-up starts."""
        size = self._growth.block_size
        # First, record every end except the dead one as a resume point.
        dead = self._dead_end(sequence, num_confirmed)
        prompt_end = (sequence.num_prompt_tokens - 1) // size * size
        kept_ends = {num_confirmed, prompt_end, *sequence.anchors} - {dead}
        for end in sorted(kept_ends):
            if end <= num_confirmed:
                self._add_resume_point(sequence, end)
        if dead is None:
            return
        # Then demote the dead end's windows, partly filled block and state.
        for rule in self._growth.windows:
            kept = [range(rule.first_needed(end), -(-end // size)) for end in kept_ends]
            for index in range(rule.first_needed(dead), dead // size):
                block = self._cache.find(rule.group, sequence.chain[index])
                if block is not None and not any([index in run for run in kept]):
                    self._pool.demote(block)
        if dead == num_confirmed and dead % size:  # the end is a partly filled block
            for table in [sequence.block_tables[rule.group] for rule in self._growth.growing]:
                self._pool.demote(table[dead // size])
        if self._snapshots.enabled:
            last = sequence.snapshot
            is_last = last.num_tokens == dead
            self._snapshots.demote(last.digest if is_last else sequence.chain[dead // size - 1])

    def _dead_end(self, sequence: Sequence, num_confirmed: int) -> int | None:
        """Number of tokens at the end from which no follow-up starts, judging by past hits; None if
        prompt and output may both be hit."""
        size = self._growth.block_size
        prompt_end = (sequence.num_prompt_tokens - 1) // size * size
        if not 0 < prompt_end < num_confirmed:
            return None
        if self.num_prompt_hits > self.num_tail_hits:
            return num_confirmed
        num_ends = self._num_ends.get(sequence.chain[prompt_end // size - 1], 0)
        return prompt_end if num_ends <= 1 else None

    def _add_resume_point(self, sequence: Sequence, num_tokens: int) -> None:
        full, offset = divmod(num_tokens, self._growth.block_size)
        digests = sequence.chain[:full]
        if offset and self._growth.main is not None:
            content = self._pool.content[sequence.block_tables[self._growth.main][full]]
            digests += [content[1]] if content is not None else []
        elif offset:
            digests.append(sequence.snapshot.digest)
        if len(digests) == full + (offset > 0) > 0:
            self._resume_points.add(digests, num_tokens)
