"""The random comparisons in miniature: nothing differs, and a planted bug is seen."""

from typing import Any

import pytest
from benchmarks.speculation import law

from quire.core.scheduling import scheduler as scheduling

SMALL = ["--comparisons", "1", "--seed", "5", "--model", "llama"]
WITH_DRAFTERS = {"draft_model": ("llama", 4), "mtp": ("qwen3_5", 11)}
"""For each method, a family and a seed with which it drafts. One family has recurrent states."""


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("NUM_CROWDS", 1), ("NUM_REQUESTS", 12), ("NUM_ENGINES", 1)):
        monkeypatch.setattr(law, name, number)


@pytest.mark.usefixtures("native_engine")
def test_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert law.main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "comparisons that differ: 0"
    assert "'comparisons': 2" in lines[0] and "'accepted': " in lines[0]


@pytest.mark.parametrize("method", WITH_DRAFTERS)
@pytest.mark.usefixtures("native_engine")
def test_nothing_differs_with_a_drafter(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, seed = WITH_DRAFTERS[method]
    assert law.main(["--comparisons", "1", "--seed", str(seed), "--model", name]) == 0
    printed = capsys.readouterr()
    assert f", {method}; " in printed.err and "'by drafter': " in printed.out
    assert printed.out.splitlines()[-1] == "comparisons that differ: 0"


@pytest.mark.usefixtures("native_engine")
def test_a_planted_bug_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All tokens of a step get the log-probability of its first one."""
    extend = scheduling.extend

    def keep_the_first_logprobs(sequence: Any, token_ids: Any, logprobs: Any) -> Any:
        return extend(sequence, token_ids, logprobs and logprobs[:1] * len(token_ids))

    monkeypatch.setattr(scheduling, "extend", keep_the_first_logprobs)
    assert law.main(SMALL) == 1
    assert "--seed 5 --first-batch 0: llama" in capsys.readouterr().out
