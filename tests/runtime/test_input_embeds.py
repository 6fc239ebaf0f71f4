"""Embeddings in place of token ids: by modules and by a native program, whatever the chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.fallback.tiny_models import make_tiny
from tests.engine.checkpoints import save_checkpoint
from tests.runtime.hand_core import HandCore
from tests.runtime.real_runner import Made, load
from transformers import AutoModelForCausalLM

from quire.core.sampling_params import DecodingParams
from quire.core.step import StepPlan
from quire.errors import UnsupportedModelError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.interface import InputEmbeds
from quire.runtime.batch import StepBatch

GREEDY = DecodingParams(max_tokens=40, temperature=0.0, logprobs=5)
PROMPT = [7, 300, 70, 180, 90, 100, 110, 200, 130, 14, 15, 160, 17, 181]
PLACES = [2, 3, 4, 5, 9, 12]
ANY_TOKEN = 3

MADE = ["native", "torch", "scaled", "llama of transformers", "opt of transformers"]
OF_TRANSFORMERS = {"model_impl": "transformers"}


@pytest.fixture(scope="module", params=MADE)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, *of = request.param.split(" of ")
    folder = tmp_path_factory.mktemp(name)
    if name == "scaled":
        return load(save_checkpoint("granite", folder))
    if of:
        make_tiny(name, folder)
        return load(folder, **OF_TRANSFORMERS)
    return load(EMBEDDED_MODEL, **({"kernels": "torch"} if name == "torch" else {}))


@contextmanager
def embedded_by(core: HandCore, places: list[int], embeds: torch.Tensor) -> Iterator[None]:
    """The only row's steps get embeds [N, H] for the positions `places`."""
    rows = core.runner._rows
    build = rows.build

    def with_embeds(plan: StepPlan) -> StepBatch:
        step = build(plan)
        first, count = int(step.positions[0]), len(step.positions)
        here = [at for at, place in enumerate(places) if first <= place < first + count]
        if not here:
            return step
        inside = torch.tensor([places[at] - first for at in here])
        return replace(step, input_embeds=InputEmbeds(inside, embeds[here]))

    rows.build = with_embeds
    yield
    rows.build = build


def entries(core: HandCore, tokens: list[int], chunks: tuple[int, ...]) -> list:
    """Log-probabilities of what follows the tokens, which are computed in these chunks."""
    held = core.admit(tokens, GREEDY)
    for count in chunks:
        core.step({held.row: count})
    for _ in range(6):
        core.step()
    core.drop(held)
    return held.entries


@pytest.mark.parametrize("chunks", [(), (4,), (3, 1, 1, 5)], ids=str)
def test_embeddings_of_token_ids_change_no_bit(made: Made, chunks: tuple[int, ...]) -> None:
    core = made.make()
    expected = entries(core, PROMPT, chunks)
    ids = torch.tensor(PROMPT)[PLACES]
    with torch.inference_mode():
        embeds = made.model.embed(ids)
    assert len(embeds) == len(PLACES)
    given = embeds.clone()
    hidden = [ANY_TOKEN if place in PLACES else token for place, token in enumerate(PROMPT)]
    with embedded_by(core, PLACES, given):
        assert entries(core, hidden, chunks) == expected
    assert torch.equal(given, embeds)  # the caller's tensor is not written to
    assert entries(core, PROMPT, chunks) == expected  # and nothing of it is left
    assert entries(core, hidden, chunks) != expected


@pytest.mark.parametrize("chunks", [(), (4, 6)], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_random_embeddings_equal_transformers(kernels: str, chunks: tuple[int, ...]) -> None:
    made = load(EMBEDDED_MODEL, **({} if kernels == "auto" else {"kernels": kernels}))
    reference = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    table = reference.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(4)
    embeds = table.std() * torch.randn(len(PLACES), table.shape[1], generator=generator)
    with torch.inference_mode():
        inputs = reference.get_input_embeddings()(torch.tensor(PROMPT))
        inputs[PLACES] = embeds
        expected = reference(inputs_embeds=inputs[None]).logits[0, -1].log_softmax(-1)
        by_ids = reference(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    core = made.make()
    with embedded_by(core, PLACES, embeds):
        found = entries(core, PROMPT, chunks)[0]
    top = expected.topk(5)
    assert found.top_token_ids == tuple(top.indices.tolist())
    assert found.top_logprobs == pytest.approx(top.values.tolist(), abs=2e-4)
    assert (by_ids - expected).abs().max() > 0.1  # so that the embeddings matter


@pytest.mark.parametrize("chunks", [(), (3, 1, 1, 5)], ids=str)
def test_features_are_added_after_the_first_layers(chunks: tuple[int, ...]) -> None:
    """By modules and by a native program, as a model of transformers computes them."""
    generator = torch.Generator().manual_seed(4)
    reference = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    table = reference.get_input_embeddings().weight
    width, num_parts = table.shape[1], 3
    given = table.std() * torch.randn(len(PLACES), num_parts * width, generator=generator)
    first, *features = given.split(width, dim=1)

    def add(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        hidden[0, PLACES] += features[layer]
        return hidden

    for layer in range(num_parts - 1):
        module = reference.model.layers[layer]
        module.register_forward_hook(lambda _, __, found, layer=layer: add(layer, found))
    with torch.inference_mode():
        inputs = reference.get_input_embeddings()(torch.tensor(PROMPT))
        inputs[PLACES] = first
        expected = reference(inputs_embeds=inputs[None]).logits[0, -1].log_softmax(-1).topk(5)
    for kernels in ("auto", "torch"):
        made = load(EMBEDDED_MODEL, kernels=kernels)
        plain = made.make()
        by_ids = entries(plain, PROMPT, chunks)
        made.model.take_contents(num_parts, None, len(PROMPT))
        core = made.make()
        assert core.runner.is_native == plain.runner.is_native
        with embedded_by(core, PLACES, given):
            found = entries(core, PROMPT, chunks)[0]
        assert found.top_token_ids == tuple(expected.indices.tolist())
        assert found.top_logprobs == pytest.approx(expected.values.tolist(), abs=2e-4)
        assert entries(core, PROMPT, chunks) == by_ids  # text alone is computed as before


def test_models_without_layers_for_features_refuse_them(tmp_path: Path) -> None:
    made = load(EMBEDDED_MODEL)
    num_layers = len(made.model.model.layers)
    with pytest.raises(UnsupportedModelError, match=f"after {num_layers + 1} layers"):
        made.model.take_contents(num_layers + 2, None, 8)
    make_tiny("llama", tmp_path)
    fallback = load(tmp_path, **OF_TRANSFORMERS).model
    fallback.take_contents(1, None, 8)
    for num_parts, sections in ((2, None), (1, (4, 2, 2))):
        with pytest.raises(UnsupportedModelError, match="language_model_only"):
            fallback.take_contents(num_parts, sections, 8)


def test_transformers_may_embed_token_ids_alone(tmp_path: Path) -> None:
    make_tiny("gemma3_text", tmp_path)
    core = load(tmp_path, **OF_TRANSFORMERS).make()
    embeds = torch.zeros(len(PLACES), core.runner.model.hidden_size)
    with (
        embedded_by(core, PLACES, embeds),
        pytest.raises(UnsupportedModelError, match="takes nothing but token ids"),
    ):
        entries(core, PROMPT, ())


def test_a_program_without_a_place_for_embeddings_refuses_them(made: Made) -> None:
    core = made.make()
    if not core.runner.is_native:
        return
    core.runner._forward._program = replace(core.runner._forward._program, put_places=())
    embeds = torch.zeros(len(PLACES), made.model.embed(torch.tensor([1])).shape[1])
    with (
        embedded_by(core, PLACES, embeds),
        pytest.raises(AssertionError, match="puts no rows"),
    ):
        entries(core, PROMPT, ())
