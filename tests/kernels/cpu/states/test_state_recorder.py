"""What layers with states or latents compute, recorded, run, and compared with torch's operators.

The states themselves are compared by engines (`tests.engine.test_families`).
"""

import pytest
import torch
from tests.pairwise import pairwise

from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import OpKind
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.cpu.states import state_abi
from quire.kernels.cpu.states.state_recorder import NativeStates
from quire.kernels.operators import TORCH_OPERATORS
from quire.kernels.options import NATIVE_KERNELS
from quire.kernels.rotary import Angles
from quire.kernels.state_calls import Mamba2Inputs, Mamba2Weights

NUM_TOKENS, VOCAB = 5, 60
NO_LAYERS = (abi.AttentionLayer * 0)()
POSITIONS = torch.tensor([7, 0, 3, 3, 1])
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Both:
    """A program that begins with embedded rows, and what torch makes of the same rows."""

    def __init__(self, kernels: NativeKernels, width: int, dtype: torch.dtype) -> None:
        self.table = random(VOCAB, width, dtype=dtype)
        self.token_ids = torch.arange(NUM_TOKENS) * 7
        self.dtype = dtype
        self.recorder = Recorder(kernels, dtype, NUM_TOKENS + 2, NO_LAYERS)

    def check(self, compute) -> list[OpKind]:
        """compute(operators, rows, positions) -> rows, by both; returns the operations."""
        ids, positions = self.recorder.inputs
        with self.recorder.recording():
            rows = self.recorder.embed(self.table, ids)
            output = compute(self.recorder, rows, positions)
            program = self.recorder.finish(output.flatten(1))
        expected = compute(TORCH_OPERATORS, self.table[self.token_ids], POSITIONS).flatten(1)
        for count in (NUM_TOKENS, 1):
            step = abi.Step(num_tokens=count, token_ids=self.token_ids.data_ptr())
            step.positions = POSITIONS.data_ptr()
            found = program.run(step)
            assert found.dtype == expected.dtype
            atol = TOLERANCE[self.dtype]
            torch.testing.assert_close(found, expected[:count], atol=atol, rtol=atol)
        return [OpKind(op.kind) for op in program.ops][1:]


@pairwise(kernels=NATIVE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize(("heads", "size"), [(1, 24), (3, 40), (2, 17)])
def test_norms_with_gates(
    kernels: NativeKernels, dtype: torch.dtype, gates_first: bool, heads: int, size: int
) -> None:
    weights = {"shared": random(size, seed=2, dtype=dtype)}
    weights["own"] = random(heads, size, seed=3, dtype=dtype)
    for weight in weights.values():

        def compute(operators, rows, positions, weight=weight):
            x, gate = rows.unflatten(-1, (2, heads, size)).unbind(1)
            return operators.gated_rms_norm(x, gate, weight, 1e-5, gates_first=gates_first)

        both = Both(kernels, 2 * heads * size, dtype)
        assert both.check(compute) == [OpKind.GATED_RMS_NORM]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gates_of_a_delta_rule(kernels: NativeKernels, dtype: torch.dtype) -> None:
    a_log, dt_bias = random(2, 19, seed=4, dtype=dtype)
    for index, kind in enumerate((OpKind.DELTA_DECAY, OpKind.DELTA_STEP)):

        def compute(operators, rows, positions, index=index):
            return operators.delta_gates(rows[:, 3:22], rows[:, 22:41], a_log, dt_bias)[index]

        assert kind in Both(kernels, 44, dtype).check(compute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "turned"), [(1, 40, 12), (3, 17, 34)])
def test_joined_heads_of_which_a_part_is_turned(
    kernels: NativeKernels, dtype: torch.dtype, heads: int, size: int, turned: int
) -> None:
    table = random(9, turned, seed=6)

    def compute(operators, rows, positions):
        x, tail = rows.split((heads * size, heads * turned), dim=-1)
        angles = Angles(table, positions, dtype)
        x, tail = (part.unflatten(-1, (heads, -1)) for part in (x, tail))
        return operators.join_turned(x, tail, angles)

    both = Both(kernels, heads * (size + turned), dtype)
    assert both.check(compute) == [OpKind.JOIN_TURNED]


def test_refuses_what_has_no_operation(kernels: NativeKernels) -> None:
    recorder = Recorder(kernels, torch.float32, 4, NO_LAYERS)
    with recorder.recording():
        rows = recorder.embed(random(VOCAB, 48), recorder.inputs[0])
        x, gate = rows.unflatten(-1, (2, 2, 12)).unbind(1)
        with pytest.raises(UnrecordableError, match="have shapes that don't match"):
            recorder.gated_rms_norm(x, gate, random(3, 12), 1e-5)
        angles = Angles(random(9, 12), torch.zeros(2, dtype=torch.int64), torch.float32)
        with pytest.raises(UnrecordableError, match="by the step's positions"):
            recorder.join_turned(x, gate, angles)
        with pytest.raises(UnrecordableError, match="another backend than the native one"):
            recorder.short_conv(0, rows, random(48, 4), None)
        with pytest.raises(UnrecordableError, match="not a row for each token"):
            recorder.mamba2(0, Mamba2Inputs(x, x, x, x), Mamba2Weights(random(2)))


@pytest.mark.parametrize("has_bias", [False, True])
def test_inputs_of_an_earlier_call_are_not_recorded(kernels: NativeKernels, has_bias: bool) -> None:
    calls = [state_abi.ShortConv(num_channels=48, width=4, bias=1)]
    states = NativeStates(state_abi.StateStep(), [state_abi.StateLayer()], calls)
    recorder = Recorder(kernels, torch.float32, 4, NO_LAYERS, states)
    weight, bias = random(48, 4), random(48) if has_bias else None
    with recorder.recording():
        rows = recorder.embed(random(VOCAB, 48), recorder.inputs[0])
        output = recorder.short_conv(0, rows, weight, bias)
    program = recorder.finish(output)
    recorded = abi.StateCall.from_address(program.ops[1].states).call
    found = state_abi.ShortConv.from_address(recorded)
    assert found.weight == weight.data_ptr()
    assert found.bias == (None if bias is None else bias.data_ptr())
