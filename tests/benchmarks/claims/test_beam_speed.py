"""Beam search with shared blocks and with copies: what is searched, and beside whom."""

import math
import sys

import pytest
from benchmarks.claims import beam_speed
from benchmarks.claims.beam_speed import (
    QUICK,
    Search,
    batches_that_fit,
    study_beams,
)
from benchmarks.claims.claim import Setting
from benchmarks.claims.copied_forks import copied_forks
from benchmarks.claims.saturated import take_turns
from benchmarks.memory.load import Budget, MemoryLoad
from benchmarks.memory.sharing import text_requests

from quire.bench.workload import BenchRequest
from quire.core.memory.kv_cache_manager import KVManagerFactory
from quire.hub.model_folder import resolve_model_folder
from quire.text.tokenizer import Tokenizer

FOLDER = resolve_model_folder(None, None)
SETTING = Setting(is_quick=True)


def make_requests(*lengths: tuple[int, int]) -> list[BenchRequest]:
    return [
        BenchRequest(index, [5] * prompt_len, output_len)
        for index, (prompt_len, output_len) in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def searched() -> dict[KVManagerFactory | None, Search]:
    requests = text_requests(QUICK.load, Tokenizer.from_folder(FOLDER))
    found = {kind: Search(SETTING, QUICK, requests, kind) for kind in (None, copied_forks)}
    take_turns(list(found.values()), math.inf)
    return found


def test_copies_take_room_and_are_counted(
    searched: dict[KVManagerFactory | None, Search],
) -> None:
    shared, copied = searched[None], searched[copied_forks]
    assert copied.runner.num_copied_blocks > shared.runner.num_copied_blocks > 0
    for found in (shared, copied):
        assert found.num_tokens > 0 and found.seconds > 0 and found.real_seconds > 0
    assert copied.num_at_once <= shared.num_at_once


def test_transformers_gets_no_more_slots() -> None:
    """64 slots, 2 beams: a padded row of 16 tokens has room for 2 requests, of 8 for 4."""
    load = MemoryLoad(num_prompts=5, input_mean=4, output_mean=4, max_model_len=64)
    spec = type(QUICK)(load, Budget(64, 8), width=2)
    requests = make_requests((4, 4), (4, 4), (8, 8), (2, 8), (60, 4))
    found = list(batches_that_fit(requests, spec))
    assert [[request.index for request in batch] for batch in found] == [[0, 1], [2, 3], [4]]


def test_without_transformers_its_line_is_left_out_by_name(
    searched: dict[KVManagerFactory | None, Search],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(beam_speed, "Search", lambda *arguments: searched[arguments[-1]])
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = study_beams(SETTING)
    assert len(result.claims) == 2
    assert "left out: the baseline hf needs transformers" in result.notes[-1]
    assert result.notes[-1] in capsys.readouterr().err
