"""The memory benchmark's results, as a table for people and as JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory.meter import PARTS
from benchmarks.memory.sharing import Saved
from benchmarks.memory.study import Carried
from quire.errors import ConfigurationError

_LABEL, _COLUMN = 30, 18

# Kwon et al. (SOSP 2023). Figure 13 (a): requests in a batch, OPT-13B, 2 requests/s, 15,700 slots.
PUBLISHED_RUNNING = {
    "sharegpt": {
        "contiguous_max": 7.0,
        "contiguous_pow2": 9.8,
        "contiguous_oracle": 13.6,
        "paged": 30.4,
    }
}
# Section 6.3 and figure 15: (kind, width) -> share of blocks saved.
PUBLISHED_SAVED = {
    "alpaca": {
        ("parallel", 2): 0.0609,
        ("parallel", 4): 0.0853,
        ("parallel", 6): 0.0979,
        ("beams", 2): 0.3756,
        ("beams", 4): 0.5313,
        ("beams", 6): 0.5516,
    },
    "sharegpt": {
        ("parallel", 2): 0.162,
        ("parallel", 6): 0.305,
        ("beams", 2): 0.443,
        ("beams", 6): 0.663,
    },
}


@dataclass(frozen=True, slots=True)
class MemoryResults:
    """All that a run found.

    setting: what was run, on what: names -> values that JSON can hold. "shape" in it names the
        published figures that these are to be compared with, or is None.
    allocators: name -> its outcome. sharing: empty where it was not asked for.
    """

    setting: dict[str, Any]
    allocators: dict[str, Carried]
    sharing: Sequence[Saved]

    @property
    def published_running(self) -> dict[str, float]:
        return PUBLISHED_RUNNING.get(self.setting["shape"], {})

    @property
    def published_saved(self) -> dict[tuple[str, int], float]:
        return PUBLISHED_SAVED.get(self.setting["shape"], {})


def as_json(results: MemoryResults) -> dict[str, Any]:
    """The setting, then each allocator and each case of sharing, with the published figure."""
    return {
        **results.setting,
        "allocators": {
            name: {
                **asdict(outcome),
                "published_mean_running": results.published_running.get(name),
            }
            for name, outcome in results.allocators.items()
        },
        "sharing": [
            {
                **asdict(case),
                "published_share": results.published_saved.get((case.kind, case.width)),
            }
            for case in results.sharing
        ],
    }


def write_json(results: MemoryResults, path: Path) -> None:
    """Raises ConfigurationError where the file can't be written."""
    try:
        path.write_text(json.dumps(as_json(results), indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"the results can't be written to {str(path)!r} ({error.strerror})"
        ) from error


def table(results: MemoryResults) -> str:
    """The whole report, several lines."""
    lines = setting_lines(results.setting)
    if results.allocators:
        lines += ["", *_allocator_lines(results)]
    if results.sharing:
        lines += ["", *_sharing_lines(results)]
    return "\n".join(lines)


def setting_lines(setting: dict[str, Any]) -> list[str]:
    """The setting of the run, in two lines."""
    load, budget = setting["load"], setting["budget"]
    rate = load["requests_per_s"]
    when = "all at t=0" if rate is None else f"{rate:g} requests/s"
    num_blocks = budget["num_slots"] // budget["block_size"]
    return [
        f"{load['num_prompts']} requests, prompts of {load['input_mean']} and outputs of"
        f" {load['output_mean']} tokens on average, {when}; {setting['mode']}",
        f"{num_blocks} KV blocks of {budget['block_size']} ({budget['num_slots']} slots),"
        f" max_model_len {load['max_model_len']}, contiguous runs by {setting['placement']}",
    ]


def _allocator_lines(results: MemoryResults) -> list[str]:
    found = results.allocators
    uses = {name: outcome.use for name, outcome in found.items()}
    lines = [
        _line("", list(found)),
        _line("requests running, mean", [f"{use.mean_running:.1f}" for use in uses.values()]),
    ]
    if results.published_running:
        published = [results.published_running.get(name) for name in found]
        lines.append(_line("  published", ["-" if n is None else f"{n:.1f}" for n in published]))
    lines += [
        _line("requests running, most", [str(use.most_running) for use in uses.values()]),
        _line("output tokens/s", [f"{use.output_tokens_per_s:.0f}" for use in uses.values()]),
        _line("requests/s", [f"{use.requests_per_s:.2f}" for use in uses.values()]),
        _line(
            "s per output token", [f"{outcome.seconds_per_token:.3f}" for outcome in found.values()]
        ),
        _line("  p99", [f"{outcome.p99_seconds_per_token:.3f}" for outcome in found.values()]),
        _line("duration s", [f"{outcome.duration_s:.0f}" for outcome in found.values()]),
        _line("preemptions", [str(outcome.num_preemptions) for outcome in found.values()]),
        _line(
            "recomputed tokens", [str(outcome.num_recomputed_tokens) for outcome in found.values()]
        ),
        _line("useful of what is held", [f"{use.useful_share:.1%}" for use in uses.values()]),
        "of all slots",
    ]
    lines += [
        _line(f"  {part}", [f"{use.shares[part]:.1%}" for use in uses.values()]) for part in PARTS
    ]
    for name, use in uses.items():
        if not use.is_steady:
            lines.append(
                f"{name}: no request ever waited, so the averages are over the whole run; raise"
                " request_rate or num_prompts to fill the memory"
            )
    return lines


def _sharing_lines(results: MemoryResults) -> list[str]:
    model = results.setting["sharing_model"]
    lines = [f"KV blocks saved by sharing, of those without (published); beams on {model}"]
    for case in results.sharing:
        published = results.published_saved.get((case.kind, case.width))
        beside = "" if published is None else f" ({published:.1%})"
        lines.append(
            f"  {case.kind} {case.width}: {case.share:.1%}{beside}, {case.num_requests} requests"
        )
    return lines


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_LABEL}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)
