"""Gemma 4's tower, compared with transformers."""

from pathlib import Path

import pytest
import torch
from tests.models.vision.gemma4_files import (
    HEIGHT,
    NUM_TOKENS,
    WIDTH,
    features,
    make_image,
    reference,
)
from tests.models.vision.towers import (
    assert_close,
    encoded,
    encoded_with_pauses,
    load,
    num_slices,
    raw_config,
)

from quire.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from quire.models.vision.gemma4_tower import Gemma4VisionConfig

NO_GRID = (1, 1, 1)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", ["gemma4", "small"])
def test_embeddings_equal_transformers(family: str, kernels: str, tmp_path: Path) -> None:
    model, values = reference(family), make_image()
    tower = load(model, tmp_path, kernels=kernels)
    for image in (values, values[:, :12].contiguous()):
        with torch.inference_mode():
            expected = model.model.get_image_features(**features([image])).pooler_output[0]
        assert_close(encoded(tower, image, NO_GRID), expected)


def test_pauses_change_no_bit(tmp_path: Path) -> None:
    tower, values = load(reference("small"), tmp_path, torch.bfloat16), make_image()
    whole = encoded(tower, values, NO_GRID)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(encoded_with_pauses(tower, values, NO_GRID), whole)
    assert num_slices(tower, values, NO_GRID) > 5


def test_sizes_of_images(tmp_path: Path) -> None:
    tower = load(reference(), tmp_path)
    assert tower.num_tokens((3, HEIGHT, WIDTH), NO_GRID) == NUM_TOKENS
    for shape in ((3, HEIGHT, 20), (3, 60, 12), (1, HEIGHT, WIDTH), (4,)):
        with pytest.raises(InvalidRequestError, match="in multiples of 12 up to 48"):
            tower.num_tokens(shape, NO_GRID)


def test_a_published_config_is_read() -> None:
    """That of the E2B model, whose fields for code that no longer exists are ignored."""
    vision = {
        "attention_bias": False, "attention_dropout": 0.0, "default_output_length": 280,
        "global_head_dim": 64, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 131072,
        "model_type": "gemma4_vision", "num_attention_heads": 12, "num_hidden_layers": 16,
        "num_key_value_heads": 12, "patch_size": 16, "pooling_kernel_size": 3,
        "position_embedding_size": 10240, "rms_norm_eps": 1e-06, "standardize": False,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        "use_clipped_linears": True,
    }  # fmt: skip
    raw = {"model_type": "gemma4", "transformers_version": "5.5.0", "vision_config": vision}
    config = Gemma4VisionConfig.from_hf(raw, 1536)
    assert (config.clips, config.max_side, config.rope_theta) == (True, 10240, 100.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, "the rope_type 'axial'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 6}, "multiple of 4"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "relu"}, "hidden_activation"),
        (None, "must be an object"),
    ],
)
def test_other_configs_are_refused(changes: dict | None, message: str) -> None:
    raw = raw_config(reference())
    raw["vision_config"] = None if changes is None else raw["vision_config"] | changes
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Gemma4VisionConfig.from_hf(raw, 48)
