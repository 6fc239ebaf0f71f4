"""How a module's parameters are stored: the arguments that all constructors of modules pass on."""

from typing import TypedDict

import torch


class Storage(TypedDict):
    """The keyword arguments `dtype` and `device` of a module."""

    #: The dtype of parameters that are not quantized.
    dtype: torch.dtype
    #: The device of all parameters.
    device: torch.device
