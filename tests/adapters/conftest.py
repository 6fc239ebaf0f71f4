"""The checkpoints of the models' tests, for adapters of them."""

from tests.models.conftest import load, run, save_checkpoint

__all__ = ["load", "run", "save_checkpoint"]
