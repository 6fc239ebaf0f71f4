"""Formats a plan as lines to print and as data for JSON."""

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from quire.core.memory.memory_report import format_bytes
from quire.option_fields import flag_words
from quire.options.engine_options import EngineOptions
from quire.planning.block_sizes import SizeOutcome
from quire.planning.candidates import Expectation, as_numbers
from quire.planning.load import Load, offered_rate
from quire.planning.plan import OWN, Plan, ServedPrecision

NOT_MEASURED = "not measured here"
EMBEDDED = "the embedded model"
SCOPE = (
    "times are those of the engine: what HTTP and tokenizing add is not in them; a replica is one"
    " machine (or device) like this one, and gets every Nth request"
)
DISK_SCOPE = "the disk tier begins empty, and its loads and stores take no time from the steps"
RELIABLE_ERROR = 0.15
"""The largest mean relative error of step times that raises no doubt. Configurations of a plan
often differ by less than this."""
_HOUR_S = 3600.0


def plan_lines(plan: Plan, price: float | None) -> Iterator[str]:
    """The lines of a plan. `price` is the price of a replica per hour; None leaves costs out."""
    yield f"{plan.model or EMBEDDED}: {_load_line(plan.load)}"
    yield ""
    yield from _table(
        ("precision", "KV", "weights", "KV cache", "blocks", "sequences", "steps"),
        [_memory_row(each, plan.load.longest) for each in plan.precisions],
    )
    yield f"  sequences: of {plan.load.longest:,} tokens, the load's longest, that fit together"
    yield ""
    if not plan.found:
        yield f"what to expect: {NOT_MEASURED}; `--measure` measures it, once"
        return
    head: tuple[str, ...] = (
        "precision",
        "KV",
        "seqs",
        "ratio",
        "replicas",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
    )
    head += ("tokens/s", "saturation", "keeps")
    if price is not None:
        head += ("per 1M tokens",)
    yield from _table(head, [_expectation_row(each, price) for each in plan.found])
    yield f"  {SCOPE}"
    if plan.has_disk:
        yield f"  {DISK_SCOPE}"
    yield ""
    yield from _best_lines(plan, price)


def size_lines(found: Sequence[SizeOutcome], chosen: int) -> Iterator[str]:
    """The lines for the block sizes that were tried."""
    head = ("block size", "saturation", "prompt tokens found", "sequences at once", "attention")
    yield from _table(head, [_size_row(each) for each in found])
    yield f"  block size {chosen} is chosen; attention: of decoding rows, beside the measured size"
    yield ""


def size_data(found: Sequence[SizeOutcome]) -> list[dict[str, Any]]:
    """The block sizes that were tried, for JSON."""
    return [
        {"block_size": each.block_size, "obstacle": each.obstacle}
        if each.outcome is None
        else {
            "block_size": each.block_size,
            "saturation_requests_per_s": each.rate,
            "hit_tokens": each.outcome.hit_tokens,
            "most_rows": each.outcome.most_rows,
            "num_refused": each.num_refused,
            "num_preemptions": each.outcome.num_preemptions,
        }
        for each in found
    ]


def _size_row(each: SizeOutcome) -> tuple[str, ...]:
    if each.outcome is None or each.factors is None:
        return (str(each.block_size), f"not here: {each.obstacle}")
    outcome = each.outcome
    share = outcome.hit_tokens / outcome.query_tokens if outcome.query_tokens else 0.0
    return (
        str(each.block_size),
        f"{each.rate:.4g}/s" + (f", refuses {each.num_refused}" if each.num_refused else ""),
        f"{share:.1%}",
        str(outcome.most_rows),
        f"{each.factors.decode:.2f}x",
    )


def plan_data(plan: Plan, price: float | None) -> dict[str, Any]:
    """The plan for JSON. `price` is the price of a replica per hour, or None."""
    return {
        "model": plan.model or EMBEDDED,
        "load": {
            "name": plan.load.name,
            "num_requests": len(plan.load.requests),
            "num_left_out": plan.load.num_left_out,
            "requests_per_s": offered_rate(plan.load.requests),
        },
        "memory": [_memory_data(each) for each in plan.precisions],
        "expected": [_expectation_data(each, price) for each in plan.found],
        "best": None if plan.best is None else _expectation_data(plan.best, price),
        "why": plan.why,
        "doubt": None if plan.best is None else _doubt(plan, plan.best),
        "keeps_objectives": plan.best is not None and plan.best.keeps,
    }


def cost_of_tokens(found: Expectation, price: float) -> float:
    """The cost of a million generated tokens under this load, at `price` per replica and hour."""
    tokens_per_s = found.served.tokens_per_s
    return price / _HOUR_S / tokens_per_s * 1e6 if tokens_per_s else math.inf


def serve_words(plan: Plan, found: Expectation) -> str:
    """The command that serves a configuration."""
    words = ["quire", "serve", *([plan.model] if plan.model else [])]
    candidate = found.candidate
    options: dict[str, Any] = {**plan.given, **candidate.options}
    options["quantization"] = None if candidate.precision == OWN else candidate.precision
    options["kv_cache_dtype"] = None if candidate.kv_format == "auto" else candidate.kv_format
    return shlex.join(words + flag_words(EngineOptions, options))


def _load_line(load: Load) -> str:
    rate = offered_rate(load.requests)
    prompts = sum(len(each.prompt) for each in load.requests)
    outputs = sum(each.num_choices * each.num_output_tokens for each in load.requests)
    left = f", the first of {len(load.requests) + load.num_left_out:,}" if load.num_left_out else ""
    pace = "all at once" if rate is None else f"{rate:.3g} a second"
    return (
        f"{load.name}: {len(load.requests):,} requests{left}, {pace}, with {prompts:,} prompt and"
        f" {outputs:,} output tokens"
    )


def _memory_row(each: ServedPrecision, longest: int) -> tuple[str, ...]:
    if each.fit is None:
        return (each.name, each.kv_format, "-", "-", "-", "-", f"not here: {each.obstacle}")
    fit = each.fit
    return (
        each.name,
        each.kv_format,
        format_bytes(fit.weight_bytes),
        format_bytes(fit.kv_bytes),
        f"{fit.num_blocks:,} x {fit.block_size}",
        f"{fit.num_sequences(longest):,}",
        _steps(each),
    )


def _steps(each: ServedPrecision) -> str:
    if each.costs is None:
        return NOT_MEASURED
    accuracy = each.costs.accuracy
    return (
        f"measured; off by {accuracy.held_out:.1%} on {accuracy.num_held_out} others"
        f" (measured twice: {accuracy.repeated:.1%})"
    )


def _expectation_row(each: Expectation, price: float | None) -> tuple[str, ...]:
    candidate, numbers = each.candidate, as_numbers(each.served)
    options = candidate.options
    row: tuple[str, ...] = (
        candidate.precision,
        candidate.kv_format,
        str(options["max_num_seqs"]),
        f"{options['max_itl_ratio']:g}",
        str(each.replicas),
    )
    if each.lacking is not None:
        return (*row, f"{NOT_MEASURED}: {each.lacking}")
    names = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
    row += tuple(_time(numbers[name]) for name in names)
    row += (
        f"{each.replicas * numbers['output_tokens_per_s']:.4g}",
        f"{each.replicas * each.saturation_rate:.3g}/s",
        _verdict(each),
    )
    return row if price is None else (*row, f"{cost_of_tokens(each, price):.3g}")


def _best_lines(plan: Plan, price: float | None) -> Iterator[str]:
    best = plan.best
    if best is None:
        yield f"best: {NOT_MEASURED}"
        return
    if best.num_refused:
        yield (
            f"{best.num_refused} of {len(plan.load.requests)} requests fit into no configuration"
            " that was measured, and are refused"
        )
    if not best.is_in_time:
        yield "no configuration that was measured keeps the objectives; this one comes nearest"
    yield f"best: {serve_words(plan, best)}"
    if (doubt := _doubt(plan, best)) is not None:
        yield f"doubt: {doubt}"
    if best.replicas > 1:
        yield f"      on {best.replicas} machines like this one, each with a part of the load"
    yield f"why:  {plan.why}"
    if price is not None:
        hourly = best.replicas * price
        yield f"cost: {hourly:g} an hour, {cost_of_tokens(best, price):.3g} a million tokens"


def _doubt(plan: Plan, best: Expectation) -> str | None:
    """Why the best configuration may be another one; None if the step times are reliable."""
    name = (best.candidate.precision, best.candidate.kv_format)
    costs = next(each.costs for each in plan.precisions if (each.name, each.kv_format) == name)
    if costs is None or max(costs.accuracy.held_out, costs.accuracy.repeated) <= RELIABLE_ERROR:
        return None
    accuracy = costs.accuracy
    if accuracy.repeated > RELIABLE_ERROR:
        return (
            f"the same steps differed by {accuracy.repeated:.0%} when they were measured twice, so"
            " other programs disturbed the machine, and another configuration may be better;"
            " measure again while nothing else runs"
        )
    return (
        f"predicted step times are off by {accuracy.held_out:.0%} in the mean, so another"
        " configuration may be better; a longer --measure-time may help"
    )


def _verdict(found: Expectation) -> str:
    """The table's word for whether a candidate meets the objectives, or why not."""
    if found.keeps:
        return "yes"
    if found.num_refused:
        return f"refuses {found.num_refused}"
    return "saturated" if found.is_saturated else f"{found.excess:.2g}x"


def _memory_data(each: ServedPrecision) -> dict[str, Any]:
    data: dict[str, Any] = {"precision": each.name, "kv_format": each.kv_format}
    if each.fit is None:
        return data | {"obstacle": each.obstacle}
    fit = each.fit
    data |= {
        "weight_bytes": fit.weight_bytes,
        "kv_bytes": fit.kv_bytes,
        "num_blocks": fit.num_blocks,
        "block_size": fit.block_size,
        "max_model_len": fit.max_model_len,
    }
    if each.costs is None:
        return data | {"steps": NOT_MEASURED}
    accuracy = each.costs.accuracy
    return data | {"held_out_error": accuracy.held_out, "repeated_error": accuracy.repeated}


def _expectation_data(each: Expectation, price: float | None) -> dict[str, Any]:
    candidate = each.candidate
    data: dict[str, Any] = {
        "precision": candidate.precision,
        "kv_format": candidate.kv_format,
        **candidate.options,
        "replicas": each.replicas,
    }
    if each.lacking is not None:
        return data | {"expected": f"{NOT_MEASURED}: {each.lacking}"}
    numbers = {name: _finite(value) for name, value in as_numbers(each.served).items()}
    data |= {
        **numbers,
        "saturation_requests_per_s": each.saturation_rate,
        "is_saturated": each.is_saturated,
        "excess": each.excess,
        "num_refused": each.num_refused,
        "num_preemptions": each.served.num_preemptions,
        "hit_tokens": each.served.hit_tokens,
        "loaded_tokens": each.served.loaded_tokens,
    }
    if price is not None:
        data["cost_per_million_tokens"] = _finite(cost_of_tokens(each, price))
    return data


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a table. The last cell of a row may exceed its column's width."""
    widths = [
        max(len(row[column]) for row in (head, *rows) if column < len(row) - 1 or row is head)
        for column in range(len(head))
    ]
    for row in (head, *rows):
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        yield f"  {'  '.join(cells)}".rstrip()
