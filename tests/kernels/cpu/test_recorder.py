"""What is recorded, run, and compared with the operators that it stands for; what is refused."""

import ctypes
from collections.abc import Sequence

import pytest
import torch

from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.attention_inputs import AttentionInputs
from quire.kernels.cpu import abi
from quire.kernels.cpu.abi import Epilogue, OpKind
from quire.kernels.cpu.adapters.packed_adapters import PackedAdapters, PackedRows
from quire.kernels.cpu.library import NativeKernels
from quire.kernels.cpu.linear import PackedLinear, apply
from quire.kernels.cpu.mixture import PackedExperts
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.recorded_values import UnrecordableError
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.operators import TORCH_OPERATORS, Operators
from quire.kernels.rotary import Angles, Rotation
from quire.kernels.routing import RouterSpec, Routing

GELU = Gating(ActivationFunction.GELU_TANH)
WIDTH, VOCAB, MOST_TOKENS = 48, 90, 7
POSITIONS = torch.tensor([5, 1, 4])
LAYERS = (abi.AttentionLayer * 1)(abi.AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=8))


@pytest.fixture
def recorder(kernels: NativeKernels) -> Recorder:
    return Recorder(kernels, torch.float32, MOST_TOKENS, LAYERS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(num_outputs: int, num_inputs: int, seed: int) -> tuple[PackedLinear, torch.Tensor]:
    weight = random(num_outputs, num_inputs, seed=seed)
    linear = PackedLinear(abi.WeightLayout.DENSE_F32, num_outputs, num_inputs, dtype=torch.float32)
    linear.pack(weight, 0)
    linear.finish()
    return linear, weight


def kinds(program: Program) -> list[OpKind]:
    return [OpKind(op.kind) for op in program.ops]


def run(program: Program, token_ids: torch.Tensor) -> torch.Tensor:
    step = abi.Step(num_tokens=len(token_ids), token_ids=token_ids.data_ptr())
    step.positions = POSITIONS.data_ptr()
    return program.run(step)


def test_a_list_computes_what_its_operators_do(recorder: Recorder) -> None:
    table, weight = random(VOCAB, WIDTH), random(WIDTH, seed=1)
    linear, matrix = packed(WIDTH, WIDTH, seed=2)
    token_ids = torch.tensor([3, 89, 0])

    def compute(operators, ids, multiply):
        total = operators.scale(operators.embed(table, ids), 12.0)
        for offset, scale in ((None, 1.0), (1.0, 0.25), (None, 1.0)):
            normed = operators.rms_norm(total, weight, 1e-5, offset)
            product = operators.rms_norm(multiply(normed), weight, 1e-5, overwrites=True)
            normed, total = operators.add_rms_norm(product, total, weight, 1e-5, offset, scale)
            total = operators.add(multiply(normed), total)
        return operators.gated(operators.rms_norm(total, weight, 1e-5), GELU)

    with recorder.recording():
        output = compute(recorder, recorder.inputs[0], lambda x: recorder.linear(x, linear))
    program = recorder.finish(output)
    expected = compute(TORCH_OPERATORS, token_ids, lambda x: x @ matrix.T)
    for _ in range(2):
        torch.testing.assert_close(run(program, token_ids), expected, rtol=1e-4, atol=1e-4)


def test_a_linear_adds_what_its_adapters_do(recorder: Recorder, kernels: NativeKernels) -> None:
    """In the same operation, whatever follows the sums; slots are filled and rows are set later."""
    rows = PackedRows()
    shape = {"num_slots": 2, "max_rank": 8, "dtype": torch.float32}
    plain, _ = packed(WIDTH, WIDTH, seed=2)
    of_plain = PackedAdapters(rows, WIDTH, (WIDTH,), is_interleaved=False, **shape)
    gated = gated_linear(20, WIDTH)
    of_gated = PackedAdapters(rows, WIDTH, (20, 20), is_interleaved=True, **shape)
    token_ids, table = torch.tensor([3, 89, 0]), random(VOCAB, WIDTH)
    with recorder.recording():
        total = recorder.embed(table, recorder.inputs[0])
        normed = recorder.rms_norm(total, None, 1e-5)
        total = recorder.add(recorder.linear(normed, plain, adapter=of_plain), total)
        output = recorder.linear(total, gated, Epilogue.SILU_MUL, adapter=of_gated)
    program = recorder.finish(output)
    assert kinds(program) == [OpKind.EMBED, OpKind.RMS_NORM, OpKind.LINEAR, OpKind.LINEAR]

    def computed(adapter: PackedAdapters | None, other: PackedAdapters | None) -> torch.Tensor:
        x = table[token_ids]
        normed = TORCH_OPERATORS.rms_norm(x, None, 1e-5)
        x = x + apply(kernels, plain, normed, adapter=adapter)
        return apply(kernels, gated, x, epilogue=Epilogue.SILU_MUL, adapter=other)

    rows.set(torch.tensor([-1, -1, -1], dtype=torch.int32))
    base = run(program, token_ids).clone()
    torch.testing.assert_close(base, computed(None, None), rtol=1e-4, atol=1e-4)
    of_plain.load(1, [(random(8, WIDTH, seed=5), random(WIDTH, 8, seed=6), 0.5)])
    of_gated.load(1, [None, (random(3, WIDTH, seed=7), random(20, 3, seed=8), 0.5)])
    rows.set(torch.tensor([1, -1, 1], dtype=torch.int32))
    found = run(program, token_ids)
    torch.testing.assert_close(found, computed(of_plain, of_gated), rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1], base[1]) and not torch.equal(found[0], base[0])
    rows.set(torch.tensor([1, -1], dtype=torch.int32))
    with pytest.raises(AssertionError, match="adapters are of another step"):
        run(program, token_ids)


def test_linears_of_heads_add_what_their_adapters_do(
    recorder: Recorder, kernels: NativeKernels
) -> None:
    """By an operation for each head. Base rows have the bits of the one operation for all heads
    that there is without adapters."""
    rows, table = PackedRows(), random(VOCAB, WIDTH)
    shape = {"is_interleaved": False, "num_slots": 1, "max_rank": 4, "dtype": torch.float32}
    linears = [packed(7, 5, seed)[0] for seed in range(4)]
    adapters = [PackedAdapters(rows, 5, (7,), **shape) for _ in linears]
    for seed, each in enumerate(adapters):
        each.load(0, [(random(3, 5, seed=seed), random(7, 3, seed=seed), 0.5)])

    def record(recorder: Recorder, adapters: Sequence[PackedAdapters | None]) -> Program:
        with recorder.recording():
            x = heads(recorder.embed(table, recorder.inputs[0]))
            output = recorder.head_linears(x, [*zip(linears, adapters, strict=True)])
        return recorder.finish(output.flatten(-2))

    adapted = record(recorder, adapters)
    plain = record(Recorder(kernels, torch.float32, MOST_TOKENS, LAYERS), [None] * 4)
    assert kinds(adapted) == [OpKind.EMBED, *[OpKind.LINEAR] * 4]
    assert kinds(plain) == [OpKind.EMBED, OpKind.LINEARS_BY_HEAD]

    token_ids = torch.tensor([3, 89, 0])
    rows.set(torch.tensor([0, -1, 0], dtype=torch.int32))
    found, base = run(adapted, token_ids), run(plain, token_ids)
    assert torch.equal(found[1], base[1])
    x = heads(table[token_ids]).unbind(1)
    expected = [
        apply(kernels, linear, part, adapter=adapter)
        for linear, part, adapter in zip(linears, x, adapters, strict=True)
    ]
    assert torch.equal(found, torch.cat(expected, dim=1)) and not torch.equal(found[0], base[0])


def test_a_product_that_is_added_at_once_is_added_by_its_linear(recorder: Recorder) -> None:
    linear, _ = packed(WIDTH, WIDTH, seed=2)
    weight = random(WIDTH)
    with recorder.recording():
        total = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
        for _ in range(3):
            product = recorder.linear(recorder.rms_norm(total, weight, 1e-5), linear)
            total = recorder.add(product, total)
    program = recorder.finish(total)
    assert kinds(program) == [OpKind.EMBED, *[OpKind.RMS_NORM, OpKind.LINEAR] * 3]
    assert {op.epilogue for op in program.ops[2::2]} == {Epilogue.ADD_RESIDUAL}
    assert len({op.out for op in program.ops}) == 2, "the stream and its norm"


def test_parts_of_unlike_formats_are_products_side_by_side(recorder: Recorder) -> None:
    (first, matrix), (last, other) = packed(40, WIDTH, seed=2), packed(8, WIDTH, seed=3)
    table = random(VOCAB, WIDTH)
    with recorder.recording():
        total = recorder.embed(table, recorder.inputs[0])
        total = recorder.add(recorder.part_linears(total, [(first, None), (last, None)]), total)
    program = recorder.finish(total)
    assert kinds(program) == [OpKind.EMBED, OpKind.LINEAR, OpKind.LINEAR, OpKind.SCALE]
    token_ids = torch.tensor([3, 89, 0])
    rows = table[token_ids]
    expected = rows + rows @ torch.cat((matrix, other)).T
    torch.testing.assert_close(run(program, token_ids), expected, rtol=1e-5, atol=1e-5)


def test_memory_is_not_used_again_while_it_is_read(recorder: Recorder) -> None:
    weight = random(WIDTH)
    with recorder.recording():
        total = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
        first = recorder.rms_norm(total, weight, 1e-5)
        second = recorder.rms_norm(first, weight, 1e-5)
        third = recorder.rms_norm(second, weight, 1e-5)
        total = recorder.add(recorder.add(first, third), total)
    ops = recorder.finish(total).ops
    outs = [op.out for op in ops[1:4]]
    assert len(set(outs)) == 3, "the first is read after the third is written"


def test_rows_of_the_callers_become_rows_of_the_callers(
    recorder: Recorder, kernels: NativeKernels
) -> None:
    linear, matrix = packed(VOCAB, WIDTH, seed=2)
    with recorder.recording():
        rows = recorder.rows(WIDTH)
        logits = recorder.scale(recorder.linear(rows, linear, out_dtype=torch.float32), 0.125)
    program = recorder.finish_rows([rows], logits)
    for num_rows in (1, 5):
        hidden = random(num_rows, WIDTH + 3)[:, :WIDTH]  # rows lie apart
        first, second = program.run(hidden), program.run(hidden)
        assert first.data_ptr() != second.data_ptr()
        torch.testing.assert_close(first, hidden @ matrix.T * 0.125, rtol=1e-4, atol=1e-4)
        assert torch.equal(first, second)


def heads_of_eight(part: torch.Tensor | None) -> torch.Tensor | None:
    return part if part is None or part.dim() == 3 else part.unflatten(-1, (-1, 8))


def attend(recorder: Recorder, change=lambda parts: parts, **options: object) -> torch.Tensor:
    """change: of the parts of a product before they become heads."""
    linear, _ = packed(64, WIDTH, seed=2)
    total = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
    parts = change(recorder.linear(total, linear).split((32, 16, 16), dim=-1))
    q, k, v = map(heads_of_eight, parts)
    angles = Angles(random(9, 8), recorder.inputs[1], torch.float32)
    given = {"rotation": Rotation(angles)} | options
    return recorder.attend(0, AttentionInputs(q, k, **{"v": v} | given)).flatten(-2)


def test_attention_reads_the_product_that_was_rotated_in_place(recorder: Recorder) -> None:
    with recorder.recording():
        output = attend(recorder)
    ops = recorder.finish(output).ops
    assert [op.kind for op in ops[-2:]] == [OpKind.ROTATE_AND_WRITE_KV, OpKind.ATTENTION]
    assert ops[1].out == ops[2].out == ops[3].input
    assert ops[2].layer == ops[3].layer == ctypes.addressof(LAYERS)


def test_parts_may_be_normed_where_they_lie(recorder: Recorder) -> None:
    def normed(parts):
        q, k, v = parts
        q = recorder.rms_norm(q, random(32), 1e-5, overwrites=True)
        return q, recorder.rms_norm(k, random(16), 1e-5, overwrites=True), v

    with recorder.recording():
        output = attend(recorder, normed)
    ops = recorder.finish(output).ops
    assert [(op.out - ops[1].out, op.size) for op in ops[2:4]] == [(0, 32), (32 * 4, 16)]


ATTENDED_OTHERWISE = {
    "other heads": lambda recorder: attend(
        recorder, lambda parts: (parts[0], parts[1], parts[2][:, :8])
    ),
    "other positions": lambda recorder: attend(
        recorder, rotation=Rotation(Angles(random(9, 8), torch.arange(2), torch.float32))
    ),
}


@pytest.mark.parametrize("use", ATTENDED_OTHERWISE.values(), ids=ATTENDED_OTHERWISE.keys())
def test_attention_that_has_no_operation_is_refused(recorder: Recorder, use) -> None:
    with pytest.raises(UnrecordableError), recorder.recording():
        use(recorder)


def test_parts_in_another_order_and_of_other_products(recorder: Recorder) -> None:
    with recorder.recording():
        output = attend(recorder, lambda parts: (parts[0], *parts[:0:-1]))
    turned = recorder.finish(output).ops[2]
    assert (turned.second - turned.input, turned.third - turned.input) == (48 * 4, 32 * 4)


def test_queries_without_rotation_are_read_in_place(recorder: Recorder) -> None:
    with recorder.recording():
        attend(recorder)
        output = attend(recorder, lambda parts: (parts[0], None, None), rotation=None, v=None)
    assert kinds(recorder.finish(output))[-2:] == [OpKind.LINEAR, OpKind.ATTENTION]


def test_heads_that_lie_apart_are_rotated_into_memory_of_their_own(recorder: Recorder) -> None:
    def apart(parts):
        wide, _ = packed(64, WIDTH, seed=3)
        total = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
        q = recorder.linear(total, wide).unflatten(-1, (4, 16))[..., :8]
        return q, *parts[1:]

    with recorder.recording():
        output = attend(recorder, apart)
    turned, attention = recorder.finish(output).ops[-2:]
    assert (turned.in_head_stride, turned.out_head_stride) == (16, 8)
    assert turned.out == attention.input != turned.input


def test_attention_is_given_its_sinks(recorder: Recorder) -> None:
    sinks = random(4)
    with recorder.recording():
        output = attend(recorder, sinks=sinks)
    program = recorder.finish(output)
    found = (ctypes.c_float * 4).from_address(LAYERS[0].sinks)
    LAYERS[0].sinks = None
    assert list(found) == sinks.tolist() and program


COMPUTED_BY_TORCH = {
    "a product": lambda x: x * 2,
    "in place": lambda x: x.mul_(2),
    "of a view": lambda x: x[:, :3].add_(1),
    "in a list": lambda x: torch.cat([torch.zeros(2, WIDTH), x]),
    "by name": lambda x: torch.add(input=torch.zeros(2, WIDTH), other=x),
    "a choice": lambda x: bool(x.sum() > 0),
}


@pytest.mark.parametrize("compute", COMPUTED_BY_TORCH.values(), ids=COMPUTED_BY_TORCH.keys())
def test_operations_that_torch_would_compute_are_refused(recorder: Recorder, compute) -> None:
    with pytest.raises(UnrecordableError, match="torch would compute aten"), recorder.recording():
        compute(recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0]))


def test_numbers_of_parameters_may_be_computed(recorder: Recorder) -> None:
    with recorder.recording():
        total = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
        output = recorder.rms_norm(total, random(WIDTH) + 1, 1e-5)
    assert kinds(recorder.finish(output)) == [OpKind.EMBED, OpKind.RMS_NORM]


def test_overwritten_values_cannot_be_read(recorder: Recorder) -> None:
    with recorder.recording():
        total = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
        recorder.add(recorder.rms_norm(total, random(WIDTH), 1e-5), total)
        with pytest.raises(UnrecordableError, match="overwritten"):
            recorder.rms_norm(total, random(WIDTH), 1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "gated", "embed", "add"])
def test_other_forms_are_refused(recorder: Recorder, name: str) -> None:
    with recorder.recording():
        total = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
        with pytest.raises(UnrecordableError):
            if name == "rms_norm":
                recorder.rms_norm(total, random(WIDTH).half(), 1e-5)
            elif name == "gated":
                recorder.gated(total[:, :7], Gating(ActivationFunction.GELU))
            elif name == "add":
                recorder.add(total[:, :7], total)
            else:
                recorder.embed(random(VOCAB, WIDTH), torch.tensor([1, 2]))


def heads(x: torch.Tensor) -> torch.Tensor:
    """[T, 4, 5], heads that lie 12 apart."""
    return x.unflatten(-1, (4, 12))[..., 3:8]


SIGMOID = ActivationFunction.SIGMOID
WEIGHT, HEAD_WEIGHT = random(WIDTH, seed=7), random(5, seed=8)
OPERATORS = {
    "norm of heads": lambda ops, x, y: ops.rms_norm(heads(x), HEAD_WEIGHT, 1e-5),
    "offset norm of heads": lambda ops, x, y: ops.rms_norm(heads(x), HEAD_WEIGHT, 1e-5, 1.0),
    "norm without weight": lambda ops, x, y: ops.rms_norm(heads(x), None, 1e-5),
    "norm in place": lambda ops, x, y: ops.add(
        ops.rms_norm(heads(x), None, 1e-5, overwrites=True), heads(y)
    ),
    "gated": lambda ops, x, y: ops.gated(x, Gating(ActivationFunction.GELU)),
    "gated part": lambda ops, x, y: ops.gated(x[:, 3:21], Gating(limit=0.7, alpha=1.7)),
    "silu_mul": lambda ops, x, y: ops.gated(x, Gating()),
    "activate": lambda ops, x, y: ops.activate(x, ActivationFunction.RELU_SQUARED),
    "activate heads": lambda ops, x, y: ops.activate(heads(x), SIGMOID),
    "gate": lambda ops, x, y: ops.gate(x, y, SIGMOID),
    "gate by rows": lambda ops, x, y: ops.gate(x, y[:, 5:6], SIGMOID),
    "gate heads": lambda ops, x, y: ops.gate(heads(x), heads(y), ActivationFunction.SILU),
    "gate heads by one": lambda ops, x, y: ops.gate(heads(x), heads(y)[..., :1], SIGMOID),
    "gate within a product": lambda ops, x, y: ops.gate(
        x.unflatten(-1, (4, 12))[..., :6], x.unflatten(-1, (4, 12))[..., 6:], SIGMOID
    ),
    "gate heads by columns of theirs": lambda ops, x, y: ops.gate(
        x.unflatten(-1, (4, 12)), x[:, :4].unsqueeze(-1), SIGMOID
    ),
    "soft cap": lambda ops, x, y: ops.soft_cap(x, 0.5),
    "layer norm": lambda ops, x, y: ops.layer_norm(x, WEIGHT, WEIGHT, 1e-5),
    "layer norm without bias": lambda ops, x, y: ops.layer_norm(x, WEIGHT, None, 1e-5),
    "a part is scaled": lambda ops, x, y: ops.add(ops.scale(x[:, :9], 3.0), x[:, 9:18], 0.5),
    "a part is added to": lambda ops, x, y: ops.add(y, x)[:, 4:],
    "heads are added": lambda ops, x, y: ops.add(heads(x), heads(y)),
    "columns of heads": lambda ops, x, y: ops.scale(x.unflatten(-1, (4, 3, 4))[:, 2], 2.0),
}


def compute(operators, name: str, table: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor):
    x, y = operators.embed(table, ids), operators.embed(table[2:], positions)
    result = OPERATORS[name](operators, x, y)
    return result if result.dim() == 2 else result.flatten(1)


@pytest.mark.parametrize("name", OPERATORS)
def test_each_operator_is_as_torch_defines_it(recorder: Recorder, name: str) -> None:
    table, token_ids = random(VOCAB, WIDTH), torch.tensor([3, 89, 0])
    expected = compute(TORCH_OPERATORS, name, table, token_ids, POSITIONS)
    with recorder.recording():
        # Whole values alone are results.
        output = recorder.scale(compute(recorder, name, table, *recorder.inputs), 1.0)
    program = recorder.finish(output)
    for _ in range(2):
        torch.testing.assert_close(run(program, token_ids), expected, rtol=1e-5, atol=1e-6)


def gated_linear(num_outputs: int, num_inputs: int) -> PackedLinear:
    linear = PackedLinear(
        abi.WeightLayout.DENSE_F32,
        2 * num_outputs,
        num_inputs,
        interleave=num_outputs,
        dtype=torch.float32,
    )
    linear.pack(random(2 * num_outputs, num_inputs), 0)
    return linear


def test_experts_follow_a_routers_own_choice(recorder: Recorder) -> None:
    spec = RouterSpec(3, 2)
    up = [gated_linear(8, WIDTH) for _ in range(3)]
    down = [packed(WIDTH, 8, seed=seed)[0] for seed in range(3)]
    layer, router = PackedExperts(up, down, Gating(), 2), packed(3, WIDTH, seed=9)[0]
    with recorder.recording():
        x = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
        logits = recorder.linear(x, router)
        routing = recorder.route(logits, None, spec, torch.float32)
        output = recorder.experts(x, layer, routing)
        with pytest.raises(UnrecordableError, match="not chosen by a recorded router"):
            scaled = recorder.scale(routing.weights, 2.0)
            recorder.experts(x, layer, Routing(routing.ids, scaled))
        with pytest.raises(UnrecordableError, match="input of experts has heads"):
            recorder.experts(x.unflatten(-1, (2, -1)), layer, routing)
        with pytest.raises(UnrecordableError, match="not a logit for each"):
            recorder.route(logits[:, :2], None, spec, torch.float32)
        with pytest.raises(UnrecordableError, match=r"bias is torch\.bfloat16"):
            recorder.route(logits, torch.zeros(3).bfloat16(), spec, torch.float32)
    assert OpKind.EXPERTS in kinds(recorder.finish(output))


def test_a_part_of_a_value_is_no_result(recorder: Recorder) -> None:
    with recorder.recording():
        total = recorder.embed(random(VOCAB, WIDTH), recorder.inputs[0])
    with pytest.raises(UnrecordableError, match="a part of a value"):
        recorder.finish(total[:, 3:])


def test_a_linear_does_not_add_to_what_it_reads(recorder: Recorder) -> None:
    linear, matrix = packed(WIDTH, WIDTH, seed=2)
    table, token_ids = random(VOCAB, WIDTH), torch.tensor([3, 89, 0])
    with recorder.recording():
        total = recorder.embed(table, recorder.inputs[0])
        output = recorder.add(recorder.linear(total, linear), total)
    program = recorder.finish(output)
    x = table[token_ids]
    torch.testing.assert_close(run(program, token_ids), x + x @ matrix.T, rtol=1e-4, atol=1e-4)


def test_rows_of_the_callers_are_not_written_to(recorder: Recorder) -> None:
    linear, matrix = packed(VOCAB, WIDTH, seed=2)
    with recorder.recording():
        rows = recorder.rows(WIDTH)
        normed = recorder.rms_norm(rows, None, 1e-5, overwrites=True)
        scaled = recorder.scale(rows, 0.5)
        logits = recorder.linear(recorder.add(normed, scaled), linear, out_dtype=torch.float32)
        logits = recorder.soft_cap(logits, 3.0)
    program = recorder.finish_rows([rows], logits)
    hidden = random(4, WIDTH)
    before = hidden.clone()
    expected = TORCH_OPERATORS.rms_norm(hidden, None, 1e-5) + hidden * 0.5
    expected = 3.0 * torch.tanh(expected @ matrix.T / 3.0)
    torch.testing.assert_close(program.run(hidden), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(hidden, before)


def test_a_part_of_the_callers_rows_is_found_behind_their_beginning(recorder: Recorder) -> None:
    with recorder.recording():
        rows = recorder.rows(WIDTH)
        output = recorder.scale(rows[:, 8:20], 2.0)
    program = recorder.finish_rows([rows], output)
    hidden = random(4, WIDTH + 5)[:, :WIDTH]
    assert torch.equal(program.run(hidden), hidden[:, 8:20] * 2)


def test_rows_of_the_caller_are_read_and_kept_where_they_are(recorder: Recorder) -> None:
    """Each run reads and writes as many of the rows as its step has tokens."""
    given, kept = random(MOST_TOKENS, WIDTH, seed=5), torch.full((MOST_TOKENS, 3 * WIDTH), 9.0)
    table, token_ids = random(VOCAB, WIDTH), torch.tensor([3, 89, 0])

    def compute(operators, ids):
        embeds = operators.embed(table, ids)
        state = operators.given(given, ids)
        operators.keep(embeds, kept, WIDTH)
        both = operators.join(operators.rms_norm(state, WEIGHT, 1e-5), operators.scale(embeds, 2.0))
        return operators.scale(both, 1.0)

    with recorder.recording():
        output = compute(recorder, recorder.inputs[0])
    program = recorder.finish(output)
    for seed in (5, 6):
        given.copy_(random(MOST_TOKENS, WIDTH, seed=seed))
        kept.fill_(9.0)
        found, seen = run(program, token_ids).clone(), kept.clone()
        kept.fill_(9.0)
        expected = compute(TORCH_OPERATORS, token_ids)
        torch.testing.assert_close((found, seen), (expected, kept), rtol=1e-5, atol=1e-6)
    assert (kept[:3, WIDTH : 2 * WIDTH] == table[token_ids]).all() and (kept[3:] == 9).all()


def test_every_operator_is_recorded_and_none_computed() -> None:
    names = [name for name in vars(Operators) if not name.startswith("_")]
    assert names
    assert all(getattr(Recorder, name) is not getattr(Operators, name) for name in names)
