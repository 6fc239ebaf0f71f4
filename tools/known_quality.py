"""Measures the quality of the embedded model's formats, which quire comes with.

    python tools/known_quality.py

writes `src/quire/bench/quality/known_quality.json`, which `quire doctor` reads. To be run again
when the arithmetic of a format changes. Three minutes on two cores.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from quire.cli.main import main
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
HELDOUT = ROOT / "tests" / "data" / "heldout" / "val_code.bin"
KNOWN = ROOT / "src" / "quire" / "bench" / "quality" / "known_quality.json"
NUM_TOKENS = 24 * 1024


def measure() -> int:
    """The exit code."""
    token_ids = np.fromfile(HELDOUT, dtype="<u2")[:NUM_TOKENS].tolist()
    text = Tokenizer.from_folder(EMBEDDED_MODEL).decode(token_ids, skip_special_tokens=False)
    KNOWN.unlink()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "held-out code"
        path.write_text(text)
        formats = ["--quantization", "none", "int8", "int4", "--kv-cache-dtype", "auto", "int8"]
        return main(["bench", "perplexity", str(path), *formats, "--quality-file", str(KNOWN)])


if __name__ == "__main__":
    sys.exit(measure())
