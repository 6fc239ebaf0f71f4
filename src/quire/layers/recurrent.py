"""Layers that keep a state for each sequence: how they get what moves it."""

from torch import nn

from quire.recurrence.state_backend import StateCalls


class RecurrentModule(nn.Module):
    """A layer with a state for each sequence. layer: its index in the model's recurrent_specs.

    states: moves them, through the step that was planned; `TextModel.use_states` sets it.
    """

    states: StateCalls

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
