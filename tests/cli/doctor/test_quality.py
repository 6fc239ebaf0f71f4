"""`quire doctor MODEL`: what formats cost in quality, and how to measure what is not known."""

from dataclasses import replace

from tests.cli.doctor.test_model import GIB, REPORT

from quire.assembly.reports.model_report import Precision
from quire.bench.quality.quality_file import MeasuredQuality
from quire.cli.doctor.quality import quality_lines
from quire.version import __version__

INT8 = MeasuredQuality(
    quantization="int8",
    kv_cache_dtype="auto",
    dtype="bfloat16",
    reference="m in bfloat16",
    change=0.0123,
    loss_change_error=0.001,
    divergence=0.0045,
    agreement=0.981,
    num_tokens=3072,
    texts="novel.txt",
    date="2026-01-02",
    version=__version__,
)
PRECISIONS = tuple(Precision(name, GIB, GIB, GIB) for name in ("bfloat16", "int8", "int4"))
SERVED = replace(REPORT, precisions=PRECISIONS)
STORED = replace(REPORT, precisions=(Precision("as stored", GIB, GIB, GIB),))


def test_measured_quality_is_printed_with_its_text_and_date() -> None:
    kv = replace(INT8, quantization=None, kv_cache_dtype="fp8", dtype="float32")
    lines = list(quality_lines("m", SERVED, [INT8, kv]))
    assert lines[:2] == [
        "",
        "  quality beside m in bfloat16, measured on novel.txt (3,072 tokens, 2026-01-02)",
    ]
    expected = "int8 perplexity +1.23% ± 0.10, mean KLD 0.0045, same top token 98.1%"
    assert " ".join(lines[2].split()) == expected
    assert lines[3].startswith("    KV fp8 in float32  perplexity +1.23%")


def test_unmeasured_quality_is_printed_with_the_command_that_measures_it() -> None:
    (_, line) = quality_lines("m", SERVED, [])
    assert line == (
        "  quality in int8 and int4 was not measured: `quire bench perplexity FILE --model m"
        " --quantization none int8 int4` does so on a text"
    )
    assert "quality in int4 was not measured" in list(quality_lines("m", SERVED, [INT8]))[-1]
    both = [INT8, replace(INT8, quantization="int4")]
    assert not any("not measured" in line for line in quality_lines("m", SERVED, both))


def test_weights_that_are_quantized_already_are_compared_with_their_original() -> None:
    (_, line) = quality_lines("m.gguf", STORED, [])
    assert "quality as stored was not measured" in line and "--model m.gguf`" in line
    lines = list(quality_lines("m.gguf", STORED, [replace(INT8, quantization=None)]))
    assert lines[-1].startswith("    as stored       perplexity +1.23%")


def test_measurements_of_another_version_say_so() -> None:
    old = replace(INT8, version="0.0.1")
    assert list(quality_lines("m", SERVED, [old]))[1].endswith("2026-01-02, quire 0.0.1)")


def test_model_without_generation_has_no_quality_lines() -> None:
    assert list(quality_lines("m", replace(SERVED, generates=False), [])) == []
