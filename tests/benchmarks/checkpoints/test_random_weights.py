"""Random weights for a config: a folder that loads, in shards."""

import shutil
from pathlib import Path

import pytest
import torch
from benchmarks.checkpoints.random_weights import write_weights

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.checkpoints.loader import load_model
from quire.models.registry import load_config


@pytest.mark.parametrize("shard_bytes", [1_000_000, 1 << 30])
def test_a_folder_of_a_config_becomes_one_that_loads(shard_bytes: int, tmp_path: Path) -> None:
    shutil.copy(EMBEDDED_MODEL / "config.json", tmp_path)
    num_bytes = write_weights(tmp_path, shard_bytes)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert (len(shards) > 1) is (shard_bytes == 1_000_000)
    assert num_bytes < sum(path.stat().st_size for path in shards) < num_bytes + 100_000
    cpu = torch.device("cpu")
    model = load_model(
        tmp_path, load_config(tmp_path), dtype=torch.bfloat16, device=cpu, max_model_len=16
    )
    for parameter in model.parameters():
        assert 0.01 < parameter.float().std() < 0.03
