"""quire and its peers on a CPU, alternating in one run: the command of `cpu/comparison.py`.

    python benchmarks/cpu.py --setup peers.toml --rounds 3 --out cpu.json --markdown cpu.md

Runs from any folder; the other scripts are modules of the repository's root.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.cpu.comparison import main  # noqa: E402 - found through the line above

if __name__ == "__main__":
    main()
