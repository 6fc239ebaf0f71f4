"""Folders of models that take images, with small tokenizers and without weights."""

import json
from pathlib import Path
from typing import Any

from tests.text.small_tokenizers import make_byte_level
from tokenizers import AddedToken

SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The template of SmolVLM-Instruct."""

QWEN_TEMPLATE = (
    "{% macro parts(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endmacro %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ parts(message.content) }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A short form of Qwen3-VL's template, which places images in tool results, too."""

_SMOLVLM_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)


def write_smolvlm(folder: Path, **config: Any) -> Path:
    """Write a folder whose tiles have 64 x 64 pixels and 4 tokens; config: further fields."""
    fields = {
        "model_type": "smolvlm",
        "vision_config": {"patch_size": 16, "image_size": 64},
        "scale_factor": 2,
        **config,
    }
    image_fields = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    return _write(folder, fields, image_fields, SMOLVLM_TEMPLATE, _SMOLVLM_TOKENS)


def write_qwen(folder: Path, config: dict[str, Any] | None = None, patch_size: int = 16) -> Path:
    """Write a folder of a model of Qwen's with at most 64 tokens for each image and each video.
    config: the contents of config.json."""
    fields = config or {"model_type": "qwen3_vl", "vision_config": {"patch_size": patch_size}}
    sizes = {"shortest_edge": 4 * patch_size**2, "longest_edge": 256 * patch_size**2}
    image_fields = {"size": sizes, "patch_size": patch_size}
    tokens = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    _write(folder, fields, image_fields, QWEN_TEMPLATE, tokens)
    video_fields = {"size": {"shortest_edge": 64, "longest_edge": 512 * patch_size**2}}
    video_fields |= {"patch_size": patch_size}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video_fields))
    return folder


def write_internvl(folder: Path, config: dict[str, Any], tile: int) -> Path:
    """Write a folder whose images become up to 4 tiles and a small copy. tile: pixels of a side."""
    image_fields = {"size": {"height": tile, "width": tile}, "max_patches": 4}
    tokens = ("<img>", "<IMG_CONTEXT>", "</img>")
    _write(folder, config, image_fields, QWEN_TEMPLATE, tokens)
    around = {"image_seq_length": config["image_seq_length"]}
    (folder / "processor_config.json").write_text(json.dumps(around))
    return folder


def write_lfm2_vl(folder: Path, config: dict[str, Any], patch_size: int) -> Path:
    """Write a folder whose small images have at most 9 tokens, and whose large images are cut into
    up to 4 tiles of 4 tokens."""
    image_fields = {
        "encoder_patch_size": patch_size,
        "tile_size": 4 * patch_size,
        "max_tiles": 4,
        "min_image_tokens": 2,
        "max_image_tokens": 9,
    }
    places = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    around = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    return _write(folder, config, image_fields, QWEN_TEMPLATE, ("<image>", *around, *places))


def write_pixtral(folder: Path, config: dict[str, Any], longest: int) -> Path:
    """Write a folder whose images have at most `longest` pixels on each side, and whose tokens of
    images have the ids of Mistral's tokenizers."""
    tokens = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    _write(folder, config, {"size": {"longest_edge": longest}}, QWEN_TEMPLATE, tokens)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab, added = content["model"]["vocab"], content["added_tokens"]
    for token, token_id in zip(tokens, (10, 12, 13), strict=True):
        entry = next(each for each in added if each["content"] == token)
        other = next(each for each, found in vocab.items() if found == token_id)
        vocab[token], vocab[other], entry["id"] = token_id, entry["id"], token_id
    added.sort(key=lambda each: int(each["id"]))
    file.write_text(json.dumps(content))
    return folder


def _write(
    folder: Path,
    config: dict[str, Any],
    image_fields: dict[str, Any],
    template: str,
    tokens: tuple[str, ...],
) -> Path:
    folder.mkdir(exist_ok=True)
    backend = make_byte_level()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config", config),
        ("preprocessor_config", image_fields),
        ("tokenizer_config", {"chat_template": template}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
