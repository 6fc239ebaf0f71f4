"""Prints benchmark results as a table, and writes them as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.bench.compare import Ratio, Round, WidthChoice, median_figures
from quire.bench.ledger import ledger_table
from quire.bench.machine import NOISE_LIMIT_CORES
from quire.bench.metrics import LATENCIES, Figures
from quire.bench.trace_summary import StepTimes
from quire.errors import ConfigurationError

QUIRE = "quire"

_COLUMN = 14


@dataclass(frozen=True, slots=True)
class Results:
    """All results of a benchmark run. Mappings have names of contenders as keys, unless noted."""

    #: The workload, engine and machine, as values that JSON can hold.
    setting: dict[str, Any]
    #: The rounds of each contender. The first key is QUIRE.
    rounds: dict[str, list[Round]]
    widths: dict[str, WidthChoice]
    ratios: dict[str, Ratio]
    #: Maps each kind of step to its times; empty without a trace.
    trace: dict[str, StepTimes]


def as_json(results: Results) -> dict[str, Any]:
    """The results as JSON data: quire's medians under vLLM's key names, then each round of each
    contender, and more."""
    return {
        **results.setting,
        **median_figures(results.rounds[QUIRE]),
        "rounds": {
            name: [{**result.figures, **asdict(result.noise)} for result in rounds]
            for name, rounds in results.rounds.items()
        },
        "baselines": {
            name: {
                **median_figures(results.rounds[name]),
                "width": choice.best,
                "width_choice": asdict(choice),
                "quire_times_faster": asdict(results.ratios[name]),
            }
            for name, choice in results.widths.items()
        },
        "trace": {kind: asdict(cost) for kind, cost in results.trace.items()},
    }


def write_json(results: Results, path: Path) -> None:
    """Write the results. Raises ConfigurationError if the file can't be written."""
    try:
        path.write_text(json.dumps(as_json(results), indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"the results can't be written to {str(path)!r} ({error.strerror})"
        ) from error


def table(results: Results) -> str:
    """The report as a text of several lines."""
    found = {name: median_figures(rounds) for name, rounds in results.rounds.items()}
    heads = {
        name: f"{name} x{results.widths[name].best}" if name in results.widths else name
        for name in found
    }
    lines = [*_setting_lines(results), "", _line("", list(heads.values()))]
    for label, key, form in _rows():
        values = [_cell(figures[key], form) for figures in found.values()]
        lines.append(_line(label, values))
    for name, times in results.ratios.items():
        lines.append(
            f"quire makes {times.of_medians:.2f} times the output tokens/s of {heads[name]}"
            f" (rounds {times.lowest:.2f} to {times.highest:.2f})"
        )
    lines += _draft_lines(found)
    lines += _ledger_lines(found[QUIRE])
    lines += _noise_lines(results.rounds)
    lines += _trace_lines(results.trace)
    return "\n".join(lines)


def _rows() -> list[tuple[str, str, str]]:
    """(label, key, format) of each row of the table."""
    rows = [
        ("requests/s", "request_throughput", ".2f"),
        ("output tokens/s", "output_throughput", ".0f"),
        ("all tokens/s", "total_token_throughput", ".0f"),
        ("duration s", "duration", ".2f"),
    ]
    for name in LATENCIES:
        for statistic in ("mean", "median", "p90", "p99"):
            label = f"{name.upper()} ms, {statistic}"
            rows.append((label, f"{statistic}_{name}_ms", ".1f"))
    return [
        *rows,
        ("KV use, peak", "peak_kv_use", ".1%"),
        ("KV use, mean", "mean_kv_use", ".1%"),
        ("useful of held KV", "kv_useful_share", ".1%"),
        ("preemptions", "num_preemptions", ".0f"),
        ("recomputed tokens", "num_recomputed_tokens", ".0f"),
        ("prefix hit rate", "prefix_hit_rate", ".1%"),
        ("most sequences at once", "max_concurrent_requests", ".0f"),
    ]


def _setting_lines(results: Results) -> list[str]:
    setting, rounds = results.setting, results.rounds[QUIRE]
    found = median_figures(rounds)
    return [
        f"{setting['model_id']}, {setting['dtype']}, {setting['num_threads']} threads,"
        f" {setting['processor']}",
        f"{found['completed']:.0f} requests, {found['total_input_tokens']:.0f} prompt tokens,"
        f" {found['total_output_tokens']:.0f} output tokens, all at t=0;"
        f" medians over rounds: {len(rounds)}",
        *(_width_line(name, choice) for name, choice in results.widths.items()),
    ]


def _width_line(name: str, choice: WidthChoice) -> str:
    rates = (
        f"x{width} " + ("does not fit" if rate is None else f"{rate:.0f}")
        for width, rate in choice.output_throughput.items()
    )
    tried = ", ".join(rates)
    return f"{name}: output tokens/s of the first {choice.num_prompts} requests: {tried}"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<24}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)


def _draft_lines(found: Mapping[str, Figures]) -> list[str]:
    """A line for each contender whose steps verified drafts."""
    lines = []
    for name, figures in found.items():
        verified, accepted = figures["num_drafts"], figures["num_accepted_drafts"]
        tokens_a_step = figures["draft_tokens_a_step"]
        if verified and accepted is not None and tokens_a_step is not None:
            lines.append(
                f"{name}'s drafts: {verified:.0f} verified, {accepted:.0f} accepted"
                f" ({accepted / verified:.1%}), {tokens_a_step:.2f} tokens a step of a sequence"
                " with drafts"
            )
    return lines


def _ledger_lines(found: Figures) -> list[str]:
    shown = ledger_table(found)
    return ["", f"{QUIRE}'s KV memory, mean over the run", shown, ""] if shown is not None else []


def _noise_lines(rounds: Mapping[str, Sequence[Round]]) -> list[str]:
    every = [result.noise for runs in rounds.values() for result in runs]
    cores = [noise.other_cores for noise in every if noise.other_cores is not None]
    if not cores:
        return ["the load of other processes is not known on this system"]
    lines = [f"other processes took up to {max(cores):.2f} cores meanwhile"]
    num_loud = sum(noise.is_loud for noise in every)
    if num_loud:
        lines.append(
            f"WARNING: in {num_loud} of {len(every)} runs others took more than"
            f" {NOISE_LIMIT_CORES} cores; measure again on a quiet machine"
        )
    return lines


def _trace_lines(trace: Mapping[str, StepTimes]) -> list[str]:
    if not trace:
        return []
    lines = ["", "schedule + batch building + apply, in microseconds (medians over steps)"]
    for kind, cost in trace.items():
        shares = ", ".join(f"{part} {share:.1%}" for part, share in cost.shares.items())
        lines.append(
            f"  {kind}: {cost.num_steps} of {cost.step_us:.0f}, {cost.overhead_us:.0f} a step,"
            f" {cost.per_sequence_us:.2f} per sequence and step"
            f" (mean {cost.mean_per_sequence_us:.2f}, p99 {cost.p99_per_sequence_us:.2f})"
        )
        busy = "" if cost.busy_share is None else f"; busy {cost.busy_share:.1%} of the time"
        lines.append(f"    {shares}{busy}")
    return lines
