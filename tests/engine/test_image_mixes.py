"""Random mixes of text and images get the tokens that each request gets alone, to the bit."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.engine.crowding import preempt_much
from tests.engine.image_prompts import (
    IMAGE_FAMILIES,
    OTHER_SIZE,
    ImageFamily,
    Part,
    answers_of,
    make_request,
    text,
)
from tests.models.heads.head_files import add_named_head, save_eagle3

from quire import LLM
from quire.core.request import SequenceOutput
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.core.scheduling.pacing import ConstantPacer
from quire.engine.engine import Engine
from quire.models.registry import load_config
from quire.runtime.contents.content_store import ContentStore

HEAD = "a head"
HEADS = {"gemma3": "eagle3", "lfm2_vl": "eagle3", "qwen3_vl": "eagle3", "qwen3_5": "mtp"}
"""Kinds of heads, for families whose tiny models have three layers or more."""
NUM_EXAMPLES = 6
MAX_LEN = 72
WINDOWED_BLOCKS = {8: 26, 16: 21, 32: 15}
"""Blocks that hold one request of a family with windows, by block size."""
IMAGES = (1, 2, OTHER_SIZE)

parts = st.lists(
    st.one_of(
        st.sampled_from(IMAGES), st.builds(text, st.integers(0, 1), st.sampled_from([1, 3, 8, 11]))
    ),
    max_size=5,
)


@dataclass(frozen=True)
class Life:
    """One request of a mix."""

    parts: tuple[Part, ...]
    n: int
    is_sampled: bool
    max_tokens: int
    #: The step before which it comes.
    arrival: int
    #: Number of its first branch's tokens after which this is forked; None: it is not forked.
    fork_after: int | None
    #: Number of steps after which it is aborted; None: it is not aborted.
    abort_after: int | None

    @property
    def wishes(self) -> dict[str, Any]:
        temperature = float(self.is_sampled)
        return {"n": self.n, "max_tokens": self.max_tokens, "temperature": temperature, "seed": 7}


lives = st.builds(
    Life,
    parts=st.builds(lambda found: (*found, text(2, 2)), parts),
    n=st.integers(1, 2),
    is_sampled=st.booleans(),
    max_tokens=st.integers(1, 14),
    arrival=st.integers(0, 8),
    fork_after=st.none() | st.integers(1, 6),
    abort_after=st.none() | st.none() | st.integers(0, 9),
)
options = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([8, 16, 32]),
        "max_num_batched_tokens": st.integers(12, 40),
        "enable_prefix_caching": st.booleans(),
        "max_num_seqs": st.sampled_from([2, 5, 12]),
        "speculation": st.sampled_from(["off", "ngram", HEAD, HEAD]),
    }
)


class Alone:
    """A family's engine that computes one request at a time, from its first token."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family, self.folder = IMAGE_FAMILIES[name], folder
        self.family.save(folder)
        #: The kind of the family's head; None without one.
        self.head = HEADS.get(name)
        if self.head == "mtp":
            add_named_head(folder)
        elif self.head is not None:
            config = load_config(folder)
            save_eagle3(
                folder / "head",
                size=config.hidden_size,
                vocab_size=config.vocab_size,
                eagle_aux_hidden_state_layer_ids=[0, 1, config.num_layers - 1],
            )
        self._llm = self.llm(enable_prefix_caching=False, speculation="off")
        self._known: dict[str, dict[int, list[int]]] = {}

    def llm(self, **options: Any) -> LLM:
        usual = {"dtype": "bfloat16", "max_model_len": MAX_LEN, "skip_tokenizer_init": True}
        if options["speculation"] != HEAD:
            return LLM(str(self.folder), **usual, **options)
        del options["speculation"]
        heads = {"speculation": "mtp"}
        if self.head == "eagle3":
            heads = {"speculative_model": str(self.folder / "head")}
        llm = LLM(str(self.folder), **usual, **options, **heads)
        llm.engine.scheduler.pacer = ConstantPacer()  # drafts are made whatever they cost
        return llm

    def tokens(self, life: Life) -> dict[int, list[int]]:
        """The tokens of each branch."""
        key = repr((life.parts, life.wishes))
        if key not in self._known:
            request = make_request(self.family, "x", life.parts, **life.wishes)
            answers = answers_of(self._llm.engine, [request])
            self._known[key] = {
                branch: [token for token, _ in entries] for (_, branch), entries in answers.items()
            }
        return self._known[key]


@pytest.fixture(scope="module", params=IMAGE_FAMILIES)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    torch.set_num_threads(1)
    return Alone(request.param, tmp_path_factory.mktemp(request.param))


class Mix:
    """Requests that come, fork and go while others run."""

    def __init__(self, family: ImageFamily, engine: Engine, mix: list[Life]) -> None:
        self._family, self._engine, self._mix = family, engine, mix
        self.found: dict[tuple[int, int], list[int]] = {}
        #: By request, the index of the branch that was forked.
        self.forks: dict[int, int] = {}
        self.aborted: set[int] = set()
        self._ended: set[tuple[int, int]] = set()

    def run(self) -> None:
        step, last = 0, max(life.arrival for life in self._mix)
        while step <= last or self._engine.has_work():
            for index, life in enumerate(self._mix):
                if life.arrival == step:
                    request = make_request(self._family, str(index), life.parts, **life.wishes)
                    self._engine.add(request)
                if life.abort_after is not None and life.arrival + life.abort_after == step:
                    self._engine.abort(str(index))
                    self.aborted.add(index)
            for output in self._engine.step():
                self._note(output)
            for index, life in enumerate(self._mix):
                self._fork(index, life)
            step += 1

    def _note(self, output: SequenceOutput) -> None:
        assert output.error is None, output.error
        key = int(output.request_id), output.branch_index
        self.found.setdefault(key, []).extend(output.token_ids)
        if output.finish_reason is not None:
            self._ended.add(key)

    def _fork(self, index: int, life: Life) -> None:
        """Fork a greedy request's first branch, whose tokens are then those of its fork, too."""
        known = self.found.get((index, 0), [])
        is_running = (index, 0) not in self._ended and index not in self.aborted
        wants = life.fork_after is not None and len(known) >= life.fork_after
        if wants and is_running and not life.is_sampled and index not in self.forks:
            branch = self.forks[index] = self._engine.fork(str(index), 0)
            self.found[index, branch] = known[:]


@pytest.mark.usefixtures("native_engine")
def test_random_mixes_get_the_tokens_of_requests_alone(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrowthForecast, "fits_later", lambda *_: True)
    family = alone.family

    @settings(max_examples=NUM_EXAMPLES, deadline=None)
    @given(
        mix=st.lists(lives, min_size=1, max_size=7),
        options=options,
        num_spare=st.integers(0, 6),
        num_slots=st.sampled_from([1, 2, 8]),
        cache_bytes=st.sampled_from([0, 4096, 1 << 20]),
    )
    def check(
        mix: list[Life], options: dict[str, Any], num_spare: int, num_slots: int, cache_bytes: int
    ) -> None:
        if options["speculation"] == HEAD and alone.head is None:
            options = options | {"speculation": "ngram"}
        num_blocks = 20 if family.has_states else -(-MAX_LEN // options["block_size"])
        if family.has_states and options["speculation"] == HEAD:
            num_blocks = 40  # the head's layer has K and V beside the model's
        if family.has_windows:
            num_blocks = WINDOWED_BLOCKS[options["block_size"]]
        llm = alone.llm(num_blocks=num_blocks + num_spare, **options)
        preempt_much(llm)
        engine, contents = llm.engine, llm.engine.scheduler.contents
        store = contents._source
        assert isinstance(store, ContentStore)
        contents.num_slots, store._cache.max_bytes = num_slots, cache_bytes
        crowd = Mix(family, engine, mix)
        crowd.run()
        for index, life in enumerate(mix):
            if index in crowd.aborted:
                continue
            expected = dict(alone.tokens(life))
            if index in crowd.forks:
                expected[crowd.forks[index]] = expected[0]
            found = {branch: ids for (at, branch), ids in crowd.found.items() if at == index}
            assert found == expected, (index, life)
        assert engine.stats().num_held_blocks == 0 and not store._inputs
        contents.check(Counter())
        event(f"preempts: {engine.stats().num_preemptions > 0}")
        drafts = engine.stats().drafts.get("by_proposer", {})
        num_verified = sum(drafts.get(alone.head, {"verified": []})["verified"])
        event(f"verifies drafts of a head: {num_verified > 0}")

    check()
