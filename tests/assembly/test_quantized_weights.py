"""A model whose weights are quantized already is not quantized again."""

from dataclasses import replace

import pytest
import torch

from quire.assembly.device_setup import choose_setup
from quire.errors import ConfigurationError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.checkpoints.quantized.settings import Quantized
from quire.models.registry import load_config
from quire.options.engine_options import EngineOptions


def test_a_format_beside_quantized_weights_is_refused() -> None:
    config = replace(load_config(EMBEDDED_MODEL), quantized=Quantized("AWQ"))
    given = {"kernels": "torch", "device": "cpu"}
    options = EngineOptions.from_mapping(given | {"quantization": "int4"})
    message = "quantization is 'int4', but the model's weights are quantized by AWQ already; leave"
    with pytest.raises(ConfigurationError, match=message):
        choose_setup(options, config, torch.device("cpu"), 1)
    choose_setup(EngineOptions.from_mapping(given), config, torch.device("cpu"), 1)
