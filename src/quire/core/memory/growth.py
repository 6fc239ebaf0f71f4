"""Growth rules: how a KV group's memory grows, and which blocks may be freed early.

Each group has one rule. The manager, the prefix index, admission's forecast and the invariant
checks use groups only through these rules.

    full, latent   a block for each block of tokens, all kept
    window         the same, but blocks that the window has passed are holes
    state          the same few blocks from the first token to the last, rewritten by each step
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Entries
from typing import ClassVar

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.sequence import Sequence
from quire.core.step import HOLE_BLOCK

Finder = Callable[[int], bool]
"""(number of blocks) -> whether a prefix of this length has its last block, or its state, cached in
the group."""

STEPS_IN_FLIGHT = 2


class GrowthRule(ABC):
    """How one group's memory grows; its blocks hold `block_size` tokens each."""

    #: Whether each token has a slot of its own in the group's blocks.
    has_slots: ClassVar[bool] = True
    #: Whether the number of blocks has an upper bound, however long the sequence is.
    is_bounded: ClassVar[bool] = False

    def __init__(self, group: int, block_size: int) -> None:
        self.group = group
        self.block_size = block_size

    @abstractmethod
    def most_blocks(self, num_tokens: int, num_together: int = 0) -> int:
        """Maximum number of blocks that a sequence needs on its way to num_tokens tokens.

        num_together: the largest number of tokens that one step must compute together.
        """

    @abstractmethod
    def num_reserved(self, num_tokens: int, end: int) -> int:
        """Number of entries that a sequence's table has from admission on.

        num_tokens: known tokens of the sequence. end: end of the first block to compute, up to
        which windows reserve blocks.
        """

    def first_needed(self, num_tokens: int) -> int:
        """The first entry that is still read after num_tokens computed tokens; entries before it
        are holes."""
        return 0

    def rewritten(self, num_tokens: int) -> range:
        """The existing entries that the next token after num_tokens computed tokens changes."""
        index, offset = divmod(num_tokens, self.block_size)
        return range(index, index + (offset > 0))

    def longest(self, most: int, has: Finder) -> int:
        """Number of blocks, at most `most`, of the longest prefix to start from.

        has: tells whether this group's part of a prefix is cached. A group that keeps all tokens
        returns `most`.
        """
        return most

    def can_keep(self, table: Entries[int], num_tokens: int, num_computed: int) -> bool:
        """Whether a sequence with this table and num_computed tokens can be cut to num_tokens."""
        return True


class FullRule(GrowthRule):
    """Every token is kept."""

    def most_blocks(self, num_tokens: int, num_together: int = 0) -> int:
        return -(-num_tokens // self.block_size)

    def num_reserved(self, num_tokens: int, end: int) -> int:
        return -(-num_tokens // self.block_size)


class WindowRule(GrowthRule):
    """A query sees the last `window` tokens, itself included; blocks that no query will see are
    freed."""

    is_bounded = True

    def __init__(self, group: int, block_size: int, window: int) -> None:
        super().__init__(group, block_size)
        self.window = window
        # The window may begin and end inside a block, and each step in flight may compute one more
        # block.
        self._most = -(-window // block_size) + 2 + STEPS_IN_FLIGHT

    def most_blocks(self, num_tokens: int, num_together: int = 0) -> int:
        """Assumes that each step computes at most a block of tokens, or num_together tokens; larger
        chunks take more blocks only if they are free."""
        most = self._most + -(-num_together // self.block_size)
        return min(-(-num_tokens // self.block_size), most)

    def num_reserved(self, num_tokens: int, end: int) -> int:
        return -(-min(num_tokens, end) // self.block_size)

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1) // self.block_size

    def longest(self, most: int, has: Finder) -> int:
        end = last = most
        while end > 0:
            needed = self.first_needed(end * self.block_size)
            while last > needed and has(last):
                last -= 1
            if last <= needed:
                return end
            # Every end whose window includes the missing block is impossible, too.
            end = last = last - 1
        return 0

    def can_keep(self, table: Entries[int], num_tokens: int, num_computed: int) -> bool:
        needed = self.first_needed(num_tokens)
        return needed * self.block_size >= num_tokens or table[needed] != HOLE_BLOCK


class StateRule(GrowthRule):
    """A state of fixed size, in `num_blocks` blocks."""

    has_slots = False
    is_bounded = True

    def __init__(self, group: int, block_size: int, num_blocks: int) -> None:
        super().__init__(group, block_size)
        self.num_blocks = num_blocks

    def most_blocks(self, num_tokens: int, num_together: int = 0) -> int:
        return self.num_blocks

    def num_reserved(self, num_tokens: int, end: int) -> int:
        return self.num_blocks

    def rewritten(self, num_tokens: int) -> range:
        """All blocks of the state; none before the first token, which starts from zeros."""
        return range(self.num_blocks if num_tokens else 0)

    def longest(self, most: int, has: Finder) -> int:
        while most > 0 and not has(most):
            most -= 1
        return most

    def can_keep(self, table: Entries[int], num_tokens: int, num_computed: int) -> bool:
        return num_tokens >= num_computed


def rule_of(group: int, description: KVGroup, block_size: int) -> GrowthRule:
    """The rule of a group, chosen by its kind."""
    if description.kind is KVKind.WINDOW:
        assert description.window is not None
        return WindowRule(group, block_size, description.window)
    if description.kind is KVKind.STATE:
        assert description.num_state_blocks > 0
        return StateRule(group, block_size, description.num_state_blocks)
    return FullRule(group, block_size)


class Growth:
    """The growth rules of all groups of a model."""

    def __init__(self, groups: Entries[KVGroup], block_size: int) -> None:
        self.block_size = block_size
        self.rules = tuple(rule_of(at, group, block_size) for at, group in enumerate(groups))
        #: Rules of groups with a slot for each token: all groups except those of states.
        self.growing = tuple(rule for rule in self.rules if rule.has_slots)
        #: Rules that free blocks behind the window.
        self.windows = tuple(rule for rule in self.rules if isinstance(rule, WindowRule))
        #: Rules of groups with recurrent states.
        self.states = tuple(rule for rule in self.rules if isinstance(rule, StateRule))
        #: Rules of groups whose number of blocks stops growing: windows and states.
        self.bounded = tuple(rule for rule in self.rules if rule.is_bounded)
        #: Rules of groups that keep all tokens.
        self.unbounded = tuple(rule for rule in self.rules if not rule.is_bounded)
        #: Number of blocks that the states of one sequence take together.
        self.state_size = sum(rule.num_blocks for rule in self.states)
        first = (*self.unbounded, *self.growing)[:1]
        #: The group whose contents are in the prefix cache's tree of tokens: a group that keeps all
        #: tokens, if the model has any. None if no group has slots.
        self.main = first[0].group if first else None
        #: Largest number of blocks that a fork copies at its first write.
        self.num_copied = self.state_size + len(self.growing)

    def most_blocks(self, num_tokens: int, num_together: int = 0) -> int:
        """Maximum number of blocks that one sequence needs on its way to num_tokens tokens, over
        all groups; see `GrowthRule.most_blocks`."""
        num_full = -(-num_tokens // self.block_size)
        return num_full * len(self.unbounded) + self.bounded_blocks(num_tokens, num_together)

    def all_most_blocks(self, nums_tokens: Entries[int]) -> int:
        """The sum of `most_blocks` over sequences.

        Called for all running sequences before each admission, so it avoids a call per sequence.
        """
        if self.bounded:
            return sum(map(self.most_blocks, nums_tokens))
        size = self.block_size
        return len(self.unbounded) * sum([-(-count // size) for count in nums_tokens])

    def bounded_blocks(self, num_tokens: int, num_together: int = 0) -> int:
        """Maximum number of blocks that one sequence needs in bounded groups on its way to
        num_tokens tokens; see `GrowthRule.most_blocks`."""
        return sum([rule.most_blocks(num_tokens, num_together) for rule in self.bounded])

    def most_to_hold(self, num_tokens: int, num_together: int = 0) -> int:
        """Number of blocks with which a sequence of num_tokens tokens can always make progress.

        This includes shared states and partly filled blocks that it holds until it has copied them.
        num_together: see `GrowthRule.most_blocks`.
        """
        if not self.bounded:
            return self.most_blocks(num_tokens)
        return self.most_blocks(num_tokens, num_together) + self.num_copied

    def num_slots(self, sequence: Sequence) -> int:
        """Number of tokens that all tables of a sequence have slots for; state groups set no
        limit."""
        lengths = [len(sequence.block_tables[rule.group]) for rule in self.growing]
        if lengths:
            return min(lengths) * self.block_size
        return -(-sequence.max_num_tokens // self.block_size) * self.block_size

    def num_held(self, tables: Entries[Entries[int]]) -> int:
        """Number of entries in a sequence's tables that name a block, not a hole."""
        num_entries = sum(map(len, tables))
        if self.windows and tables:
            num_entries -= sum(tables[rule.group].count(HOLE_BLOCK) for rule in self.windows)
        return num_entries

    def can_keep(self, tables: Entries[Entries[int]], num_tokens: int, num_computed: int) -> bool:
        """Whether a sequence of num_computed tokens can continue after being cut to num_tokens."""
        return all(
            [rule.can_keep(tables[rule.group], num_tokens, num_computed) for rule in self.bounded]
        )
