"""The residual stream, which every block reads and adds to."""

import torch
from torch import nn

from quire.kernels.operators import Operators
from quire.kernels.unnormed_rows import UnnormedRows
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.operator_module import NormReader


class ResidualStream:
    """A sum whose last addition is delayed until the sum is read, to fuse the addition with a norm.

    Shapes: T tokens, H hidden size.
    """

    def __init__(self, start: torch.Tensor, operators: Operators) -> None:
        """`start` is [T, H]; the first addition may overwrite it."""
        self._total = start
        self._operators = operators
        self._added: tuple[torch.Tensor, float] | None = None

    def add(self, x: torch.Tensor, scale: float = 1.0) -> None:
        """Add scale * x [T, H]. x may be overwritten later."""
        if self._added is not None:
            self.read()
        self._added = (x, scale)

    def add_rows(self, index: torch.Tensor, rows: torch.Tensor, first: int) -> None:
        """Add columns [first, first + H) of rows [N, W] to the tokens at index [N]."""
        self._total = self._operators.add_rows(self.read(), index, rows, first)

    def scale(self, factor: float) -> None:
        """Multiply the sum by `factor`."""
        if factor != 1.0:
            self._total = self._operators.scale(self.read(), factor)

    def read(self) -> torch.Tensor:
        """The sum [T, H], valid until the next sum is computed."""
        if self._added is not None:
            (x, scale), self._added = self._added, None
            self._total = self._operators.add(x, self._total, scale)
        return self._total

    def input_of(self, reader: nn.Module, norm: RMSNorm | LayerNorm) -> torch.Tensor | UnnormedRows:
        """The input of a module that reads the norm of the sum, [T, H].

        If the module's first linear can compute the norm, it also computes the sum. Then the module
        must run before the sum is read.
        """
        linear = reader.input_linear if isinstance(reader, NormReader) else None
        if not isinstance(norm, RMSNorm) or linear is None:
            return self.normed(norm)
        if not linear.takes_unnormed(self._total):
            return self.normed(norm)
        weights = norm.weight, norm.eps, norm.offset
        if self._added is None:
            return UnnormedRows(self._total, None, None, 1.0, *weights)
        ((x, scale), self._added), before = (self._added, None), self._total
        self._total = torch.empty_like(before)
        return UnnormedRows(x, before, self._total, scale, *weights)

    def normed(self, norm: RMSNorm | LayerNorm) -> torch.Tensor:
        """The norm of the sum, [T, H]."""
        if self._added is None:
            normed: torch.Tensor = norm(self._total)
            return normed
        (x, scale), self._added = self._added, None
        normed, self._total = norm.add(x, self._total, scale)
        return normed
