"""The lines that `browser.py` prints about its cases."""


class Report:
    """The cases so far."""

    def __init__(self) -> None:
        self.num_failed = 0

    def case(self, name: str, holds: bool, figure: object = "") -> None:
        """Print one case."""
        self.num_failed += not holds
        print(f"{'ok ' if holds else 'NO '} {name:<58} {figure}", flush=True)
