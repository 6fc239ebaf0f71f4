"""Text that no model of the repository was trained on: Python, and short answers in English."""

from pathlib import Path

import numpy as np

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

HELDOUT = Path(__file__).parents[2] / "tests" / "data" / "heldout"
NAMES = ("val_code", "val_chat_fn", "val_chat_file")


def texts(num_tokens: int | None = None) -> dict[str, str]:
    """Each text by its name, or its first `num_tokens` tokens of the embedded model."""
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    found = {}
    for name in NAMES:
        token_ids = np.fromfile(HELDOUT / f"{name}.bin", dtype="<u2")[:num_tokens]
        found[name] = tokenizer.decode(token_ids.tolist())
    return found
