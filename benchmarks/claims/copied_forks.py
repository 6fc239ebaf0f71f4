"""Baseline KV memory: each fork gets its own copy of K and V.

Memory is still paged, and a sequence grows block by block. Before a fork or its source computes
again, all their shared blocks are copied, whereas `core.memory.copy_on_write` copies only the block
to be written. Called by `beam_speed`.
"""

from collections.abc import Iterable

from quire.core.memory.copy_on_write import CopyOnWrite
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sequence import Sequence
from quire.errors import ConfigurationError


class CopyEverything(CopyOnWrite):
    """Before a sequence computes, copies all of its blocks that another sequence shares, not only
    the block that will be written."""

    def _shared_entries(self, sequence: Sequence) -> Iterable[tuple[int, int, int]]:
        for group, table in enumerate(sequence.block_tables):
            for index, block in enumerate(table):
                if self._num_holders(block) > 1:
                    yield group, index, block


class CopiedForksManager(KVCacheManager):
    """Gives each fork its own blocks.

    Invariant: a sequence that computes in a step shares no block in that step. Use it only where no
    step fails: a failed step may not have copied the full blocks, and nothing copies them later.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        """Raises ConfigurationError for a prefix cache, since that shares blocks, and for windows
        and states, since their tables have entries that are not blocks."""
        if config.enable_prefix_caching:
            raise ConfigurationError(
                "enable_prefix_caching is True, but this memory shares no blocks; set it to False"
            )
        super().__init__(config)
        if self.growth.bounded:
            raise ConfigurationError(
                "this memory copies forks of full attention only, but the model has layers with"
                " windows or states; compare another model"
            )
        self.copy_on_write = CopyEverything(
            self.growth, self.pool, self.deferred, self._take_blocks
        )

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Fork as the base class does, but mark all blocks for copying, not only a partial one."""
        super().fork(child, parent)
        child.shares_tail = parent.shares_tail = parent.num_computed_tokens > 0


def copied_forks(config: KVCacheConfig, max_model_len: int) -> KVCacheManager:
    """A factory for `LLM(kv_allocator=...)` and `build_engine`."""
    return CopiedForksManager(config)
