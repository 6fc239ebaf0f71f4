"""What heads draft on the paged cache is what they draft by their definition, however they run."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.conftest import DenseAttention
from tests.models.heads.head_files import add_layer_head, save_eagle3, save_family
from tests.runtime.hand_core import HandCore, Held
from tests.runtime.real_runner import CPU, MODEL_LEN, NUM_BLOCKS, NUM_ROWS, STEP_TOKENS

from quire.assembly.device_setup import choose_setup
from quire.core.sampling_params import DecodingParams
from quire.kernels.cpu.sampling import NativeSampling
from quire.layers.operator_module import use_operators
from quire.models.checkpoints.loader import load_model
from quire.models.decoder import DecoderForCausalLM
from quire.models.heads.draft_head import DraftHead
from quire.models.heads.eagle3 import load_eagle3_config
from quire.models.heads.mtp import mtp_config
from quire.models.registry import MTP_HEADS, load_config
from quire.options.engine_options import EngineOptions
from quire.runtime import draft_head
from quire.runtime.batch import RowBatch
from quire.runtime.draft_head import HeadDrafter
from quire.runtime.forward import NativeForward
from quire.runtime.kv_cache import KVCache
from quire.runtime.model_runner import ModelRunner
from quire.runtime.page_layout import plan_layout
from quire.sampling.host.draft_sampler import DraftSampler
from quire.sampling.host.sampler import HostStepSampler, Sampler, SamplingRows

GREEDY = DecodingParams(max_tokens=40, temperature=0.0)
BLOCK = 8


class MadeHead:
    def __init__(self, folder: Path, head_folder: Path | None) -> None:
        config = load_config(folder)
        options = EngineOptions.from_mapping({"model": str(folder), "dtype": "float32"})
        self.setup = choose_setup(options, config, CPU, 1)
        where: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "max_model_len": MODEL_LEN}
        if head_folder is None:
            head_config = mtp_config(config, MTP_HEADS)
        else:
            head_config = load_eagle3_config(head_folder, config)
        self.plain = [
            load_model(folder, config, **where),
            load_model(head_folder or folder, head_config, **where),
        ]
        self.models = [
            load_model(folder, config, methods=self.setup.methods, **where),
            load_model(head_folder or folder, head_config, methods=self.setup.methods, **where),
        ]
        for target, head in (self.plain, self.models):
            assert isinstance(head, DraftHead) and isinstance(target, DecoderForCausalLM)
            head.use_target(target, STEP_TOKENS)
            if head.target_layers:
                target.keep_inputs(head.target_layers, STEP_TOKENS)

    def core(self) -> HandCore:
        target, head = self.models
        assert isinstance(head, DraftHead) and isinstance(target, DecoderForCausalLM)
        for model in self.models:
            use_operators(model, self.setup.operators)
        specs = (*target.attention_specs, *head.attention_specs)
        backend = self.setup.new_backend()
        layout = plan_layout(specs, type(backend), BLOCK, self.setup.kv_format, typical_tokens=64)
        rows = RowBatch(
            num_rows=NUM_ROWS,
            max_model_len=MODEL_LEN,
            max_num_tokens=STEP_TOKENS,
            num_groups=len(layout.groups),
            block_size=BLOCK,
        )
        kernels = self.setup.kernels
        native = None if kernels is None else NativeSampling(kernels)
        sampling_rows = SamplingRows(NUM_ROWS, target.vocab_size)
        cache = KVCache(layout, NUM_BLOCKS, CPU)
        runner = ModelRunner(
            target,
            backend,
            cache,
            rows,
            HostStepSampler(Sampler(sampling_rows, native), rows.history),
            kernels,
        )
        runner.drafter = HeadDrafter(
            head,
            target,
            self.setup.new_backend(),
            cache.layers()[len(target.attention_specs) :],
            rows,
            DraftSampler(sampling_rows, native),
            NUM_BLOCKS,
            kernels,
        )
        return HandCore(runner, layout.groups, NUM_BLOCKS, BLOCK)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int, unknown: int | slice = 0) -> tuple[int, ...]:
        """The drafts by the definition. The states before the tokens `unknown` are zero."""
        target, head = self.plain
        assert isinstance(head, DraftHead) and isinstance(target, DecoderForCausalLM)
        known = torch.tensor(tokens[:-1])
        hidden = target(known, torch.arange(len(known)), DenseAttention(target.attention_specs))
        if target.kept_inputs is not None:
            hidden = target.kept_inputs.rows[: len(known)]
        head.states[: len(tokens)] = torch.cat(
            (torch.zeros(1, head.hidden_size), head.states_of(hidden))
        )
        head.states[unknown] = 0
        attention = DenseAttention(head.attention_specs)
        state = head(torch.tensor(tokens), torch.arange(len(tokens)), attention)[-1:].clone()
        found: list[int] = []
        while True:
            own = int(head.logits(state).argmax())
            found.append(own if head.token_ids is None else int(head.token_ids[own]))
            if len(found) == count:
                return tuple(found)
            head.states[0] = state
            place = torch.tensor([len(tokens) + len(found) - 1])
            state = head(torch.tensor(found[-1:]), place, attention).clone()


@pytest.fixture(scope="module", params=["mtp", "mtp of latents", "eagle3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MadeHead:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "eagle3":
        save_family("llama", folder, num_hidden_layers=8)
        config = load_config(folder)
        save_eagle3(
            folder / "head",
            size=config.hidden_size,
            vocab_size=config.vocab_size,
            draft_vocab_size=200,
        )
        return MadeHead(folder, folder / "head")
    save_family("glm4-moe" if request.param == "mtp" else "deepseek_v3", folder)
    add_layer_head(folder)
    return MadeHead(folder, None)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 1000) for _ in range(length)]


def check(
    made: MadeHead, core: HandCore, held: list[Held], count: int, unknown: int | slice = 0
) -> None:
    """Order drafts for these rows, and compare them with the definition."""
    expected = {each.row: made.drafts(each.tokens, count, unknown) for each in held}
    core.step(orders=dict.fromkeys(expected, count))
    assert core.drafted == expected


def test_drafts_are_those_of_the_definition(made: MadeHead) -> None:
    """Whatever the rows did in the steps before: chunks, decodes, drafts of other numbers."""
    core, rng = made.core(), random.Random(7)
    held = [core.admit(prompt(length, length), GREEDY) for length in (3, 16, 41)]
    core.step({2: 19})
    core.step()
    for _ in range(12):
        ordered = [each for each in held if rng.random() < 0.5]
        if ordered:
            check(made, core, ordered, rng.randrange(1, 4))
        else:
            core.step()
    drafter = core.runner.drafter
    assert isinstance(drafter, HeadDrafter) and isinstance(drafter._forward, NativeForward)


def test_blocks_have_the_heads_keys_for_other_rows(made: MadeHead) -> None:
    """A row that reuses a prefix lacks the state before its first own token alone."""
    core = made.core()
    first = core.admit(prompt(37, 1), GREEDY)
    core.step({first.row: 24})
    prefix = core.snapshot(first)
    second = core.admit(first.tokens[:24] + prompt(7, 2), GREEDY, prefix)
    core.step()
    check(made, core, [second], 3, unknown=24)
    check(made, core, [first], 3)
    check(made, core, [second], 2, unknown=24)


def test_forks_continue_from_the_states_of_their_sources(made: MadeHead) -> None:
    core = made.core()
    source = core.admit(prompt(13, 3), GREEDY)
    branch = core.fork(source, replace(GREEDY, logit_bias=((700, 99.0),)), 1, joins_step=True)
    core.step(joins=[(branch, source)])
    core.part(branch)
    check(made, core, [source, branch], 2)
    later = core.fork(source, replace(GREEDY, logit_bias=((701, 99.0),)), 2)
    core.part(later)
    check(made, core, [source, branch, later], 3)
    assert len({tuple(each.sampled) for each in core.live}) == 3


def test_a_row_without_usable_logits_gets_fewer_drafts(made: MadeHead) -> None:
    core = made.core()
    held = [core.admit(prompt(length, length), GREEDY) for length in (5, 9)]
    core.step()
    drafter = core.runner.drafter
    assert isinstance(drafter, HeadDrafter)
    drafter._kept[held[0].row] = torch.nan
    expected = made.drafts(held[1].tokens, 2)
    core.step(orders={each.row: 2 for each in held})
    assert core.drafted == {held[0].row: (), held[1].row: expected}


def test_a_head_that_rested_catches_up(made: MadeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the states that it missed. Rows that come later have all of theirs."""
    monkeypatch.setattr(draft_head, "RESTS_AFTER", 3)
    core = made.core()
    first = core.admit(prompt(13, 1), GREEDY)
    for _ in range(9):
        core.step()
    drafter = core.runner.drafter
    assert isinstance(drafter, HeadDrafter) and drafter._missed[first.row]
    reached = drafter._blocks.num_reached(first.row, len(first.tokens))
    assert 8 <= reached < 17
    check(made, core, [first], 3, unknown=slice(reached, len(first.tokens)))
    second = core.admit(prompt(6, 2), GREEDY)
    core.step()
    check(made, core, [second], 2)


def test_blocks_that_a_resting_head_missed_are_computed_before_they_are_read(
    made: MadeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_head, "RESTS_AFTER", 0)
    core = made.core()
    first = core.admit(prompt(19, 3), GREEDY)
    core.step({first.row: 16})
    prefix = core.snapshot(first)
    monkeypatch.setattr(draft_head, "RESTS_AFTER", 9)
    second = core.admit(first.tokens[:16] + prompt(7, 4), GREEDY, prefix)
    core.step()
    check(made, core, [second], 2, unknown=slice(0, len(second.tokens)))
