"""Imports of what is not in the package: vLLM's places, and sentences."""

import importlib

import pytest

import quire
from quire.compat.vllm_names import NAMES


def found(module: str, name: str) -> object:
    return getattr(importlib.__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize("module", NAMES)
def test_names_of_vllm_are_found_where_it_has_them(module: str) -> None:
    for name, home in NAMES[module].items():
        there, _, other = home.partition(":")
        assert found(module, name) is getattr(importlib.import_module(there), other or name)


@pytest.mark.parametrize(
    ("module", "name", "sentence"),
    [
        ("quire", "SamplingParam", "there is no SamplingParam in quire; did you mean SamplingPar"),
        ("quire", "Xyzzy", "there is no Xyzzy in quire$"),
        ("quire", "PoolingRequest", "there is no PoolingRequest in quire"),
        ("quire.lora.layers", "LoRALayer", "quire.lora.layers is not there: the engine runs no"),
        ("quire.config", "VllmConfig", "quire.config.VllmConfig is not there: options are arg"),
        (
            "quire.config",
            "KVTransferConfig",
            "quire.config.KVTransferConfig is not there: no engine",
        ),
        ("quire.sampling_params", "SamplinParams", "did you mean SamplingParams"),
        ("quire.utils.serial_utils", "binary2tensor", "serial_utils is not there: /v1/embedd"),
        ("quire.distributed", "no_such", "there is no no_such in quire.distributed$"),
        ("quire.sampling_parms", "SamplingParams", "sampling_parms in quire; did you mean sampl"),
    ],
)
def test_other_imports_are_answered_by_a_sentence(module: str, name: str, sentence: str) -> None:
    with pytest.raises(ImportError, match=sentence):
        found(module, name)


def test_missing_names_can_be_probed_with_hasattr() -> None:
    assert not hasattr(quire, "SamplingParam")
    with pytest.raises(AttributeError, match="quire has no SamplingParam; did you mean Sampling"):
        quire.SamplingParam  # noqa: B018 - the access is the test


def test_modules_of_the_package_are_found_as_ever() -> None:
    from quire import errors

    assert errors.__name__ == "quire.errors"
