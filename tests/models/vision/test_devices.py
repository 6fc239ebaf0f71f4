"""Towers on another device than the host's: no operation mixes the two. torch's meta device stands
for a GPU."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.image_prompts import IMAGE_FAMILIES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.layers.linear import Linear
from quire.models.registry import load_config
from quire.models.vision.towers import find_tower
from quire.models.vision.vision_tower import finish

DEVICE = torch.device("meta")
MAX_TOKENS = 64
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class OneDevice(TorchDispatchMode):
    """Raises AssertionError for an operation on tensors of two devices, copies aside."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        devices = {each.device.type for each in given if each.dim()}
        assert len(devices) < 2 or func in COPIES, f"{func} mixes {devices}"
        return func(*args, **(kwargs or {}))


def multiply(linear: Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.new_empty(*x.shape[:-1], linear.output_size)


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_no_tensor_of_a_tower_stays_on_the_host(name: str, tmp_path: Path) -> None:
    IMAGE_FAMILIES[name].save(tmp_path)
    source = find_tower(tmp_path, load_config(tmp_path))
    assert source is not None
    tower = source.outline()
    for module in tower.modules():
        if isinstance(module, Linear):
            module.forward = multiply(module)  # type: ignore[method-assign]
    table = torch.empty(1013, source.config.output_size, device=DEVICE)
    with OneDevice(), torch.inference_mode():
        tower.use_embedding(lambda token_ids: table[token_ids.to(DEVICE)])
        shape, grid = tower.largest_content(MAX_TOKENS)
        embeddings = finish(tower.encode(torch.zeros(shape, device=DEVICE), grid))
    assert embeddings.device == DEVICE
    num_tokens = tower.num_tokens(shape, grid)
    assert embeddings.shape == (num_tokens, source.embedding_width())
    assert num_tokens <= tower.max_content_tokens
