"""Registry entries of MTP heads, one for each architecture whose checkpoints have such heads.

This module imports the families with MTP heads. `models.registry` imports it only for such heads.
"""

from collections.abc import Callable, Mapping
from typing import Any

from quire.models.checkpoints.arranged import Arrangement
from quire.models.checkpoints.unstacked import UnstackedCheckpoint
from quire.models.config import ModelConfig
from quire.models.families.hybrids import qwen3_5, qwen3_next
from quire.models.families.latent import deepseek, glm4_moe_lite, latent_decoder
from quire.models.families.moe.glm4_moe import Glm4MoeConfig
from quire.models.heads.mtp import HybridMTPHead, LatentMTPHead, MTPEntry, MTPHead
from quire.models.model_entry import CHECKPOINT_PARTS


def _entry(
    config: type[ModelConfig],
    model: type[MTPHead],
    parts: Mapping[str, tuple[str, ...]] = CHECKPOINT_PARTS,
    arrangement: Callable[[Any], Arrangement] | None = None,
) -> MTPEntry:
    """The entry of a head whose layer may have a mixture of experts."""
    return MTPEntry(config, model, parts, arrangement=arrangement, unstack=UnstackedCheckpoint)


def _latent(config: type[ModelConfig]) -> MTPEntry:
    parts, arrangement = latent_decoder.LATENT_PARTS, latent_decoder.arrangement
    return _entry(config, LatentMTPHead, parts, arrangement)


def _hybrid(config: type[ModelConfig], arrangement: Callable[[Any], Arrangement]) -> MTPEntry:
    return _entry(config, HybridMTPHead, arrangement=arrangement)


DEEPSEEK_V3 = _latent(deepseek.DeepseekV3Config)
GLM4_MOE = _entry(Glm4MoeConfig, MTPHead)
GLM4_MOE_LITE = _latent(glm4_moe_lite.Glm4MoeLiteConfig)
QWEN3_5 = _hybrid(qwen3_5.Qwen35Config, qwen3_5.arrangement)
QWEN3_5_MOE = _hybrid(qwen3_5.Qwen35MoeConfig, qwen3_5.arrangement)
QWEN3_NEXT = _hybrid(qwen3_next.Qwen3NextConfig, qwen3_next.arrangement)
