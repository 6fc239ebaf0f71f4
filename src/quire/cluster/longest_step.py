"""Predicts the longest step of an engine from what it says when it is ready.

Used by `silence_watch` and `machines.remote_link`, to judge an engine that does not answer.
"""

from collections.abc import Mapping
from typing import Any

from quire.core.sampling_params import ModelLimits
from quire.core.scheduling.cost_model import StepCostModel, StepLoad


def longest_step_s(limits: ModelLimits, facts: Mapping[str, Any]) -> float:
    """Predicted seconds of the longest step of an engine with these limits and facts; 0 if the
    engine has not measured its steps."""
    coefficients = facts.get("step_costs")
    if not coefficients:
        return 0.0
    rows = int(facts["max_num_seqs"])
    num_tokens = int(facts["num_blocks"]) * int(facts["block_size"])
    longest = StepLoad(rows, min(num_tokens, rows * limits.max_model_len)).with_chunk(
        limits.max_model_len, int(facts["max_num_batched_tokens"])
    )
    return StepCostModel(list(coefficients)).predict_s(longest)
