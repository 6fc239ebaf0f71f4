"""Linears that lie fused, transposed or in another order in the files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire.errors import CheckpointError
from quire.kernels.rotary import rotary
from quire.models.checkpoints.arranged import ArrangedCheckpoint, Arrangement, from_pairs
from quire.models.checkpoints.source import CheckpointSource


class Tensors(CheckpointSource):
    """In memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return False

    @property
    def names(self):
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    @contextmanager
    def rows(self, name: str, span: range) -> Iterator[torch.Tensor]:
        assert 0 <= span.start <= span.stop <= len(self.tensors[name])
        yield self.tensors[name][span.start : span.stop]


def _read(checkpoint: CheckpointSource, name: str, step: int | None = None) -> torch.Tensor:
    size = checkpoint.shape(name)[0]
    pieces = checkpoint.pieces(name)
    if step is not None:
        pieces = [range(start, min(start + step, size)) for start in range(0, size, step)]
    read = []
    for span in pieces:
        with checkpoint.rows(name, span) as rows:
            assert rows.shape == (len(span), *checkpoint.shape(name)[1:])
            read.append(rows.clone())
    return torch.cat(read)


WEIGHT, BIAS = torch.randn(12, 5), torch.randn(12)
PARTS = {"q_proj": 6, "k_proj": 2, "v_proj": 4}


@pytest.mark.parametrize("step", [None, 1, 5])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_fused_linear_is_cut_into_its_parts(is_transposed, step):
    stored = {"a.qkv.weight": WEIGHT.T if is_transposed else WEIGHT, "a.qkv.bias": BIAS}
    stored["norm.weight"] = BIAS
    order = torch.tensor([3, 1, 2, 0])
    checkpoint = ArrangedCheckpoint(
        Tensors(stored),
        Arrangement({"qkv": PARTS}, frozenset({"qkv"} if is_transposed else ()), {"v_proj": order}),
    )
    parts = {f"a.{part}.{name}" for part in PARTS for name in ("weight", "bias")}
    assert checkpoint.names == parts | {"norm.weight"}
    for name, whole in (("weight", WEIGHT), ("bias", BIAS)):
        q, k, v = whole.split(list(PARTS.values()))
        for part, expected in (("q_proj", q), ("k_proj", k), ("v_proj", v[order])):
            assert torch.equal(_read(checkpoint, f"a.{part}.{name}", step), expected)
            assert checkpoint.dtype(f"a.{part}.{name}") == torch.float32
    assert torch.equal(_read(checkpoint, "norm.weight", step), BIAS)


def test_parts_without_a_name_are_left_out():
    checkpoint = ArrangedCheckpoint(
        Tensors({"positions.weight": WEIGHT}),
        Arrangement({"positions": {"": 2, "positions": 10}}),
    )
    assert checkpoint.names == {"positions.weight"}
    assert torch.equal(_read(checkpoint, "positions.weight"), WEIGHT[2:])


def test_other_sizes_are_refused_by_name():
    with pytest.raises(CheckpointError, match=r"a\.qkv\.weight' has 12 outputs.*says 6 \+ 2"):
        ArrangedCheckpoint(
            Tensors({"a.qkv.weight": WEIGHT}), Arrangement({"qkv": {"q_proj": 6, "k_proj": 2}})
        )


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], cos and sin [T, R/2]: by the definition, of elements 2i and 2i + 1."""
    turned, size = x.clone(), 2 * cos.shape[-1]
    even, odd = x[..., 0:size:2], x[..., 1:size:2]
    cos, sin = cos[:, None], sin[:, None]
    turned[..., 0:size:2], turned[..., 1:size:2] = even * cos - odd * sin, odd * cos + even * sin
    return turned


@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_neighbours_are_put_where_the_rotation_expects_them(rotary_dim):
    x, angles = torch.randn(3, 4, 8), torch.randn(3, rotary_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    order = from_pairs(4, 8, rotary_dim)
    ours, _ = rotary(
        *(x.flatten(1)[:, order].view(3, 4, 8) for _ in range(2)),
        torch.cat((cos, cos), -1),
        torch.cat((sin, sin), -1),
    )
    expected = _rotate_pairs(x, cos, sin).flatten(1)[:, order].view(3, 4, 8)
    torch.testing.assert_close(ours, expected)


def test_a_part_that_is_there_twice_is_refused():
    arrangement = Arrangement(fused={"qkv_proj": {"q_proj": 2, "k_proj": 1}})
    tensors = {"a.qkv_proj.weight": torch.ones(3, 4), "a.k_proj.weight": torch.ones(1, 4)}
    with pytest.raises(CheckpointError, match=r"a\.qkv_proj\.weight.* and .*a\.k_proj\.weight"):
        ArrangedCheckpoint(Tensors(tensors), arrangement)
