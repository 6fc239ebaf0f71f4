"""The base class of recurrent layers, which holds the backend of their states."""

from torch import nn

from quire.kernels.state_calls import StateCalls


class RecurrentModule(nn.Module):
    """A layer with a state for each sequence. `layer` is its index in `recurrent_specs`."""

    #: Updates the states in the planned step; set by `TextModel.use_states`.
    states: StateCalls

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
