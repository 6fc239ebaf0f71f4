"""Rounds weights again when an engine starts, so that rounding errors cancel for a prompt's inputs.

The model is loaded with plain rounding. It reads a prompt of fixed token ids, and the inputs of
each linear are recorded. Then the checkpoint's weights are read a second time, and rounded for
these inputs (`kernels.compensation`). Each start rounds the same weights to the same values,
whatever the number of threads. Applies only to formats with a `CompensatedMethod`.
"""

import time
from collections.abc import Callable, Collection

from quire.assembly.format_checks.calibration_prompt import linears_outside, measure_inputs
from quire.formats.rounded import RoundedTorchMethod
from quire.formats.weight_format import CompensatedMethod
from quire.kernels.compensation import error_feedback
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.interface import TextModel
from quire.observability.log import get_logger

logger = get_logger(__name__)


def compensate_rounding(
    model: TextModel,
    max_model_len: int,
    reload: Callable[[Collection[Linear]], None],
    digest: WeightsDigest | None = None,
) -> None:
    """Round the weights of a loaded model again, if their linear methods can compensate errors.

    `max_model_len` limits the prompt's length. `reload` fills linears
    from the checkpoint, as `loader.load_again` does. `digest`, if given, is updated with the input
    statistics that determine the rounded values. All ranks that share a model must call this at the
    same time.
    """
    # Experts are left out, since most of them see few tokens of a prompt.
    paths = linears_outside(model, (Experts,), _can_compensate)
    if not paths:
        return
    if reason := _why_not(model, paths):
        logger.info("weights are rounded to nearest, without compensation, as %s", reason)
        return
    began_s = time.perf_counter()
    found = measure_inputs(model, paths, max_model_len, lambda _, x: error_feedback(x))
    for linear, feedback in found.items():
        method = linear.method.storage
        assert isinstance(method, CompensatedMethod)
        method.use_feedback(linear, feedback)
        if digest is not None:
            digest.add(f"feedback of {paths[linear]}", 0, feedback.cpu())
    reload(found.keys())
    logger.info(
        "rounding errors of %d linears are compensated for a prompt's inputs (took %.2f s)",
        len(found),
        time.perf_counter() - began_s,
    )


def _can_compensate(linear: Linear) -> bool:
    method = linear.method.storage
    return isinstance(method, CompensatedMethod) and method.can_compensate(linear)


def _why_not(model: TextModel, linears: Collection[Linear]) -> str | None:
    devices = {parameter.device.type for parameter in model.parameters()}
    by_torch = any(isinstance(each.method.storage, RoundedTorchMethod) for each in linears)
    if by_torch and devices == {"cpu"}:
        return "no native kernels multiply on the CPU, which would take long"
    return "the model has recurrent layers" if model.recurrent_specs else None
