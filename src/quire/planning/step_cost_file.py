"""Stores measured step costs and disk speeds in a file, for later plans on this machine.

The key of an entry in `~/.cache/quire/step_costs.json` has everything that affects step times.
These are the structure of the model's files, number formats, block size, kernels, threads, device
and machine, the options that change how steps are computed, and quire's version. The key of a
disk's speeds has the folder, the bytes of a block, the machine and the version.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.measurement_file import MeasurementFile
from quire.planning.step_costs import StepCosts
from quire.simulation.virtual_disk import DiskSpeeds
from quire.tiers.disk.load_rate import LoadSpeed

FORMAT = 10


class StepCostFile:
    """The entries of one file."""

    def __init__(self, path: Path) -> None:
        self._entries = MeasurementFile(path, "costs", FORMAT, "--costs")

    def find(self, facts: Mapping[str, Any]) -> StepCosts | None:
        """The costs stored under a key equal to `facts`; None if the file has none."""
        entry = self._entries.find(facts)
        if entry is None:
            return None
        try:
            return StepCosts.from_mapping(entry["costs"])
        except (KeyError, TypeError, ValueError, AssertionError):
            self._entries.warn_of_damage()
            return None

    def store(self, facts: Mapping[str, Any], costs: StepCosts) -> None:
        """Store the costs in place of older ones. Raises ConfigurationError if the file can't be
        written."""
        self._entries.store(facts, {"costs": costs.as_mapping()})

    def find_disk(self, facts: Mapping[str, Any]) -> DiskSpeeds | None:
        """The disk speeds stored under a key equal to `facts`; None if the file has none."""
        entry = self._entries.find(facts)
        if entry is None:
            return None
        try:
            alone, beside, store_s_per_byte = entry["disk"]
            return DiskSpeeds(
                LoadSpeed(*map(float, alone)),
                LoadSpeed(*map(float, beside)),
                float(store_s_per_byte),
            )
        except (KeyError, TypeError, ValueError):
            self._entries.warn_of_damage()
            return None

    def store_disk(self, facts: Mapping[str, Any], speeds: DiskSpeeds) -> None:
        """Store disk speeds as `store` does step costs."""
        self._entries.store(facts, {"disk": speeds})
