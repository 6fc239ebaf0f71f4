"""The loads of `quire bench serve`: their lengths, arrivals and prefixes."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import ConfigurationError
from quire.replay.served_load import ServedLoadSpec, make_load
from quire.traces.tokens import PromptTokens

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,20,3
2023-11-16 18:00:05.0000000,21,4
"""


def test_random_lengths_are_exact_or_in_their_range() -> None:
    exact = make_load(ServedLoadSpec(num_prompts=5, input_len=30, output_len=7)).requests
    assert {(each.num_prompt_tokens, each.num_output_tokens, each.at_s) for each in exact} == {
        (30, 7, 0.0)
    }
    spec = ServedLoadSpec(num_prompts=200, input_len=30, output_len=8, range_ratio=0.5)
    drawn = [each.num_prompt_tokens for each in make_load(spec).requests]
    assert (min(drawn), max(drawn)) == (15, 45)
    assert make_load(spec) == make_load(spec)


def test_all_prompts_begin_with_the_prefix() -> None:
    trace = make_load(ServedLoadSpec(num_prompts=2, input_len=9, prefix_len=21))
    first, second = (PromptTokens(trace, 1000).prompt(number) for number in range(2))
    assert len(first) == len(second) == 30
    assert first[:21] == second[:21] and first[21:] != second[21:]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    spec = ServedLoadSpec(num_prompts=20_000, rate=8.0, burstiness=burstiness)
    times = [each.at_s for each in make_load(spec).requests]
    gaps = np.diff(times)
    assert times[0] == 0 and all(early <= late for early, late in pairwise(times))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_sharegpt_lengths_are_drawn_or_read(tmp_path: Path) -> None:
    drawn = make_load(ServedLoadSpec("sharegpt", num_prompts=500)).requests
    assert 150 < sum(each.num_prompt_tokens for each in drawn) / 500 < 300
    path = tmp_path / "sharegpt.json"
    said = [("human", "a" * 80), ("gpt", "b" * 41), ("human", "c")]
    talk = {"conversations": [{"from": name, "value": text} for name, text in said]}
    short = {"conversations": [{"value": "hi"}, {"value": "hello"}]}
    path.write_text(json.dumps([talk, short, {"conversations": []}]))
    (read,) = make_load(ServedLoadSpec("sharegpt", path)).requests
    assert (read.num_prompt_tokens, read.num_output_tokens) == (20, 10)


def test_a_trace_has_its_own_times_unless_a_rate_is_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    assert [each.at_s for each in make_load(ServedLoadSpec("trace", path)).requests] == [0.0, 5.0]
    at_once = make_load(ServedLoadSpec("trace", path, rate=math.inf)).requests
    assert [(each.at_s, each.num_prompt_tokens) for each in at_once] == [(0.0, 20), (0.0, 21)]
    assert len(make_load(ServedLoadSpec("trace", path, num_prompts=1)).requests) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0.0}, "request_rate is 0, but must be above 0"),
        ({"rate": math.nan}, "request_rate is nan"),
        ({"burstiness": -1.0}, "burstiness is -1"),
        ({"range_ratio": 1.0}, "range_ratio is 1, but must be at least 0 and below 1"),
        ({"dataset": "trace"}, "dataset_name is 'trace', which needs dataset_path"),
        ({"path": Path("x")}, "dataset_name is 'random', which reads no file"),
    ],
)
def test_impossible_loads_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ServedLoadSpec(**values)


@pytest.mark.parametrize("content", ["x", "{}", "[5]", "[]"])
def test_other_files_are_no_sharegpt(content: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"file\.json (is no file of|has no conversation)"):
        make_load(ServedLoadSpec("sharegpt", path))
    with pytest.raises(ConfigurationError, match="can't be read: No such file"):
        make_load(ServedLoadSpec("sharegpt", tmp_path / "none"))
