"""Chooses the inputs of each linear whose activations are multiplied without being rounded.

Linears of block-quantized weights round activations to int8, with a scale for each 32 inputs. In
real models a few inputs are a hundred times as large as others in every token, and the inputs that
share a scale with them lose precision. So when an engine starts, the model reads a prompt of fixed
token ids, and each linear's widest inputs are split from the rest. The choice does not depend on
what is served later. Applies only to formats with a `WideInputsMethod`.
"""

import time

from quire.assembly.format_checks.calibration_prompt import linears_outside, measure_inputs
from quire.formats.weight_format import WideInputsMethod
from quire.kernels.quantize import widest_activations
from quire.layers.linear import Linear
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.interface import TextModel
from quire.observability.log import get_logger

logger = get_logger(__name__)


def split_wide_inputs(
    model: TextModel, max_model_len: int, digest: WeightsDigest | None = None
) -> None:
    """Split the wide inputs of a loaded model's linears, if their methods can.

    Linears that one call multiplies together, as experts, are left out. `max_model_len` limits the
    prompt's length. `digest`, if given, is updated with the chosen inputs. All ranks that share a
    model must call this at the same time.
    """
    paths = linears_outside(model, (), lambda linear: _num_wide(linear) > 0)
    if not paths:
        return
    if model.recurrent_specs:
        logger.info("all inputs are rounded, as the model has recurrent layers")
        return
    began_s = time.perf_counter()
    counts = {linear: _num_wide(linear) for linear in paths}
    found = measure_inputs(
        model, paths, max_model_len, lambda linear, x: widest_activations(x, counts[linear])
    )
    for linear, inputs in found.items():
        method = linear.method.storage
        assert isinstance(method, WideInputsMethod)
        method.set_wide_inputs(linear, inputs)
        if digest is not None:
            digest.add(f"wide inputs of {paths[linear]}", 0, inputs)
    logger.info(
        "the widest inputs of %d linears are not rounded (took %.2f s)",
        len(found),
        time.perf_counter() - began_s,
    )


def _num_wide(linear: Linear) -> int:
    method = linear.method.storage
    if not (linear.may_have_wide and isinstance(method, WideInputsMethod)):
        return 0
    return method.num_wide(linear)
