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


def test_a_layer_has_nine_launches_or_six_at_one_row_and_a_replayed_step_none(
    tmp_path: Path,
) -> None:
    out = tmp_path / "launches.json"
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    words = [
        "--rows",
        "1,24",
        "--layers",
        str(NUM_LAYERS),
        "--steps",
        "30",
        "--output-tokens",
        "60",
    ]
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
    found = {(share["kind"], share["way"]): share for share in shares if share["num_rows"] == 1}
    alone, replayed = found["decode", "launched"], found["decode", "replayed"]
    # Rotation and writing, attention, and four products: two norm their row, one gates its result.
    # The model launches the work list, the final norm and the logits once.
    assert (alone["launches"], alone["products"]) == (6 * NUM_LAYERS + 3, 0)
    assert (replayed["launches"], replayed["products"]) == (1, 0)
    found = {(share["kind"], share["way"]): share for share in shares if share["num_rows"] == 24}
    assert len(found) == 4 and done.stdout.count("| 24 | ") == 4
    for kind, num_attending in (("decode", 1), ("mixed", 2)):
        launched, replayed = found[kind, "launched"], found[kind, "replayed"]
        assert launched["num_steps"] == replayed["num_steps"] > 0
        # A layer launches two norms, rotation and writing, the gate, and attention: once for rows
        # that decode, and once for prompts. The model launches the final norm and the work list.
        assert launched["launches"] <= (4 + num_attending) * NUM_LAYERS + 2
        assert launched["products"] == 4 * NUM_LAYERS + 1
        # The logits are computed outside the graph.
        assert (replayed["launches"], replayed["products"]) == (0, 1)
