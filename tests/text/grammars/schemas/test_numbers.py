"""Bounds of numbers beyond 2**53: never wider than the schema's, and near them."""

import random
from decimal import Decimal

import pytest
from tests.text.grammars.walks import accepts

from quire.core.structured_outputs import StructuredOutputsParams
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.schemas.numbers import EXACT, LARGEST, greatest, is_exact, least

FAR = [EXACT + 1, 2**60, 2**60 + 1, 10**18, LARGEST - 1, LARGEST, 2**63 - 1, 2**64, 10**30]


@pytest.mark.parametrize("is_integer", [False, True])
@pytest.mark.parametrize("is_exclusive", [False, True])
def test_bounds_move_inwards(is_integer: bool, is_exclusive: bool) -> None:
    draw = random.Random(5)
    for bound in [*FAR, *(draw.randint(EXACT + 1, 2**64) for _ in range(500))]:
        found = greatest(bound, is_exclusive=is_exclusive, is_integer=is_integer)
        assert found is not None
        assert found < bound if is_exclusive else found <= bound
        assert found > min(bound, LARGEST) * (1 - 2e-14)
        assert least(-bound, is_exclusive=is_exclusive, is_integer=is_integer) == -found
        written = Decimal(repr(float(found)))  # as llguidance writes a bound of numbers
        assert int(float(found)) <= bound if is_integer else written <= bound


def test_bounds_that_leave_nothing() -> None:
    assert greatest(-(2**64), is_exclusive=False, is_integer=True) is None
    assert least(1e300, is_exclusive=False, is_integer=False) is None


@pytest.mark.parametrize("number", [2**60, LARGEST, -LARGEST, 1e17, 0.1, EXACT])
def test_constants_that_are_kept(compiler: GrammarCompiler, number: float) -> None:
    assert is_exact(number)
    params = StructuredOutputsParams(json={"const": number})
    assert accepts(compiler, params, str(int(number) if number > 1 else number))
    assert not accepts(compiler, params, str(int(number) + 2))


@pytest.mark.parametrize("number", [2**60 + 1, 2**63, -(2**63), 2**60 * 1.0, 1e300])
def test_inexact_constants_are_detected(number: float) -> None:
    assert not is_exact(number)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "maximum": 2**63 - 1}, [LARGEST, -(10**30)], [2**63]),
        ({"type": "integer", "minimum": 2**60}, [2**60, 9 * 10**18], [2**60 - 1]),
        ({"type": "integer", "maximum": -(2**60)}, [-(2**60)], [1 - 2**60, 0]),
        ({"type": "integer", "exclusiveMaximum": 2**54}, [2**54 - 2, 0], [2**54, 2**54 + 1]),
        ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, [1.5, -7], []),
        ({"exclusiveMinimum": 1e18}, ["a", 2 * 10**18], [10**18, 1]),
        ({"type": "integer", "exclusiveMinimum": EXACT}, [EXACT + 2], [EXACT]),
        ({"type": "integer", "exclusiveMaximum": -EXACT}, [-EXACT - 2], [-EXACT]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.5, 0.001], [0, "0.0", "-0"]),
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, [2.1, 2.4999], [2, 2.0, 2.5]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, [-0.5], [0, "-0", "-0.0"]),
        ({"minimum": 99, "exclusiveMinimum": True, "maximum": 99.5}, [99.5], [99, "99.0"]),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**64}, [0, 10**18], [-1, 2**64]),
    ],
)
def test_bounds_in_schemas(
    compiler: GrammarCompiler, schema: dict[str, object], good: list[object], bad: list[object]
) -> None:
    params = StructuredOutputsParams(json=schema)
    for value in good:
        assert accepts(compiler, params, f'"{value}"' if value == "a" else str(value)), value
    for value in bad:
        assert not accepts(compiler, params, str(value)), value
