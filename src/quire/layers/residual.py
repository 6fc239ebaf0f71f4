"""The residual stream, which every block reads and adds to."""

import torch

from quire.kernels.operators import Operators
from quire.layers.norm import LayerNorm, RMSNorm


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

    def normed(self, norm: RMSNorm | LayerNorm) -> torch.Tensor:
        """The norm of the sum, [T, H]."""
        if self._added is None:
            normed: torch.Tensor = norm(self._total)
            return normed
        (x, scale), self._added = self._added, None
        normed, self._total = norm.add(x, self._total, scale)
        return normed
