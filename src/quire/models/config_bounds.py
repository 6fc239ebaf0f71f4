"""The bounds of every number in a config.json.

A number out of bounds means that the file is damaged. Numbers are checked while the config is read,
before any allocation. Upper bounds are far above those of published models, and low enough that
sizes of tensors can't overflow.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import CheckpointError, shown

MAX_WEIGHTS = 1 << 44
"""Maximum number of weights of a whole model: 17.6 trillion."""

MAX_EXPERTS = 1 << 16
"""Maximum number of experts in all layers together. Their modules are created before weights are
read."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number; both ends are allowed."""

    lowest: float
    highest: float
    #: An integer must be a multiple of this number.
    multiple_of: int = 1


MAX_POSITIONS = 1 << 28

INTEGERS: Mapping[str, Bounds] = {
    "vocab_size": Bounds(1, 1 << 24),
    "hidden_size": Bounds(1, 1 << 20),
    "intermediate_size": Bounds(1, 1 << 22),
    "num_hidden_layers": Bounds(1, 4096),
    "num_attention_heads": Bounds(1, 1 << 14),
    "num_key_value_heads": Bounds(1, 1 << 14),
    "head_dim": Bounds(2, 1 << 14, multiple_of=2),  # it rotates in pairs
    "max_position_embeddings": Bounds(1, MAX_POSITIONS),
    "original_max_position_embeddings": Bounds(2, MAX_POSITIONS),  # the logarithm is a divisor
    "sliding_window": Bounds(1, (1 << 31) - 1),
    "sliding_window_pattern": Bounds(1, 1 << 16),
    "max_window_layers": Bounds(0, 1 << 16),
    "top_k_experts": Bounds(1, 1 << 16),
    "num_kv_shared_layers": Bounds(0, 4095),
    "hidden_size_per_layer_input": Bounds(0, 1 << 16),
    "vocab_size_per_layer_input": Bounds(1, 1 << 24),
    "no_rope_layer_interval": Bounds(1, 1 << 16),
    "num_experts": Bounds(1, 1 << 16),
    "num_local_experts": Bounds(1, 1 << 16),
    "n_routed_experts": Bounds(1, 1 << 16),
    "n_shared_experts": Bounds(0, 1 << 10),
    "num_experts_per_tok": Bounds(1, 1 << 16),
    "moe_intermediate_size": Bounds(1, 1 << 22),
    "n_group": Bounds(1, 1 << 16),
    "topk_group": Bounds(1, 1 << 16),
    "decoder_sparse_step": Bounds(1, 4096),
    "first_k_dense_replace": Bounds(0, 4096),
    "num_nextn_predict_layers": Bounds(0, 4096),
    "num_labels": Bounds(1, 1 << 20),
    "type_vocab_size": Bounds(1, 16),
    "max_seq_length": Bounds(1, MAX_POSITIONS),
    "kv_lora_rank": Bounds(1, 1 << 16),
    "q_lora_rank": Bounds(1, 1 << 16),
    "qk_nope_head_dim": Bounds(1, 1 << 14),
    "qk_rope_head_dim": Bounds(2, 1 << 14, multiple_of=2),
    "v_head_dim": Bounds(1, 1 << 14),
    "moe_layer_freq": Bounds(1, 4096),
    "num_mtp_layers": Bounds(0, 4096),
    "conv_kernel": Bounds(2, 4),
    "mamba_head_dim": Bounds(16, 1 << 14, multiple_of=16),
    "mamba_num_heads": Bounds(1, 1 << 14),
    "n_groups": Bounds(1, 1 << 14),
    "ssm_state_size": Bounds(1, 1 << 12),
    "mamba_d_conv": Bounds(2, 4),  # as in `recurrence.state_specs`
    "mamba_d_head": Bounds(16, 1 << 14, multiple_of=16),
    "mamba_d_ssm": Bounds(16, 1 << 20, multiple_of=16),
    "mamba_d_state": Bounds(1, 1 << 12),
    "mamba_expand": Bounds(1, 64),
    "mamba_n_groups": Bounds(1, 1 << 14),
    "mamba_n_heads": Bounds(1, 1 << 14),
    "shared_expert_intermediate_size": Bounds(1, 1 << 22),
    "full_attention_interval": Bounds(1, 4096),
    "linear_conv_kernel_dim": Bounds(2, 4),  # as in `recurrence.state_specs`
    "linear_key_head_dim": Bounds(1, 1 << 14),
    "linear_value_head_dim": Bounds(16, 1 << 14, multiple_of=16),
    "linear_num_key_heads": Bounds(1, 1 << 14),
    "linear_num_value_heads": Bounds(1, 1 << 14),
    "block_ff_dim": Bounds(1, 1 << 22),
    "block_multiple_of": Bounds(1, 1 << 16),
    "conv_L_cache": Bounds(2, 4),  # as in `recurrence.state_specs`
    "draft_vocab_size": Bounds(1, 1 << 24),
    "target_hidden_size": Bounds(1, 1 << 20),
    "depth": Bounds(1, 4096),
    "downsample_factor": Bounds(1, 64),
    "image_size": Bounds(1, 1 << 14),
    "mm_tokens_per_image": Bounds(1, 1 << 16),
    "pooling_kernel_size": Bounds(1, 1 << 8),
    "position_embedding_size": Bounds(1, 1 << 16),
    "image_token_id": Bounds(0, 1 << 24),
    "image_token_index": Bounds(0, 1 << 24),
    "num_heads": Bounds(1, 1 << 14),
    "num_patches": Bounds(1, 1 << 24),
    "num_position_embeddings": Bounds(1, 1 << 24),
    "out_hidden_size": Bounds(1, 1 << 20),
    "patch_size": Bounds(1, 1 << 10),
    "projector_hidden_size": Bounds(1, 1 << 20),
    "scale_factor": Bounds(1, 64),
    "spatial_merge_size": Bounds(1, 64),
    "temporal_patch_size": Bounds(1, 64),
}

NUMBERS: Mapping[str, Bounds] = {
    "rms_norm_eps": Bounds(1e-30, 1.0),
    "layer_norm_eps": Bounds(1e-30, 1.0),
    "rope_theta": Bounds(1.0001, 1e18),  # the logarithm is a divisor
    "partial_rotary_factor": Bounds(1e-3, 1.0),
    "factor": Bounds(1e-3, 1e6),
    "low_freq_factor": Bounds(1e-3, 1e6),
    "high_freq_factor": Bounds(1e-3, 1e6),
    "attention_factor": Bounds(1e-3, 1e3),
    "time_step_min": Bounds(0.0, 1e3),
    "mamba_dt_min": Bounds(0.0, 1e3),
    "beta_fast": Bounds(1e-3, 1e6),
    "beta_slow": Bounds(1e-3, 1e6),
    "mscale": Bounds(0.0, 1e3),  # 0 means absent, as in transformers
    "mscale_all_dim": Bounds(0.0, 1e3),
    "short_factor": Bounds(1e-3, 1e6),
    "long_factor": Bounds(1e-3, 1e6),
}


FACTOR = Bounds(1e-9, 1e9)
"""The bounds of factors that have no entry above, such as factors of embeddings or logits."""


def checked_integer(what: str, name: str, value: Any) -> int:
    """Check `value` against the bounds of `name`.

    Raises CheckpointError, whose message begins with `what`.
    """
    bounds = INTEGERS[name]
    # Convert the bounds from floats to integers, so that comparisons don't round.
    lowest, highest = int(bounds.lowest), int(bounds.highest)
    if type(value) is not int or not lowest <= value <= highest or value % bounds.multiple_of:
        kind = "an integer" if bounds.multiple_of == 1 else f"a multiple of {bounds.multiple_of}"
        raise CheckpointError(
            f"{what} is {shown(value)}, but must be {kind} from {lowest} to {highest}"
        )
    return value


def checked_number(what: str, name: str, value: Any) -> float:
    """Check that `value` is finite and within the bounds of `name` (FACTOR if it has none).

    Raises CheckpointError, whose message begins with `what`.
    """
    bounds = NUMBERS.get(name, FACTOR)
    is_number = type(value) in (int, float) and bounds.lowest <= value <= bounds.highest
    if not is_number or not math.isfinite(value):
        raise CheckpointError(
            f"{what} is {shown(value)}, but must be a number from {bounds.lowest:g} to "
            f"{bounds.highest:g}"
        )
    return float(value)
