"""docs/extending.md: every example runs, in a process of its own, and does what the page says."""

import re
from pathlib import Path

import pytest
from tests.forking import Forks
from tests.test_readme import code_blocks

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
SOURCE = ROOT / "src" / "quire"

SERVE = """
from quire import LLM, SamplingParams

def tokens(**options):
    llm = LLM(num_threads=1, max_num_seqs=2, kv_cache_memory="4MiB", dtype="float32", **options)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return llm.generate(["import os", "def f(x):"], params, use_tqdm=False)
def ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]
"""
COPY = """
import json, shutil, tempfile
from pathlib import Path
from quire.hub.model_folder import EMBEDDED_MODEL

folder = Path(tempfile.mkdtemp()) / "model"
shutil.copytree(EMBEDDED_MODEL, folder)
"""

CHECKS = {
    "A weight format": SERVE + 'assert ids(tokens(quantization="fp8"))[0]',
    "A checkpoint source": SERVE
    + COPY
    + """
from safetensors.torch import load_file
file = folder / "model.safetensors"
np.savez(folder / "weights.npz", **{n: t.float().numpy() for n, t in load_file(file).items()})
file.unlink()
assert ids(tokens(model=str(folder))) == ids(tokens())
""",
    "An attention backend": SERVE
    + 'assert ids(tokens(attention_backend="dense", kernels="torch")) == ids(tokens())',
    "A KV format": SERVE
    + """
plain, coded = tokens(attention_backend="torch"), tokens(kv_cache_dtype="k8v8")
assert [len(each) for each in ids(coded)] == [6, 6] and ids(coded)[0] == ids(plain)[0]
""",
    "An endpoint": """
from starlette.testclient import TestClient
answer = TestClient(app).get("/v1/uptime")
assert answer.status_code == 200 and answer.json()["model"] == "mine"
""",
    "A proposer of drafts": SERVE
    + 'assert ids(tokens(speculation="repeat_last")) == ids(tokens())',
    "An eviction order": """
from quire.simulation.simulator import run
from quire.simulation.workload import SimulationConfig
config = SimulationConfig(eviction="least_used", num_requests=200, check_every=5)
assert run(config).num_evicted_blocks > 100
""",
}
"""By heading: what runs behind the section's examples, in their process."""

PRINTED = {
    "A scheduling policy": ("first token after 0.13 s (median)", "and 16.2 s (99th percentile)"),
    "An eviction order": ("least_used ",),
    "A routing policy": ("| round_robin | 14.29% |", "| half_match | 71.43% |"),
}
SHORTER = {'"steady,drifting"': '"few"', '"300,1000"': '"300"'}
"""What the page measures for longer than a test should."""


def sections(page: str) -> dict[str, str]:
    """By heading of the second level."""
    found = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    return dict(found)


def files_to_touch(section: str) -> list[str]:
    """The paths of the list under "Files to touch:"."""
    listed = re.search(r"^Files to touch:\n\n((?:- .*\n(?:  .*\n)*)+)", section, re.MULTILINE)
    return re.findall(r"^- `([^`]+)`", listed[1], re.MULTILINE) if listed else []


SEAMS = {name: text for name, text in sections(PAGE).items() if files_to_touch(text)}


def test_the_page_has_all_seams() -> None:
    assert {name.partition(" ")[2] for name in SEAMS} == {
        *("model family", "weight format", "checkpoint source", "attention backend", "KV format"),
        *("engine option", "endpoint", "scheduling policy", "eviction order", "dialect"),
        *("routing policy", "proposer of drafts"),
    }


@pytest.mark.parametrize("name", SEAMS)
def test_the_example_runs(name: str, forks: Forks) -> None:
    blocks = code_blocks(SEAMS[name], "python")
    assert blocks, "no example"
    code = "\n".join([*blocks, CHECKS.get(name, "")])
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    status, printed = forks.run("-c", code)
    assert status == 0, printed
    for text in PRINTED.get(name, ()):
        assert text in printed


@pytest.mark.parametrize("name", SEAMS)
def test_the_example_is_short(name: str) -> None:
    block = code_blocks(SEAMS[name], "python")[0]
    lines = [
        line for line in block.splitlines() if line and not line.startswith(("from", "import"))
    ]
    assert 5 <= len(lines) <= 30


@pytest.mark.parametrize("name", SEAMS)
def test_files_named_in_the_page_exist(name: str) -> None:
    """Files to touch that are not new ones, and the tests that judge."""
    listed = files_to_touch(SEAMS[name])
    old = [path for path in listed if not re.search(r"[A-Z]{3}", path)]
    assert [path for path in old if not (SOURCE / path).is_file()] == []
    judges = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", SEAMS[name])
    assert judges, "no check is named"
    assert [path for path in judges if not (ROOT / path).is_file()] == []
