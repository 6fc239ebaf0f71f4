"""All checks of kernels, in processes side by side: most of their time is compiling.

On a machine that has not compiled them before, the kernels of all checks take one processor some
five minutes. A check knows nothing of the others, so each runs wherever a process is idle, and this
process adds their rows in order. A miniature runs them here, one after the other.
"""

import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import TimeoutError, get_context
from pathlib import Path

import torch

from benchmarks.gpu import adapters, attention, block_quantized, kernels, states
from benchmarks.gpu.harness import Bench, Row

MOST_PROCESSES = 14
"""Each holds half a GiB of the device for its context."""

LEAST_LEFT_S = 10.0
"""Of the section, when what is not done is given up, so that the rest is reported."""


@dataclass(frozen=True, slots=True)
class Check:
    """run: adds rows. case: set instead, of attention: one number, of which rows say the worst."""

    name: str
    run: Callable[[Bench], None] | None = None
    case: attention.Case | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a check. value: the result of a case. error: the error that it raised, or
    ""."""

    check: Check
    rows: list[Row]
    value: float | None
    error: str


def all_checks(bench: Bench) -> list[Check]:
    """All checks; those that take longest come first."""
    dtypes = kernels.dtypes(bench)
    others = {"states": states.check_states, "adapters": adapters.check_adapters}
    found = [
        Check(f"{name}, {str(dtype)[6:]}", partial(run, dtype=dtype))
        for name, run in {**kernels.BY_DTYPE, **others}.items()
        for dtype in dtypes
    ]
    found += [Check(name, run) for name, run in kernels.ONCE.items()]
    found += [
        Check(
            f"codes: {block_format.name}",
            partial(block_quantized.check_block_format, block_format=block_format),
        )
        for block_format in block_quantized.BLOCK_FORMATS[: 1 if bench.small else None]
    ]
    found.append(Check("codes: fp8", block_quantized.check_float8))
    return found + [Check(f"attention: {case.name}", case=case) for case in attention.cases(bench)]


def check_kernels(bench: Bench) -> None:
    """Run all checks. A check that raises an error becomes a failed row."""
    worst, checks, num_done = attention.Worst(), all_checks(bench), 0
    for one in spread(bench, checks):
        num_done += 1
        for row in one.rows:
            bench.add_row(replace(row, section=bench.section))
        if one.error:
            bench.check(one.check.name, False, one.error)
        elif one.check.case is not None and one.value is not None:
            worst.add(one.check.case, one.value)
    if num_done < len(checks):
        bench.check("all checks", False, f"no time left from {checks[num_done].name} on")
    worst.report(bench)


def spread(bench: Bench, checks: Sequence[Check]) -> Iterator[Done]:
    """In the order of the checks; ends early where time does."""
    if bench.small:
        yield from (carry_out(bench, check) for check in checks)
        return
    num_processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(checks))
    alone = Bench(bench.section, bench.folder, Path(os.devnull), deadline_s=bench.deadline_s)
    with get_context("spawn").Pool(num_processes) as pool:
        found = pool.imap(partial(carry_out, alone), checks)
        for _ in checks:
            try:
                yield found.next(max(0.0, bench.left_s - LEAST_LEFT_S))
            except TimeoutError:
                return


def carry_out(bench: Bench, check: Check) -> Done:
    """In whatever process. Says nothing and leaves `bench` without rows: they are returned."""
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    quiet = replace(bench, out=Path(os.devnull), rows=[])
    value, error = None, ""
    try:
        with redirect_stdout(io.StringIO()):
            if check.case is not None:
                value = attention.attention_error(quiet, check.case)
            elif check.run is not None:
                check.run(quiet)
    except Exception as raised:  # the next check has nothing to do with this one
        error = f"{type(raised).__name__}: {raised}"
    return Done(check, quiet.rows, value, error)
