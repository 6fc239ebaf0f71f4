"""Rounding errors that cancel for typical inputs: the formula, its use, and unusual numbers."""

import pytest
import torch

from quire.kernels.compensation import (
    BLOCK,
    DAMPING,
    can_compensate,
    compensate_int8,
    error_feedback,
)
from quire.kernels.quantize import quantize_int8_weight, rotate_blocks


def _numbers(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def _correlated(num_tokens, num_inputs):
    """Inputs that lie near a few directions, as those of real linears do."""
    directions = _numbers(12, num_inputs, seed=1)
    return _numbers(num_tokens, 12, seed=2) @ directions + _numbers(
        num_tokens, num_inputs, seed=3, scale=0.3
    )


def _by_definition(x):
    """As the docstring of `error_feedback` says it, block by block."""
    found = []
    for block in rotate_blocks(x, BLOCK).double().split(BLOCK, 1):
        gram = block.T @ block
        damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(BLOCK)
        upper = torch.linalg.cholesky(damped.inverse(), upper=True)
        found.append(upper / upper.diagonal()[:, None])
    return torch.stack(found)


def test_blocks_must_be_whole():
    assert [can_compensate(size) for size in (64, 576, 1536)] == [True] * 3
    assert not any(can_compensate(size) for size in (7, 32, 96, 100))


def test_feedback_is_the_inverse_gram_matrix_factored():
    feedback = error_feedback(_correlated(40, 192))
    assert feedback.dtype == torch.float32 and feedback.shape == (3, BLOCK, BLOCK)
    expected = _by_definition(_correlated(40, 192)).float()
    torch.testing.assert_close(feedback, expected, rtol=1e-5, atol=1e-6)


def test_feedback_depends_on_directions_alone():
    x = _correlated(40, 128)
    torch.testing.assert_close(error_feedback(8192 * x), error_feedback(x), rtol=0, atol=0)
    assert torch.equal(error_feedback(x.bfloat16()), error_feedback(x.bfloat16().float()))


@pytest.mark.parametrize("broken", [0.0, torch.nan, torch.inf])
def test_blocks_without_sound_inputs_are_rounded_to_nearest(broken):
    x = _correlated(40, 192)
    x[:, 64:128] = 0.0
    x[3, 64:128] = broken
    feedback = error_feedback(x)
    assert torch.equal(feedback[1], torch.eye(BLOCK))
    usual = error_feedback(_correlated(40, 192))
    assert torch.equal(feedback[[0, 2]], usual[[0, 2]])
    weight = _numbers(30, 192, seed=4)
    plain, compensated = quantize_int8_weight(weight)[0], compensate_int8(weight, feedback)[0]
    is_equal = (plain == compensated).view(30, 3, BLOCK).all(-1).all(0)
    assert is_equal.tolist() == [False, True, False]


def test_errors_cancel_for_inputs_like_those_shown():
    x, weight = _correlated(300, 256), _numbers(200, 256, seed=4, scale=0.05)
    shown, others = x[:100], x[100:]
    exact = others @ weight.T
    errors = []
    for levels, scales in (
        quantize_int8_weight(weight),
        compensate_int8(weight, error_feedback(shown)),
    ):
        found = rotate_blocks(others, BLOCK) @ (levels * scales[:, None]).T
        errors.append((found - exact).norm() / exact.norm())
    assert 0 < errors[1] < 0.5 * errors[0]


def test_each_row_is_rounded_by_itself_with_its_usual_scale():
    weight, feedback = _numbers(33, 128, seed=4), error_feedback(_correlated(40, 128))
    levels, scales = compensate_int8(weight, feedback)
    assert levels.dtype == torch.int8 and levels.abs().max() <= 127
    assert torch.equal(scales, quantize_int8_weight(weight)[1])
    for span in (slice(5, 6), slice(0, 17)):
        again = compensate_int8(weight[span], feedback)
        assert torch.equal(again[0], levels[span]) and torch.equal(again[1], scales[span])


def test_zeros_and_broken_rows_are_as_those_rounded_to_nearest():
    weight = _numbers(5, 64)
    weight[0], weight[1, 7], weight[2, 7], weight[3, 7] = 0.0, torch.nan, torch.inf, 1e38
    levels, scales = compensate_int8(weight, error_feedback(_correlated(40, 64)))
    plain_levels, plain_scales = quantize_int8_weight(weight)
    assert not levels[:3].any() and levels[3:].any(-1).all()
    assert torch.equal(levels[:3], plain_levels[:3])
    assert scales.isnan().tolist() == [False, True, True, False, False]
    assert torch.equal(scales.nan_to_num(-1), plain_scales.nan_to_num(-1))
