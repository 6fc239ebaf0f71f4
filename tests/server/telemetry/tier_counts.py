"""What an engine with a disk tier counts before anything has happened."""

from dataclasses import asdict, fields
from typing import Any

from quire.core.memory.tiers.loads import LoadStats
from quire.tiers.disk.disk_tier import DiskTierCounters

BLOCKS = ("stored", "not_stored", "too_late", "waiting")


def no_moves() -> dict[str, Any]:
    """As `BlockMoves.counts`."""
    blocks = {f"num_{what}_blocks": 0 for what in BLOCKS}
    disk = dict.fromkeys((field.name for field in fields(DiskTierCounters)), 0)
    return asdict(LoadStats()) | blocks | {"by_tier": {"disk": disk}}
