"""Attention of a model whose last layers the CPU computes for another device.

Each side has a backend of its own, and its own part of every KV block: `page_layout` places the
pages of the last layers in the host's memory. The device's backend plans a step from the device's
tensors, and the CPU's from the host's, which `AttentionBatch.host` has.
"""

import torch

from quire.attention.interface import AttentionBackend, AttentionBatch, AttentionSpec, LayerKV
from quire.kernels.attention_inputs import AttentionInputs


class SplitAttention(AttentionBackend):
    """Gives the last `num_host_layers` layers to `host`, and the others to `device`."""

    def __init__(
        self, device: AttentionBackend, host: AttentionBackend, num_host_layers: int
    ) -> None:
        self.device, self.host = device, host
        self.num_host_layers = num_host_layers
        self.package = device.package
        self._num_device_layers = 0

    def bind(self, specs: tuple[AttentionSpec, ...], layers: tuple[LayerKV, ...]) -> None:
        count = self._num_device_layers = len(specs) - self.num_host_layers
        self.device.bind(specs[:count], layers[:count])
        self.host.bind(specs[count:], layers[count:])

    def plan(self, batch: AttentionBatch) -> None:
        self.device.plan(batch)
        self.host.plan(batch.host or batch)

    def run(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        count = self._num_device_layers
        if layer < count:
            return self.device.run(layer, inputs)
        return self.host.run(layer - count, inputs)
