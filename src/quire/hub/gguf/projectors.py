"""Translates the settings of llama.cpp's image encoders to the fields of Hugging Face's files.

The metadata of an encoder's file have the prefix "clip.", and name the kind of its connector, the
projector. The names are those of llama.cpp (gguf-py/gguf/constants.py). Files lack settings that
llama.cpp's code holds as constants; here they are the constants of transformers' classes. Called by
`image_encoder`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import UnsupportedModelError, shown
from quire.hub.gguf.header import GGUFFile, broken
from quire.hub.gguf.values import shortest_decimal
from quire.hub.model_files import shown_name

_PREFIX = "clip."
_IGNORED = (
    *("has_vision_encoder", "vision.projection_dim"),
    *("projector_type", "vision.projector_type"),
)
"""Fields that `image_encoder` reads."""
_PIXTRAL_EPS = 1e-5
"""The eps of Pixtral's norms, which is a constant in transformers."""
_QWEN_PIXELS = (1 << 16, 1 << 24)
"""The fewest and the most pixels of an image in all published models of Qwen3-VL and Qwen3.5."""


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The settings of an encoder and its image processor, as in Hugging Face's files."""

    #: The fields of config.json, without those of the language model.
    config: dict[str, Any]
    #: The fields of preprocessor_config.json.
    image_fields: dict[str, Any]
    #: The fields of processor_config.json.
    processor_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The name of the multimodal architecture in Hugging Face's files."""
        name: str = self.config["architectures"][0]
        return name


class EncoderFields:
    """Reads fields of an encoder's file, and remembers which were read."""

    def __init__(self, file: GGUFFile, text: Mapping[str, Any]) -> None:
        """`text` is the metadata of the language model's file."""
        self.path: Path = file.path
        self.tensors: Collection[str] = file.tensors.keys()
        self._shapes = {name: info.shape for name, info in file.tensors.items()}
        self._metadata = file.metadata
        self._text = text
        self._read = {_PREFIX + name for name in _IGNORED}

    def integer(self, name: str, default: int | None = None) -> int:
        """A count."""
        found = self._value(name, default)
        if type(found) is not int or found < 1:
            raise self._wrong(name, found, "a whole number from 1")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A number, as the shortest decimal that rounds to it in fp32."""
        found = self._value(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self._wrong(name, found, "a number")
        return shortest_decimal(float(found))

    def flag(self, name: str) -> bool:
        """A truth value; False if the file has none."""
        found = self._value(name, False)
        if not isinstance(found, bool):
            raise self._wrong(name, found, "true or false")
        return found

    def triple(self, name: str) -> list[float]:
        """Three numbers."""
        found = self._value(name, None)
        if not isinstance(found, np.ndarray) or found.shape != (3,) or found.dtype.kind != "f":
            raise self._wrong(name, found, "a list of three numbers")
        return [shortest_decimal(float(each)) for each in found]

    def places(self, name: str) -> list[int]:
        """The indices of the true values of a list; empty if the file has none."""
        found = self._value(name, np.zeros(0, bool))
        if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind != "b":
            raise self._wrong(name, found, "a list of true and false")
        return [int(place) for place in np.flatnonzero(found)]

    def has(self, name: str) -> bool:
        """Whether the file has the field."""
        return _PREFIX + name in self._metadata

    def text(self, name: str) -> Any:
        """A field of the language model's architecture; None if its file has none."""
        return self._text.get(f"{self.text_architecture}.{name}")

    @property
    def text_architecture(self) -> str:
        """llama.cpp's name of the language model's architecture."""
        return str(self._text.get("general.architecture"))

    def skip(self, prefix: str) -> None:
        """Let `finish` accept every metadata field whose name has this prefix."""
        whole = _PREFIX + prefix
        self._read.update(name for name in self._metadata if name.startswith(whole))

    def rows_of(self, tensor: str) -> int:
        """The first dimension of a tensor. Raises CheckpointError if it is missing."""
        return self.shape_of(tensor, 1)[0]

    def shape_of(self, tensor: str, least_dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor. Raises CheckpointError if it is missing or has fewer
        dimensions."""
        shape = self._shapes.get(tensor, ())
        if len(shape) < least_dimensions:
            raise broken(self.path, f"it has no tensor {tensor} of {least_dimensions} dimensions")
        return shape

    def finish(self) -> None:
        """Raises UnsupportedModelError if a field was not read and is not 0, false or empty."""
        for name, value in self._metadata.items():
            if not name.startswith(_PREFIX) or name in self._read:
                continue
            if not isinstance(value, bool | int | float | str) or value:
                raise UnsupportedModelError(
                    f"{self.path}: the metadata field {shown_name(name)} is not understood, and may"
                    " change the encoder's results"
                )

    def _value(self, name: str, default: Any) -> Any:
        self._read.add(_PREFIX + name)
        return self._metadata.get(_PREFIX + name, default)

    def _wrong(self, name: str, found: Any, expected: str) -> Exception:
        is_plain = found is None or isinstance(found, bool | int | float | str)
        what = shown(found) if is_plain else "a list"
        return broken(self.path, f"{_PREFIX}{name} is {what}, but must be {expected}")


def _vision(fields: EncoderFields) -> dict[str, Any]:
    """The fields that all encoders have."""
    return {
        "hidden_size": fields.integer("vision.embedding_length"),
        "intermediate_size": fields.integer("vision.feed_forward_length"),
        "num_hidden_layers": fields.integer("vision.block_count"),
        "num_attention_heads": fields.integer("vision.attention.head_count"),
        "image_size": fields.integer("vision.image_size"),
        "patch_size": fields.integer("vision.patch_size"),
    }


def _normalization(fields: EncoderFields) -> dict[str, list[float]]:
    return {name: fields.triple(f"vision.{name}") for name in ("image_mean", "image_std")}


def _activation(fields: EncoderFields, gelu: str) -> str:
    """The name of the activation. Files don't tell GELUs apart: `gelu` is the original model's."""
    if fields.flag("use_gelu"):
        return gelu
    return "silu" if fields.flag("use_silu") else "quick_gelu"


def _idefics3(fields: EncoderFields) -> EncoderSettings:
    vision = _vision(fields) | {
        "layer_norm_eps": fields.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": _activation(fields, "gelu_pytorch_tanh"),
    }
    tile = vision["image_size"]
    return EncoderSettings(
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "vision_config": vision,
            "scale_factor": fields.integer("vision.projector.scale_factor"),
        },
        {
            # Old files have no size; the default is the size in transformers' processor.
            "size": {"longest_edge": fields.integer("vision.preproc_image_size", 4 * tile)},
            "max_image_size": {"longest_edge": tile},
            **_normalization(fields),
        },
    )


def _gemma3(fields: EncoderFields) -> EncoderSettings:
    vision = _vision(fields) | {
        "layer_norm_eps": fields.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": _activation(fields, "gelu_pytorch_tanh"),
    }
    side = vision["image_size"]
    # Published models average 4 by 4 patches, and their files have no factor.
    factor = fields.integer("vision.projector.scale_factor", 4)
    num_tokens = (side // vision["patch_size"] // factor) ** 2
    return EncoderSettings(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "vision_config": vision,
            "mm_tokens_per_image": num_tokens,
        },
        {"size": {"height": side, "width": side}, **_normalization(fields)},
        {"image_seq_length": num_tokens},
    )


def _gemma4(fields: EncoderFields) -> EncoderSettings:
    """The settings of Gemma 4. The activation is a constant of transformers' config, and the number
    of tokens one of its image processor."""
    vision = _vision(fields)
    del vision["image_size"]  # a constant of the converter, which the encoder has no use for
    head_dim = fields.rows_of("v.blk.0.attn_q_norm.weight")
    pool = fields.integer("vision.projector.scale_factor", 3)
    vision |= {
        "model_type": "gemma4_vision",
        "head_dim": head_dim,
        "num_key_value_heads": fields.rows_of("v.blk.0.attn_k.weight") // head_dim,
        "pooling_kernel_size": pool,
        "position_embedding_size": fields.shape_of("v.position_embd.weight", 3)[1],
        "rms_norm_eps": fields.number("vision.attention.layer_norm_epsilon"),
        "hidden_activation": "silu" if fields.flag("use_silu") else "gelu_pytorch_tanh",
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in fields.tensors,
        "standardize": "v.std_bias" in fields.tensors,
    }
    fields.flag("use_gelu")  # missing in files of the published models
    for name in ("has_audio_encoder", "audio."):  # files of the small models have one
        fields.skip(name)
    return EncoderSettings(
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "vision_config": vision,
        },
        {
            "patch_size": vision["patch_size"],
            "pooling_kernel_size": pool,
            "do_normalize": True,
            **_normalization(fields),
        },
    )


def _lfm2(fields: EncoderFields) -> EncoderSettings:
    """The settings of LFM2-VL. The sizes and numbers of tiles are transformers' constants, which
    all published models have."""
    vision = _vision(fields) | {
        "model_type": "siglip2_vision_model",
        "layer_norm_eps": fields.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": _activation(fields, "gelu_pytorch_tanh"),
        "num_patches": fields.rows_of("v.position_embd.weight"),
    }
    del vision["image_size"]  # a constant of the converter, which the encoder has no use for
    factor = fields.integer("vision.projector.scale_factor", 2)
    return EncoderSettings(
        {
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "model_type": "lfm2_vl",
            "vision_config": vision,
            "downsample_factor": factor,
            "projector_hidden_size": fields.rows_of("mm.1.weight"),
            "projector_use_layernorm": "mm.input_norm.weight" in fields.tensors,
            "projector_bias": "mm.1.bias" in fields.tensors,
        },
        {
            "encoder_patch_size": vision["patch_size"],
            "downsample_factor": factor,
            **_normalization(fields),
        },
    )


def _internvl(fields: EncoderFields) -> EncoderSettings:
    vision = _vision(fields) | {
        "layer_norm_eps": fields.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": _activation(fields, "gelu"),
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in fields.tensors else "rms_norm",
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in fields.tensors,
        "attention_bias": "v.blk.0.attn_q.bias" in fields.tensors,
        "use_mean_pooling": "v.post_ln.weight" not in fields.tensors,
    }
    tile, merge = vision["image_size"], fields.integer("vision.projector.scale_factor")
    return EncoderSettings(
        {
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "vision_config": vision,
            "downsample_ratio": 1 / merge,
        },
        {
            "size": {"height": tile, "width": tile},
            "min_patches": fields.integer("vision.preproc_min_tiles", 1),
            "max_patches": fields.integer("vision.preproc_max_tiles", 12),
            **_normalization(fields),
        },
        {"image_seq_length": (tile // vision["patch_size"] // merge) ** 2},
    )


def _pixtral(fields: EncoderFields) -> EncoderSettings:
    merges = "mm.patch_merger.weight" in fields.tensors
    vision = _vision(fields) | {
        "model_type": "pixtral",
        "hidden_act": _activation(fields, "gelu"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
    }
    eps = fields.number("vision.attention.layer_norm_epsilon", _PIXTRAL_EPS)
    if eps != _PIXTRAL_EPS:
        raise UnsupportedModelError(
            f"{fields.path}: clip.vision.attention.layer_norm_epsilon is {eps}, but Pixtral's"
            f" encoder has {_PIXTRAL_EPS}"
        )
    wrapper = "Mistral3" if merges else "Llava"
    config = {
        "architectures": [f"{wrapper}ForConditionalGeneration"],
        "model_type": wrapper.lower(),
        "vision_config": vision,
        "spatial_merge_size": fields.integer("vision.spatial_merge_size", 2) if merges else 1,
        "multimodal_projector_bias": "mm.1.bias" in fields.tensors,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    text_eps = fields.text("attention.layer_norm_rms_epsilon")
    if isinstance(text_eps, float):
        # In transformers, the connector's norm has the eps of the language model.
        config["text_config"] = {"rms_norm_eps": shortest_decimal(text_eps)}
    image_fields = {"size": {"longest_edge": vision["image_size"]}, **_normalization(fields)}
    return EncoderSettings(config, image_fields)


def _qwen3vl(fields: EncoderFields) -> EncoderSettings:
    sizes = _vision(fields)
    fields.number("vision.attention.layer_norm_epsilon", 0.0)  # the language model's eps
    merge = fields.integer("vision.spatial_merge_size", 2)
    vision = {
        "depth": sizes["num_hidden_layers"],
        "num_heads": sizes["num_attention_heads"],
        "out_hidden_size": fields.integer("vision.projection_dim"),
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
        "num_position_embeddings": fields.rows_of("v.position_embd.weight"),
        "hidden_act": _activation(fields, "gelu_pytorch_tanh"),
        "deepstack_visual_indexes": fields.places("vision.is_deepstack_layers"),
        **{name: sizes[name] for name in ("hidden_size", "intermediate_size", "patch_size")},
    }
    sections, rope = fields.text("rope.dimension_sections"), {}
    if isinstance(sections, np.ndarray):
        rope = {"rope_parameters": {"mrope_section": [int(each) for each in sections[:3]]}}
    is_newer = fields.text_architecture.startswith("qwen35")
    name = "Qwen3_5" if is_newer else "Qwen3VL"
    fewest, most = (
        fields.integer(f"vision.image_{end}_pixels", default)
        for end, default in zip(("min", "max"), _QWEN_PIXELS, strict=True)
    )
    return EncoderSettings(
        {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": "qwen3_5" if is_newer else "qwen3_vl",
            "vision_config": vision,
            "text_config": rope,
        },
        {
            "size": {"shortest_edge": fewest, "longest_edge": most},
            "patch_size": sizes["patch_size"],
            "merge_size": merge,
            "temporal_patch_size": 2,
            **_normalization(fields),
        },
    )


@dataclass(frozen=True, slots=True)
class Projector:
    """The translation of one kind of projector."""

    settings: Callable[[EncoderFields], EncoderSettings]
    #: The architectures of the language models that have such an encoder, in llama.cpp's names.
    text_architectures: frozenset[str]
    #: Whether the file may have an encoder of sound, too, which is not read.
    may_have_sound: bool = False


_QWEN3_VL = frozenset({"qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"})

PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector(_gemma3, frozenset({"gemma3"})),
    "gemma4v": Projector(_gemma4, frozenset({"gemma4"}), may_have_sound=True),
    "idefics3": Projector(_idefics3, frozenset({"llama"})),
    "internvl": Projector(_internvl, frozenset({"llama", "qwen2", "qwen3"})),
    "lfm2": Projector(_lfm2, frozenset({"lfm2", "lfm2moe"})),
    "pixtral": Projector(_pixtral, frozenset({"llama", "mistral3"})),
    "qwen3vl_merger": Projector(_qwen3vl, _QWEN3_VL),
}
"""Projectors by the value of clip.projector_type."""
