"""KV formats from outside the package: registered by a name, they serve a model end to end."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from tests.assembly.test_tier_identity import fingerprint
from tests.attention.paged import make_spec
from tests.attention.test_quantized_kv import QuantizedStep

from quire.attention.cpu_paged import CpuPagedAttention
from quire.attention.int4_kv import INT4
from quire.attention.kv_format import Arrays, KVFormat, Plain, VectorFormat
from quire.attention.kv_registry import KV_FORMATS, KVFormatEntry, load_kv_format
from quire.attention.quantized_kv import INT8
from quire.attention.torch_paged import TorchPagedAttention
from quire.cli.parser import build_parser
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError
from quire.offline.llm import LLM
from quire.options.engine_options import EngineOptions

PREFIX = list(range(40, 90))
PROMPTS = [{"prompt_token_ids": [*PREFIX, 7 + seed]} for seed in range(5)]
PARAMS = SamplingParams(temperature=0.7, seed=3, n=2, max_tokens=20, ignore_eos=True, logprobs=2)


class Halves(VectorFormat):
    """Each element's 32 bits, in two arrays of 16: nothing is lost."""

    dtype = torch.int16

    def arrays(self, head_dim: int) -> Arrays:
        return (self.dtype, (head_dim,)), (self.dtype, (head_dim,))

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bits = x.float().contiguous().view(torch.int32)
        return (bits >> 16).to(self.dtype), bits.to(self.dtype)

    def decode(self, *arrays: torch.Tensor) -> torch.Tensor:
        high, low = (array.int() for array in arrays)
        return (high << 16 | low & 0xFFFF).view(torch.float32)


@dataclass(frozen=True)
class Fewer(VectorFormat):
    """Elements whose last `count` bits of bfloat16 are cleared."""

    count: int
    dtype: torch.dtype = torch.bfloat16

    def arrays(self, head_dim: int) -> Arrays:
        return ((self.dtype, (head_dim,)),)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bits = x.to(self.dtype).contiguous().view(torch.int16)
        return ((bits >> self.count << self.count).view(self.dtype),)

    def decode(self, *arrays: torch.Tensor) -> torch.Tensor:
        return arrays[0].float()


HALVES = KVFormat("halves", Halves(), Halves())
FEWER = KVFormat("fewer", Fewer(3), Fewer(1))
K16V8 = KVFormat("k16v8", Plain(torch.bfloat16), INT8.values)
TORCH = frozenset({"torch"})


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formats, gone after the test."""
    for name in ("_entries", "_origins"):
        monkeypatch.setattr(KV_FORMATS, name, dict(getattr(KV_FORMATS, name)))
    for form in (HALVES, FEWER, K16V8):
        KV_FORMATS.register(form.name, KVFormatEntry(form, TORCH))


def generated(**options: object) -> list[list[tuple[object, ...]]]:
    """Tokens and log-probabilities of all samples."""
    llm = LLM(dtype="float32", num_threads=2, max_num_seqs=6, **options)  # type: ignore[arg-type]
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("form", [HALVES, FEWER, K16V8, INT4], ids=lambda form: form.name)
def test_torch_attends_what_the_format_keeps(form):
    specs = (make_spec(4, 2, 32), make_spec(4, 2, 32, window=40, soft_cap=4.0, has_sinks=True))
    step = QuantizedStep(TorchPagedAttention(), specs, [5, 64, 300, 90], dtype=form, block_size=8)
    step.check([1, 1, 1, 60], 2e-5)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "block_size": 32}])
def test_a_format_that_keeps_all_bits_gives_the_bits_of_the_models_dtype(options):
    """Over chunks, hits of the prefix cache and forks. Only torch reads the format, so it is chosen
    beside the native kernels too."""
    expected = generated(attention_backend="torch", **options)
    assert generated(kv_cache_dtype="halves", **options) == expected


def test_a_format_that_keeps_less_is_used():
    assert generated(kv_cache_dtype="fewer") != generated(attention_backend="torch")


def test_the_memory_plan_has_keys_and_values_of_other_formats():
    spec = make_spec(12, 4, 64)
    form = TorchPagedAttention.page_format(spec, 16, K16V8)
    assert form.bytes_per_layer == 16 * 4 * (2 * 64 + 64 + 2)
    sizes = [
        LLM(kv_cache_dtype=name, num_blocks=8, max_model_len=64).engine.facts["kv_cache_bytes"]
        for name in ("k16v8", "auto")
    ]
    assert sizes[0] < 0.8 * sizes[1]


def test_a_backend_without_its_kernels_refuses_it():
    with pytest.raises(ConfigurationError, match=r"'halves', but .* 'native' reads auto or int8$"):
        generated(kv_cache_dtype="halves", attention_backend="native")
    KV_FORMATS.register("wide", KVFormatEntry(replace(HALVES, name="wide"), None))
    with pytest.raises(ConfigurationError, match="format wide can't be served; choose"):
        CpuPagedAttention.page_format(make_spec(), 16, load_kv_format("wide", torch.float32))


def test_options_and_flags_know_its_name():
    assert EngineOptions(kv_cache_dtype="halves").kv_cache_dtype == "halves"
    flags = build_parser().parse_args(["serve", "--kv-cache-dtype", "halves"])
    assert flags.kv_cache_dtype == "halves"


def test_its_pages_have_a_fingerprint_of_their_own():
    found = fingerprint(kv_cache_dtype="halves")
    differing = {text.partition(" is ")[0] for text in found.differences(fingerprint())}
    assert {"numerics.kv_format", "pages.layers", f"code.{__name__}"} <= differing


def test_a_format_is_registered_by_its_own_name():
    KV_FORMATS.register("other", KVFormatEntry(HALVES, TORCH))
    with pytest.raises(ConfigurationError, match=r"'other' is registered as .*name='halves'"):
        load_kv_format("other", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_name_of_a_dtype_is_refused(dtype):
    name = KVFormat.plain(dtype).name
    with pytest.raises(ConfigurationError, match=rf"^KV format '{name}' .* a dtype has this name;"):
        KV_FORMATS.register(name, KVFormatEntry(replace(HALVES, name=name), TORCH))
    assert name not in KV_FORMATS


@pytest.mark.parametrize("name", ["auto", "int8", "fp8", "int4"])
def test_the_name_of_a_format_of_the_package_is_refused(name):
    known = KV_FORMATS.get(name)
    with pytest.raises(ConfigurationError, match=f"^KV format '{name}' is registered by quire and"):
        KV_FORMATS.register(name, KVFormatEntry(replace(HALVES, name=name), TORCH))
    assert KV_FORMATS.get(name) is known


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_the_packages_formats_have_their_names(name):
    assert load_kv_format(name, torch.float32).name == name
    assert load_kv_format("auto", torch.float16) == KVFormat.plain(torch.float16)


def test_names_are_read_without_torch():
    code = "import sys, quire.attention.kv_registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
