"""A read of the cache folder that does not return holds up no request, no sleep and no end."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.assembly import tier_build
from quire.core.memory.tiers.load_rule import ComputeTime
from quire.engine import tier_work
from quire.errors import InvalidRequestError
from quire.tiers.disk.files import Files

PROMPT = {"prompt_token_ids": list(range(300, 500))}
LATER = list(range(600, 800))
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def make_llm(folder: Path) -> LLM:
    sizes = {"kv_cache_memory": "4MiB", "max_num_seqs": 4, "cache_size": "64MiB"}
    return LLM(cache_dir=str(folder), skip_tokenizer_init=True, **sizes)


def test_requests_end_while_a_read_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeTime, "predict_s", lambda *_: None)  # loads whatever is there
    monkeypatch.setattr(tier_build, "_files", Files)  # whose reads can be held up
    first = make_llm(tmp_path)
    (expected,) = first.generate(PROMPT, GREEDY, use_tqdm=False)
    first.engine.tier_work.close()
    llm, gate, read = make_llm(tmp_path), threading.Event(), Files.preadv

    def hang(files: Files, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        gate.wait()
        return read(files, descriptor, buffers, offset)

    monkeypatch.setattr(Files, "preadv", hang)
    began_s = time.monotonic()
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert time.monotonic() - began_s < 60, "it is not waited for what never comes"
    assert not llm.engine.tier_work.wait_for_moves(0.0) and llm.engine.stats().num_held_blocks > 0
    monkeypatch.setattr(tier_work, "MOVES_WAIT_S", 0.1)
    monkeypatch.setattr(tier_work, "DRAIN_S", 0.1)
    with pytest.raises(InvalidRequestError, match="hangs"):
        llm.sleep()
    gate.set()
    assert llm.engine.tier_work.wait_for_moves(60.0) and llm.engine.stats().num_held_blocks == 0
    llm.generate({"prompt_token_ids": LATER}, GREEDY, use_tqdm=False)
    llm.sleep()
    llm.wake_up()
    (output,) = llm.generate({"prompt_token_ids": LATER}, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 192, "what was published last was stored as well"
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    llm.engine.tier_work.close()
