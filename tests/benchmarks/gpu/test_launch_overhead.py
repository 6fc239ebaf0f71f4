"""The number of launches of a step, launched kernel by kernel and replayed.

The benchmark runs in a process of its own, since it replaces what a launch does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
NUM_LAYERS = 3


def test_a_layer_launches_six_kernels_and_four_products_and_a_replayed_step_none(
    tmp_path: Path,
) -> None:
    out = tmp_path / "launches.json"
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    words = ["--rows", "24", "--layers", str(NUM_LAYERS), "--steps", "30", "--output-tokens", "60"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.launch_overhead", *words, "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    shares = json.loads(out.read_text())["shares"]
    found = {(share["kind"], share["way"]): share for share in shares}
    assert len(found) == 4 and done.stdout.count("| 24 | ") == 4
    for kind in ("decode", "mixed"):
        launched, replayed = found[kind, "launched"], found[kind, "replayed"]
        assert launched["num_steps"] == replayed["num_steps"] > 0
        # A layer launches two norms, rotation and writing, attention, its merge, and the gate. The
        # model launches the final norm and the work list once.
        assert launched["launches"] <= 6 * NUM_LAYERS + 2
        assert launched["products"] == 4 * NUM_LAYERS + 1
        # The logits are computed outside the graph.
        assert (replayed["launches"], replayed["products"]) == (0, 1)
