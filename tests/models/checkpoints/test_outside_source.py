"""A format of checkpoints from outside the package: found in a folder, it serves the same model."""

import json
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.engine.checkpoints import save_checkpoint
from tests.registering import restored

from quire.core.sampling_params import SamplingParams
from quire.errors import CheckpointError
from quire.models.checkpoints.file_formats import CHECKPOINT_SOURCES
from quire.models.checkpoints.readers import find_reader, open_checkpoint
from quire.models.checkpoints.safetensors_files import SafetensorsFiles
from quire.models.checkpoints.source import CheckpointSource
from quire.models.registry import load_config
from quire.offline.llm import LLM

PROMPTS = [{"prompt_token_ids": [7 + seed, *range(40, 60, 3)]} for seed in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class RawFile(CheckpointSource):
    """weights.json: the model's config, and the place of each tensor of fp32 in weights.raw."""

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return (folder / "weights.raw").exists()

    @classmethod
    def read_config(cls, folder: Path) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((folder / "weights.json").read_text())["config"]
        return config

    def __init__(self, folder: Path) -> None:
        self._places = json.loads((folder / "weights.json").read_text())["tensors"]
        self._numbers = np.memmap(folder / "weights.raw", np.float32, "c")
        if len(self._numbers) != sum(np.prod(shape) for shape, _ in self._places.values()):
            raise CheckpointError(f"{folder}/weights.raw is not whole; fetch it again")

    @property
    def names(self) -> Set[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._places[name][0])

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    @contextmanager
    def rows(self, name: str, span: range) -> Iterator[torch.Tensor]:
        shape, start = self._places[name]
        tensor = self._numbers[start : start + np.prod(shape, dtype=int)].reshape(shape)
        yield torch.from_numpy(tensor[span.start : span.stop])


@pytest.fixture(autouse=True)
def raw_files() -> Iterator[None]:
    """Folders of that format can be read until the end of the test."""
    with restored(CHECKPOINT_SOURCES):
        CHECKPOINT_SOURCES.register("raw", RawFile)
        yield


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model as safetensors, and the same in the other format, without a config.json."""
    folder = save_checkpoint(request.param, tmp_path_factory.mktemp("safetensors"))
    other = tmp_path_factory.mktemp("raw")
    places, start = {}, 0
    with (other / "weights.raw").open("wb") as file:
        for name, tensor in load_file(folder / "model.safetensors").items():
            places[name] = (tensor.shape, start)
            start += tensor.numel()
            file.write(tensor.numpy().tobytes())
    config = json.loads((folder / "config.json").read_text())
    (other / "weights.json").write_text(json.dumps({"config": config, "tensors": places}))
    generation = (folder / "generation_config.json").read_text()
    (other / "generation_config.json").write_text(generation)
    return [folder, other]


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_serves_the_same_tokens(both: list[Path], quantization: str | None) -> None:
    found = []
    for folder in both:
        llm = LLM(model=folder, skip_tokenizer_init=True, quantization=quantization)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert llm.engine.facts["num_parameters"] > 10_000
    assert found[0] == found[1]


def test_the_files_of_the_folder_decide_the_reader(both: list[Path], tmp_path: Path) -> None:
    assert [find_reader(folder) for folder in both] == [SafetensorsFiles, RawFile]
    assert load_config(both[0]) == load_config(both[1])
    assert find_reader(tmp_path) is SafetensorsFiles
    with pytest.raises(CheckpointError, match=r"has no weights: neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


def test_its_faults_are_named(both: list[Path]) -> None:
    other = both[1]
    content = (other / "weights.raw").read_bytes()
    (other / "weights.raw").write_bytes(content[:-4])
    try:
        with pytest.raises(CheckpointError, match=r"weights\.raw is not whole; fetch it again"):
            LLM(model=other, skip_tokenizer_init=True)
    finally:
        (other / "weights.raw").write_bytes(content)
