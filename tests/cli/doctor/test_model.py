"""`quire doctor MODEL`: from a made-up report to lines, and the exit code."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.assembly.reports.model_report import ModelReport, Precision
from quire.cli import main as cli
from quire.cli.doctor.model import describe_model, examine_model
from quire.errors import UnsupportedModelError
from quire.hub.model_folder import EMBEDDED_MODEL

GIB = 1 << 30
SETTINGS: dict[str, Any] = {"measure": False, "quality_file": Path("/no/such/file")}

REPORT = ModelReport(
    folder=Path("/models/m"),
    architecture="SomeForCausalLM",
    generates=True,
    num_weights=1_000_000_000,
    num_active_weights=1_000_000_000,
    num_layers=16,
    kv_kinds=(("full", 4), ("window of 512", 12)),
    max_positions=40_960,
    has_weights=True,
    dtype="bfloat16",
    kernels="avx512",
    device_type="cpu",
    num_tokens=4096,
    precisions=(
        Precision("bfloat16", 2 * GIB, GIB, GIB),
        Precision("float32", 4 * GIB, 2 * GIB, 2 * GIB),
        Precision("int8", obstacle="no kernels"),
    ),
    problem=None,
    tokenizer_problem=None,
)


def lines(report: ModelReport, speed: float | None = 64.0 * GIB) -> str:
    return "\n".join(describe_model("m", report, 4 * GIB, speed))


def test_a_report_has_a_line_for_each_property_of_the_model() -> None:
    printed = lines(REPORT)
    for expected in (
        "m: SomeForCausalLM, generates text",
        "served      by native kernels (avx512), in bfloat16",
        "parameters  1,000,000,000\n",
        "layers      16; KV: full in 4, window of 512 in 12",
        "positions   40,960",
        "4.0 GiB of memory are available",
        "bfloat16    2.0 GiB     1.0 GiB       1.0 GiB       64.0 to 32.0      yes",
        "float32     4.0 GiB     2.0 GiB       2.0 GiB       32.0 to 16.0      needs 6.6 GiB",
        "int8        not here: no kernels",
    ):
        assert expected in printed, expected
    assert "without its weights" not in printed


def test_a_mixture_tells_what_a_token_is_computed_from() -> None:
    printed = lines(replace(REPORT, num_active_weights=100_000_000))
    assert "parameters  1,000,000,000, of which a token is computed from 100,000,000" in printed


def test_the_report_names_the_computing_class_and_the_parts_left_out() -> None:
    assert "computed" not in lines(REPORT)
    other = replace(REPORT, transformers_version="5.23.0", wrapper="SeeingForConditionalGeneration")
    assert (
        "computed    by the class of transformers 5.23.0, on quire's memory, attention and linears;"
        " for text alone, of SeeingForConditionalGeneration\n"
    ) in lines(other)


def test_an_unmeasured_speed_gives_no_figure() -> None:
    assert "speed       not measured" in lines(REPORT, None)
    on_gpu = replace(REPORT, device_type="cuda", kernels="triton", has_weights=False)
    printed = lines(on_gpu, None)
    assert "by Triton kernels" in printed and "unknown for a GPU" in printed
    assert "/models/m, without its weights" in printed
    assert "by torch, since" in lines(replace(REPORT, kernels="torch"))


@pytest.mark.parametrize("field", ["problem", "tokenizer_problem"])
def test_problems_are_the_exit_code(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(REPORT, **{field: "something lacks"})  # type: ignore[arg-type]
    assert examine_model("m", "v1", 7, report=lambda *asked: report, **SETTINGS) == 1
    assert capsys.readouterr().out.endswith("problem: something lacks\n")


def test_a_model_that_is_not_served_is_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*asked: object) -> ModelReport:
        raise UnsupportedModelError("not this one")

    assert examine_model("m", None, 7, report=refuse, **SETTINGS) == 1
    assert capsys.readouterr().out == "m: not served\nproblem: not this one\n"


def test_the_command_examines_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokens", "100", "--no-measure", "--quality-file", "/no/such/file"]
    assert cli.main(["doctor", str(EMBEDDED_MODEL), *words]) == 0
    printed = capsys.readouterr().out
    assert "quality beside embedded model" in printed and "int8" in printed
    assert "Qwen3ForCausalLM, generates text" in printed and "KV 100" in printed


def test_the_report_has_the_bytes_of_adapters_or_why_there_are_none() -> None:
    printed = lines(replace(REPORT, adapter_bytes=3 << 20))
    assert "adapters    3.0 MiB with --enable-lora, for 8 of rank 16\n" in printed
    printed = lines(replace(REPORT, adapter_problem="adapters are served for others"))
    assert "adapters    none: adapters are served for others\n" in printed
