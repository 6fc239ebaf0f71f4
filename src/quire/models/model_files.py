"""Reads the small JSON files of a model folder, so that every fault names its file.

Called by the readers of configs and of checkpoint indices. Imports no torch.
"""

import json
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError where there is none."""
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is not a folder; name one in Hugging Face's format")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; name a model folder in Hugging Face's format"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise CheckpointError(f"{path} is not JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {content!r:.80}, but must hold a JSON object")
    return content
