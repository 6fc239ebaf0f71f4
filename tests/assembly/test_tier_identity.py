"""What changes the fingerprint of a model's pages, and what doesn't."""

import importlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.registering import restored
from tests.runtime.hybrid_family import HybridForCausalLM, registered, save_hybrid

from quire.assembly import tier_identity
from quire.assembly.model_kind import choose_kind
from quire.assembly.rank_build import build_rank
from quire.assembly.tier_identity import COMPUTING_FOLDERS, answer_digest
from quire.attention.kv_registry import INT8
from quire.errors import ConfigurationError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.kernels.cpu.library import NativeLibrary
from quire.models.architectures import MODELS
from quire.models.decoder import DecoderForCausalLM
from quire.models.families.qwen3 import Qwen3Config
from quire.models.model_entry import ModelEntry
from quire.options.engine_options import EngineOptions
from quire.tiers.fingerprint import Fingerprint

SMALL = {"cache_dir": "not-opened-here", "kv_cache_memory": "4MiB", "max_num_seqs": 4}
SHORT_ROPE = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


def fingerprint(**options: Any) -> Fingerprint:
    kind = choose_kind(EngineOptions.from_mapping({"dtype": "float32", **SMALL, **options}))
    built = build_rank(kind.options, kind.folder, kind.config, None, None, lambda *_: None)
    assert built.fingerprint is not None
    return built.fingerprint


@pytest.fixture(scope="module")
def usual() -> Fingerprint:
    return fingerprint()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "copy"))


def edit_json(path: Path, **changes: Any) -> None:
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_nothing_is_asked_for_without_a_folder() -> None:
    kind = choose_kind(EngineOptions.from_mapping({"kv_cache_memory": "1MiB"}))
    built = build_rank(kind.options, kind.folder, kind.config, None, None, lambda *_: None)
    assert built.fingerprint is None


@pytest.mark.parametrize(
    "options",
    [
        {"num_threads": 2},
        {"max_model_len": 100},
        {"max_num_seqs": 9, "max_num_batched_tokens": 77},
        {"kv_cache_memory": "8MiB", "eviction": "lru", "cache_size": "1GiB"},
        {"seed": 3, "max_logprobs": 1, "async_scheduling": True, "scheduling_policy": "priority"},
        {"skip_tokenizer_init": True, "allow_special_tokens": True},
    ],
    ids=str,
)
def test_options_that_change_no_byte_keep_the_fingerprint(options: Any, usual: Fingerprint) -> None:
    assert fingerprint(**options).differences(usual) == []
    assert fingerprint(**options).digest == usual.digest


def test_names_templates_and_files_change_nothing(copied: Path, usual: Fingerprint) -> None:
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    save_file(dict(reversed(tensors.items())), copied / "model.safetensors", {"format": "pt"})
    edit_json(copied / "config.json", eos_token_id=5, _name_or_path="other", use_cache=False)
    edit_json(copied / "tokenizer_config.json", chat_template="{{ messages }}")
    found = fingerprint(model=copied)
    assert (found.digest, found.label) == (usual.digest, str(copied))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"block_size": 32}, {"pages.block_size", "pages.bytes_per_block", "pages.layers"}),
        (
            {"dtype": "bfloat16"},
            {
                *("numerics.dtype", "numerics.kv_format", "pages.bytes_per_block", "pages.layers"),
            },
        ),
        ({"quantization": "int8"}, {"numerics.quantization", "numerics.rounding"}),
        (
            {"kv_cache_dtype": INT8},
            {"numerics.kv_format", "pages.bytes_per_block", "pages.layers"},
        ),
        ({"hf_overrides": {"rms_norm_eps": 1e-5}}, {"model.rms_norm_eps"}),
        ({"hf_overrides": {"rope_theta": 9e3}}, {"model.rope.rope_theta", "model.positions"}),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_options_that_change_bytes_change_the_fingerprint(
    options: Any, names: set[str], usual: Fingerprint
) -> None:
    found = fingerprint(**options)
    assert found.digest != usual.digest
    differing = {text.partition(" is ")[0] for text in found.differences(usual)}
    # Of int8 weights, torch's and Triton's linears have a class of their own.
    assert differing - {"numerics.linears"} == names


def test_other_weights_under_the_same_name_are_others(copied: Path, usual: Fingerprint) -> None:
    path = copied / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.self_attn.v_proj.weight"
    tensors[name].view(torch.uint8)[0, 0] ^= 1
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    (difference,) = fingerprint(model=copied).differences(usual)
    assert difference.startswith("weights is ")


def test_fingerprint_covers_the_kernels(usual: Fingerprint, native_library: NativeLibrary) -> None:
    isas = native_library.isas()
    *_, last = isas
    found = [fingerprint(kernels=name) for name in isas]
    found += [fingerprint(kernels="torch"), fingerprint(kernels=last, block_size=32)]
    by_torch = fingerprint(kernels=last, attention_backend="torch")
    assert len({each.digest for each in (*found, by_torch)}) == len(found) + 1
    assert "library" in found[0].numerics and "library" not in found[-2].numerics
    # By a native program alone, whose instruction set is known, no processor counts.
    assert "device" in by_torch.numerics and "device" not in found[0].numerics


def test_a_length_counts_where_the_rotation_depends_on_it() -> None:
    overrides = {**SHORT_ROPE, "max_position_embeddings": 64}
    found = {
        length: fingerprint(hf_overrides=overrides, max_model_len=length).digest
        for length in (32, 64, 100, 120)
    }
    assert found[32] == found[64]
    assert len(set(found.values())) == 3


def test_a_row_of_the_rotation_s_table_is_the_same_under_any_length() -> None:
    """Why the length counts nowhere else."""
    kind = choose_kind(EngineOptions.from_mapping(SMALL))
    tables = []
    for length in (37, 101):
        entry = MODELS.get(kind.config.architecture)
        model = entry.model(
            kind.config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=length
        )
        tables += [
            each
            for name, each in model.named_buffers()
            if name.endswith(".table") and "rotary" in name
        ]
    assert torch.equal(tables[0], tables[1][:37])


OUTSIDE = {
    "outside/__init__.py": "",
    "outside/model.py": """
from quire.models.decoder import DecoderForCausalLM
from outside import scales
from outside.parts import double

class OutsideModel(DecoderForCausalLM):
    pass
""",
    "outside/scales.py": "SCALE = 2.0",
    "outside/parts.py": "import math\nfrom outside.deep import VALUE\ndef double(x): return 2 * x",
    "outside/deep.py": "VALUE = 1",
    "outside/other.py": "VALUE = 1",
}
"""A program that adds its own family."""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[DecoderForCausalLM]]:
    (tmp_path / "outside").mkdir()
    for name, text in OUTSIDE.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("outside.model").OutsideModel
    for name in [each for each in sys.modules if each.partition(".")[0] == "outside"]:
        del sys.modules[name]


def test_the_sources_of_a_family_from_outside_count(
    monkeypatch: pytest.MonkeyPatch,
    usual: Fingerprint,
    copied: Path,
    tmp_path: Path,
    outside: type[DecoderForCausalLM],
) -> None:
    with restored(MODELS):
        MODELS.register("OutsideForCausalLM", ModelEntry(Qwen3Config, outside))
        edit_json(copied / "config.json", architectures=["OutsideForCausalLM"])
        found = fingerprint(model=copied)
        names = {f"outside{each}" for each in ("", ".model", ".scales", ".parts", ".deep")}
        assert found.code.keys() - usual.code.keys() == names
        (tmp_path / "outside/scales.py").write_text("SCALE = 3.0")
        (difference,) = fingerprint(model=copied).differences(found)
        assert difference.startswith("code.outside.scales is ")
        compiled = tmp_path / "outside/model.so"
        compiled.write_bytes(b"\x7fELF\0")
        with monkeypatch.context() as patch:
            patch.setattr(tier_identity, "_source_file", lambda kind: compiled)
            assert fingerprint(model=copied).code.keys() - usual.code.keys() == {"outside.model"}
        monkeypatch.setattr(outside, "__module__", "typed_into_a_session")
        with pytest.raises(ConfigurationError, match=r"OutsideModel, which has no source file"):
            fingerprint(model=copied)


def test_how_torch_multiplies_counts_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(kernels="torch"), fingerprint()
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: linear(*given) * 1.01)
    (difference,) = fingerprint(kernels="torch").differences(before[0])
    assert difference.startswith("numerics.products is ")
    if "products" not in before[1].numerics:  # native kernels serve
        assert fingerprint() == before[1]


def test_the_sources_that_compute_count(tmp_path: Path) -> None:
    def digest() -> str:
        return tier_identity._package_digest(tmp_path, *COMPUTING_FOLDERS)

    assert digest().startswith("version ")
    for name in ("layers/a.py", "models/families/b.py", "server/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    first = digest()
    (tmp_path / "server/c.py").write_text("x = 2\n")
    assert digest() == first
    (tmp_path / "models/families/b.py").write_text("x = 2\n")
    second = digest()
    (tmp_path / "models/families/b.py").rename(tmp_path / "models/families/c.py")
    assert len({first, second, digest()}) == 3


def test_the_answer_digest_covers_config_and_folder_content(copied: Path) -> None:
    config = choose_kind(EngineOptions.from_mapping(SMALL)).config
    usual = answer_digest(config, copied)
    assert answer_digest(config, EMBEDDED_MODEL) == usual, "wherever it lies"
    assert answer_digest(replace(config, max_position_embeddings=7), copied) != usual
    assert answer_digest(config, None) != usual
    edit_json(copied / "tokenizer_config.json", more=1)
    assert answer_digest(config, copied) != usual


def test_the_folders_that_compute_are_there() -> None:
    for name in tier_identity.COMPUTING_FOLDERS:
        assert list((tier_identity.PACKAGE / name).rglob("*.py"))
    assert json.loads(json.dumps(fingerprint().model))
    with pytest.raises(ConfigurationError, match=r"there\.odd\['a'\] is of type object"):
        tier_identity._plain({"a": object()}, "there.odd")


def test_numbers_that_json_lacks_are_texts() -> None:
    found = tier_identity._plain({"limits": (0.0, math.inf, -math.inf, math.nan)}, "there")
    assert found == {"limits": [0.0, "inf", "-inf", "nan"]}


def test_fingerprint_covers_layers_of_all_kinds(tmp_path: Path) -> None:
    folder = save_hybrid(tmp_path / "hybrid")
    with registered():
        first, again = (fingerprint(model=folder) for _ in range(2))
        larger = fingerprint(model=folder, block_size=64)
        # A config that doesn't say how it depends on the length may depend on it.
        longer = fingerprint(model=folder, max_model_len=50)
    assert first.digest == again.digest
    kinds = {group["kind"] for group in first.pages["groups"]}
    assert {"full", "window", "state"} <= kinds and first.pages["states"]
    assert HybridForCausalLM.__module__ in first.code
    assert len({first.digest, larger.digest, longer.digest}) == 3
