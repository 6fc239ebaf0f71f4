"""`python -m benchmarks.claims`: from its arguments to the lines, the page and the pictures."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.claims import command as claims
from benchmarks.claims.command import STUDIES
from benchmarks.claims.page import noise_line

from quire.bench.machine import Noise
from quire.errors import ConfigurationError

FIELDS = ["source", "quire", "baseline", "ratio", "verdict", "command"]
CURVES = {"latency", "fragmentation", "contexts", "batches"}
NUM_CLAIMS = 22


def _main(*words: str) -> int:
    parser = argparse.ArgumentParser()
    claims.add_arguments(parser)
    return claims.main(parser.parse_args(words))


def test_every_line_has_a_figure_a_baseline_and_a_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pictures, page, table = tmp_path / "pictures", tmp_path / "claims.md", tmp_path / "claims.json"
    pictures.mkdir()
    words = ["--markdown", str(page), "--pictures", str(pictures), "--output-json", str(table)]
    assert _main("--quick", *words) == 0
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.err.splitlines()] == list(STUDIES)
    *blocks, noise = shown.out.strip().split("\n\n")
    assert len(blocks) == NUM_CLAIMS and "ther processes" in noise
    for block in blocks:
        promise, *rows = block.splitlines()
        fields = dict(row.strip().split(maxsplit=1) for row in rows)
        assert promise and list(fields) == FIELDS
        assert re.search(r"\d", fields["quire"]) and re.search(r"\d", fields["baseline"])
        assert float(fields["ratio"].removesuffix("x")) > 0
        assert fields["verdict"] in ("holds", "does not hold")
        assert fields["command"].startswith("python -m benchmarks.claims --only ")
    _check_json(table, blocks)
    _check_page(page, pictures)


def _check_json(path: Path, blocks: list[str]) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [claim["promise"] for claim in found] == [block.splitlines()[0] for block in blocks]
    assert all(isinstance(claim["holds"], bool) for claim in found)
    commands = {claim["command"].split("; ")[0].split()[-1] for claim in found}
    assert commands == set(STUDIES)


def _check_page(page: Path, pictures: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == NUM_CLAIMS + 2
    assert all(len(row.split(" | ")) == 7 for row in rows if "---" not in row)
    assert not any(re.search(r"\b(nan|inf)\b", row) for row in rows)
    num_held = sum("| holds |" in row for row in rows)
    assert f"**{num_held} of {NUM_CLAIMS} hold.**" in text and "Written with `--quick`" in text
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert links == [
        f"pictures/{name}.svg" for name in ("latency", "fragmentation", "contexts", "batches")
    ]
    assert {path.name for path in pictures.iterdir()} == {Path(link).name for link in links}
    for path in pictures.iterdir():
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and "NaN" not in path.read_text(
            encoding="utf-8"
        )


def test_one_study_can_be_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("--quick", "--only", "lookups") == 0
    shown = capsys.readouterr()
    assert shown.err == "lookups ...\n" and shown.out.count("verdict") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--markdown /no/such/folder/x.md", "markdown is .* no such folder"),
        ("--output-json /no/such/folder/x.json", "output_json is .* no such folder"),
        ("--pictures /no/such/folder", "pictures is .* no such folder"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_before_the_work(words: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        _main("--quick", *shlex.split(words))


def test_the_arguments_load_no_torch() -> None:
    code = "import sys; import benchmarks.claims.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loud_machine_is_named() -> None:
    assert noise_line(Noise(0.1, 0.0)) == "Other processes took 0.10 cores meanwhile."
    assert "above 0.15: figures in wall time are not exact" in noise_line(Noise(0.5, 0.0))
    assert "not known" in noise_line(Noise(None, None))
