"""The embedded model's tokenizer with marks of reasoning as tokens, and a template with them."""

import json
from collections.abc import Sequence
from pathlib import Path

from quire.hub.model_folder import EMBEDDED_MODEL

MARKS = ("<think>", "</think>")
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if reasoning_effort is defined %}{{ 'effort: ' ~ reasoning_effort }}{% endif -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""


def make_thinking_tokenizer(folder: Path) -> dict[str, int]:
    """Writes the files of a tokenizer with the marks of reasoning, and returns their ids."""
    return make_marked_tokenizer(folder, MARKS, TEMPLATE)


def make_marked_tokenizer(folder: Path, marks: Sequence[str], template: str) -> dict[str, int]:
    """Writes a tokenizer's files, and returns the marks' ids: those of its last tokens, from
    which no other is merged.
    """
    tokenizer = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    model = tokenizer["model"]
    size = len(model["vocab"])
    ids = {mark: size - len(marks) + at for at, mark in enumerate(marks)}
    replaced = {token for token, token_id in model["vocab"].items() if token_id in ids.values()}
    model["merges"] = [
        merge
        for merge in model["merges"]
        if "".join(merge.split(" ") if isinstance(merge, str) else merge) not in replaced
    ]
    model["vocab"] = {
        token: token_id for token, token_id in model["vocab"].items() if token not in replaced
    } | ids
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": mark, "special": False, **plain}
        for mark, token_id in ids.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    config |= {"chat_template": template}
    for mark, token_id in ids.items():
        config["added_tokens_decoder"][str(token_id)] = {"content": mark, "special": False, **plain}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ids
