"""Checks and measures quire on one GPU: the command of `gpu/sections.py`.

    python benchmarks/gpu.py --out gpu.json --markdown gpu.md

Runs from any folder; the other scripts are modules of the repository's root.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu.sections import main  # noqa: E402 - found through the line above

if __name__ == "__main__":
    sys.exit(main())
