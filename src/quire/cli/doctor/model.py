"""Prints a model's properties, how it would be served here, and its memory and speed.

For `quire doctor MODEL`. `assembly.reports.model_report` examines the model.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench.quality.quality_file import find_quality
from quire.cli.doctor.machine import MEASURE_S
from quire.cli.doctor.quality import quality_lines
from quire.core.adapter_options import DEFAULT_MAX_LORA_RANK, DEFAULT_MAX_LORAS
from quire.core.memory.memory_report import format_bytes
from quire.errors import QuireError
from quire.observability.machine_memory import available_memory_bytes
from quire.observability.machine_processors import usable_processors
from quire.observability.memory_speed import measure_reads

if TYPE_CHECKING:
    from quire.assembly.reports.model_report import ModelReport, Precision

OVERHEAD_BYTES = 600 << 20
"""Memory for the program and its workspace, in addition to weights and KV cache."""

_WIDTHS = (10, 10, 12, 12, 16, 12)
_WHOLE_RATE = 100
"""Rates of at least this many tokens per second are printed without decimals."""


def examine_model(
    model: str,
    revision: str | None,
    num_tokens: int,
    *,
    measure: bool,
    quality_file: Path,
    report: "Callable[[str, str | None, int], ModelReport] | None" = None,
) -> int:
    """Print the report on a model. Returns the exit code: 1 if the model can't be served.

    With `measure`, memory is read for a third of a second, to estimate tokens per second.
    `quality_file` holds the results of `quire bench perplexity`. `report` examines the model; None
    means `model_report.report_on`.
    """
    if report is None:
        from quire.assembly.reports.model_report import report_on as report  # imports torch

        assert report is not None
    try:
        found = report(model, revision, num_tokens)
    except QuireError as error:
        print(f"{model}: not served")
        print(f"problem: {error}")
        return 1
    available = available_memory_bytes()
    speed = None
    if measure and found.device_type == "cpu":
        speed = measure_reads(usable_processors(), available, MEASURE_S)
    for line in describe_model(model, found, available, speed):
        print(line)
    kept = find_quality(quality_file, found.folder) if found.has_weights else []
    for line in quality_lines(model, found, kept):
        print(line)
    problems = [each for each in (found.problem, found.tokenizer_problem) if each is not None]
    for problem in problems:
        print(f"problem: {problem}")
    return int(bool(problems))


def describe_model(
    model: str, found: "ModelReport", available: int, speed: float | None
) -> Iterator[str]:
    """The lines of the report.

    `available` is free memory in bytes. `speed` is the rate of reading memory in bytes per second;
    None if it was not measured.
    """
    does = "generates text" if found.generates else "embeds or scores"
    yield f"{model}: {found.architecture}, {does}"
    rows = {
        "file"
        if found.folder.is_file()
        else "folder": f"{found.folder}{'' if found.has_weights else ', without its weights'}",
        "served": f"by {_kernels(found)}, in {found.dtype} where nothing else is asked for",
        "computed": _computed(found),
        "parameters": _parameters(found),
        "layers": f"{found.num_layers}; KV: {_kinds(found)}",
        "positions": f"{found.max_positions:,}",
        "adapters": _adapters(found),
        "speed": _speed(found, available, speed),
    }
    for name, value in rows.items():
        if value:
            yield f"  {name:<12}{value}"
    yield ""
    length = f"KV {found.num_tokens:,}"
    yield _row(("precision", "weights", "read a token", length, "tokens/s", "fits here"))
    for precision in found.precisions:
        yield _precision(precision, available, speed)
    yield ""
    yield f"  {length}: the KV cache of one sequence with this many tokens. tokens/s: the most that"
    yield "  memory allows for decoding one sequence, from its first token to this length."


def _kernels(found: "ModelReport") -> str:
    if found.kernels == "torch":
        return "torch, since native kernels can't be had (`quire doctor` says why)"
    kinds = {"cuda": "Triton kernels", "cpu": f"native kernels ({found.kernels})"}
    return kinds.get(found.device_type, found.kernels)


def _computed(found: "ModelReport") -> str:
    """Says if transformers computes the model, and which inputs of a multimodal model are served;
    else ""."""
    parts = []
    if found.transformers_version is not None:
        parts.append(
            f"by the class of transformers {found.transformers_version}, on quire's memory,"
            " attention and linears"
        )
    if found.wrapper is not None:
        inputs = "text and images" if found.takes_images else "text alone"
        parts.append(f"for {inputs}, of {found.wrapper}")
    return "; ".join(parts)


def _parameters(found: "ModelReport") -> str:
    text = f"{found.num_weights:,}"
    if 2 * found.num_active_weights < found.num_weights:
        text += f", of which a token is computed from {found.num_active_weights:,}"
    return text


def _adapters(found: "ModelReport") -> str:
    if found.adapter_problem is not None:
        return f"none: {found.adapter_problem}"
    return (
        f"{format_bytes(found.adapter_bytes)} with --enable-lora, for {DEFAULT_MAX_LORAS} of rank"
        f" {DEFAULT_MAX_LORA_RANK}"
    )


def _kinds(found: "ModelReport") -> str:
    return ", ".join(f"{kind} in {count}" for kind, count in found.kv_kinds) or "none"


def _speed(found: "ModelReport", available: int, speed: float | None) -> str:
    memory = f"{format_bytes(available)} of memory are available"
    if found.device_type != "cpu":
        return f"unknown for a GPU until it is used; {memory} on the host"
    if speed is None:
        return f"not measured; {memory}"
    return f"{speed / 1e9:.1f} GB/s read from memory just now; {memory}"


def _precision(precision: "Precision", available: int, speed: float | None) -> str:
    if precision.obstacle is not None:
        return f"  {precision.name:<{_WIDTHS[0]}}  not here: {precision.obstacle}"
    needed = precision.weight_bytes + precision.kv_bytes + OVERHEAD_BYTES
    return _row(
        (
            precision.name,
            format_bytes(precision.weight_bytes),
            format_bytes(precision.token_bytes),
            format_bytes(precision.kv_bytes),
            _rates(precision, speed),
            "yes" if needed <= available else f"needs {format_bytes(needed)}",
        )
    )


def _rates(precision: "Precision", speed: float | None) -> str:
    if speed is None:
        return "-"
    rates = (
        speed / precision.token_bytes,
        speed / (precision.token_bytes + precision.kv_bytes),
    )
    return " to ".join(f"{rate:,.{1 if rate < _WHOLE_RATE else 0}f}" for rate in rates)


def _row(cells: tuple[str, ...]) -> str:
    cells_and_widths = zip(cells, _WIDTHS, strict=True)
    return ("  " + "".join(f"{cell:<{width}}  " for cell, width in cells_and_widths)).rstrip()
