"""Coded weights: their numbers by the definition, and torch's products of them."""

from dataclasses import replace

import pytest
import torch
from tests.formats.coded_samples import CODINGS, INT8, random_codes

from quire.formats import coded
from quire.formats.coded import CHUNK_INPUTS, CodedMethods, PartsMethod, multiply_codes
from quire.formats.codes import Codes, Coding, InputOrder, PlainCodedRows
from quire.formats.dense import DenseMethod
from quire.formats.weight_format import LinearMethod, LinearModule
from quire.kernels.quantize import quantize_groups, quantize_int8

CPU = torch.device("cpu")


def by_definition(codes: Codes, row: int, column: int) -> float:
    """One number, in Python's floats."""
    coding = codes.coding
    group = column // coding.group_size
    code = int(codes.codes[row, column])
    value = coding.table[code] if coding.table else code
    scale = float(codes.scales[row, group])
    offset = 0.0 if codes.offsets is None else float(codes.offsets[row, group])
    if codes.factors is not None:
        of_scales, of_offsets = codes.factors[row, column // coding.block_size].tolist()
        scale, offset = scale * of_scales, offset * of_offsets
    zero = coding.zero if codes.zeros is None else int(codes.zeros[row, group])
    return scale * (value - zero) - offset


@pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)
def test_numbers_are_those_of_the_definition(coding: Coding) -> None:
    codes = random_codes(coding, 5, 512)
    numbers = codes.numbers()
    for row, column in [(0, 0), (1, 31), (2, 32), (3, 255), (4, 511), (0, 256), (2, 300)]:
        wanted = by_definition(codes, row, column)
        assert numbers[row, column].item() == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)
def test_rows_and_columns_are_those_of_the_numbers(coding: Coding) -> None:
    rows = PlainCodedRows(random_codes(coding, 9, 768))
    numbers = rows.numbers()
    assert torch.equal(rows.rows(2, 5).numbers(), numbers[2:5])
    picked = torch.tensor([8, 0, 3])
    assert torch.equal(rows.picked(picked).numbers(), numbers[picked])
    assert torch.equal(rows.columns(256, 512).numbers(), numbers[:, 256:512])


@pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_near_that_of_the_numbers(coding: Coding, has_bias: bool) -> None:
    codes = random_codes(coding, 48, 512)
    linear = LinearModule(512, (48,), has_bias=has_bias)
    method = CodedMethods().of(coding)
    assert method is not None and method.takes_codes_of(0)
    method.create(linear, has_bias, torch.float32, CPU)
    for start in (32, 0, 16):
        part = PlainCodedRows(codes.rows(start, start + 16))
        method.load_codes(linear, 0, start, part)
    bias = torch.randn(48) if has_bias else torch.zeros(48)
    if has_bias:
        method.load_part(linear, "bias", 0, 0, bias)
    method.finish(linear)
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ codes.numbers().double().T + bias
    result = method.apply(linear, x)
    assert (result - exact).norm() / exact.norm() < 2e-2
    # With activations that are multiples of their scales nothing is rounded but fp32 sums.
    q, scales = quantize_groups(x, CHUNK_INPUTS)
    rounded = (q * scales[..., None]).view(7, 512)
    exact = rounded.double() @ codes.numbers().double().T + bias
    assert (result - exact).norm() / exact.norm() < 1e-6
    alone = torch.cat([method.apply(linear, row[None]) for row in x])
    assert torch.equal(alone, result)
    source = method.tie(linear, torch.nn.Parameter(torch.empty(48, 512)))
    assert source is not None
    wanted = torch.tensor([47, 3])
    assert torch.equal(source.unpack(wanted), codes.numbers()[wanted])
    assert method.num_bytes(48, 512, torch.float32) >= 48 * 512


def test_a_large_weight_is_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a product takes beside the codes does not grow with the outputs."""
    codes = random_codes(CODINGS["blocks, offsets"], 48, 512)
    linear, method = LinearModule(512, (48,), has_bias=True), CodedMethods().of(codes.coding)
    assert method is not None
    method.create(linear, True, torch.float32, CPU)
    method.load_codes(linear, 0, 0, PlainCodedRows(codes))
    method.load_part(linear, "bias", 0, 0, torch.randn(48))
    x = torch.randn(67, 512)
    whole, sizes = method.apply(linear, x), []

    def multiply(x: torch.Tensor, codes: Codes) -> torch.Tensor:
        sizes.append((*x.shape, *codes.codes.shape))
        return multiply_codes(x, codes)

    monkeypatch.setattr(coded, "multiply_codes", multiply)
    monkeypatch.setattr(coded, "_MAX_WEIGHTS", 20 * 512 + 3)
    assert torch.equal(method.apply(linear, x), whole)
    assert sizes == [(m, 512, n, 512) for n in (20, 20, 8) for m in (64, 3)]


def test_parts_of_unlike_codings_are_products_of_their_own() -> None:
    codings = [CODINGS["blocks, offsets"], CODINGS["bytes, blocks"]]
    coded = [CodedMethods().of(coding) for coding in codings]
    methods = [*(method for method in coded if method is not None), DenseMethod()]
    sizes = (32, 16, 8)
    linear = LinearModule(512, sizes, has_bias=True)
    method = PartsMethod(methods, sizes)
    method.create(linear, True, torch.float32, CPU)
    numbers = []
    for index, coding in enumerate(codings):
        codes = random_codes(coding, sizes[index], 512, seed=index)
        method.load_codes(linear, index, 0, PlainCodedRows(codes))
        numbers.append(codes.numbers())
    assert not method.takes_codes_of(2)
    numbers.append(torch.randn(8, 512) * 0.02)
    method.load_part(linear, "weight", 2, 0, numbers[2])
    biases = torch.randn(56)
    for index, bias in enumerate(biases.split(sizes)):
        method.load_part(linear, "bias", index, 0, bias)
    method.finish(linear)
    x = torch.randn(3, 2, 512, generator=torch.Generator().manual_seed(1))
    exact = x @ torch.cat(numbers).T + biases
    assert (method.apply(linear, x) - exact).norm() / exact.norm() < 2e-2
    assert method.num_bytes(56, 512, torch.float32) == sum(
        each.num_bytes(size, 512, torch.float32) for each, size in zip(methods, sizes, strict=True)
    )


def test_a_group_that_is_not_finite_makes_its_row_nan() -> None:
    x = torch.randn(2, 64)
    x[1, 40] = torch.inf
    q, scales = quantize_groups(x, 32)
    assert scales[0].isfinite().all() and scales[1].isnan().tolist() == [False, True]
    assert q.isfinite().all() and (q[1, 1] == 0).all()


def filled(coding: Coding, codes: Codes) -> tuple[LinearMethod, LinearModule]:
    """A linear that is kept as these codes."""
    method = CodedMethods().of(coding)
    assert method is not None
    linear = LinearModule(codes.codes.shape[1], (len(codes.codes),), has_bias=False)
    method.create(linear, False, torch.float32, CPU)
    method.load_codes(linear, 0, 0, PlainCodedRows(codes))
    method.finish(linear)
    return method, linear


def test_columns_in_another_order_meet_their_inputs() -> None:
    inputs = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    plain = Coding("GPTQ", 4, 64, has_zeros=True)
    coding = replace(plain, input_order=InputOrder.of(inputs))
    assert coding == replace(plain, input_order=InputOrder.of(inputs.clone()))
    assert coding != plain and str(coding) != str(plain) and len(str(coding)) < 400
    assert torch.equal(coding.input_order.inputs().long(), inputs)
    assert coding.alignment == 0 and plain.alignment == 64
    stored = random_codes(plain, 24, 256)
    codes = replace(stored, coding=coding)
    assert torch.equal(codes.numbers()[:, inputs], stored.numbers())
    assert torch.equal(PlainCodedRows(codes).rows(3, 9).numbers(), codes.numbers()[3:9])
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    found = apply(filled(coding, codes), x)
    assert torch.equal(found, apply(filled(plain, stored), x[:, inputs]))
    exact = x @ codes.numbers().T
    assert (found - exact).norm() / exact.norm() < 2e-2


def apply(filled: tuple[LinearMethod, LinearModule], x: torch.Tensor) -> torch.Tensor:
    method, linear = filled
    return method.apply(linear, x)


def test_int8_codes_are_multiplied_with_a_scale_for_each_token() -> None:
    assert INT8.is_int8 and not any(coding.is_int8 for coding in CODINGS.values())
    codes = random_codes(INT8, 24, 96)
    method, linear = filled(INT8, codes)
    assert method.is_exact and method.takes_codes_of(0)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    q, x_scales = quantize_int8(x)
    dots = (q.double() @ (codes.codes.double() - 128).T).float()
    assert torch.equal(method.apply(linear, x), dots * x_scales[:, None] * codes.scales[:, 0])
    exact = x @ codes.numbers().T
    assert (method.apply(linear, x) - exact).norm() / exact.norm() < 2e-2
    source = method.tie(linear, torch.nn.Parameter(torch.empty(24, 96)))
    assert source is not None
    wanted = torch.tensor([23, 3])
    assert torch.equal(source.unpack(wanted), codes.numbers()[wanted])
    assert torch.equal(codes.columns(5, 20).numbers(), codes.numbers()[:, 5:20])
