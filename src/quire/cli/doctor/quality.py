"""Reports the measured quality cost of number formats for a model.

For `quire doctor MODEL`; called by `model`. `quire bench perplexity` makes the measurements.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from quire.bench.quality.quality_file import MeasuredQuality
from quire.bench.quality.table import AS_STORED, NONE
from quire.formats.format_registry import WEIGHT_FORMATS
from quire.version import __version__

if TYPE_CHECKING:
    from quire.assembly.reports.model_report import ModelReport

AUTO = "auto"


def quality_lines(
    model: str, found: "ModelReport", results: Sequence[MeasuredQuality]
) -> Iterator[str]:
    """Yield a line for each measured combination, then how to measure the remaining weight formats.

    Yields nothing for a model that predicts no tokens.
    """
    if not found.generates:
        return
    yield ""
    for origin, group in groupby(sorted(results, key=_origin), key=_origin):
        yield origin
        for each in group:
            yield _line(each, found.dtype)
    served = {each.name for each in found.precisions if each.obstacle is None}
    measured = {each.quantization for each in results}
    if AS_STORED in served:
        if None not in measured:
            yield (
                f"  quality {AS_STORED} was not measured: `quire bench perplexity FILE --model"
                f" ORIGINAL --model {model}` compares it on a text with the model that it was made"
                " of"
            )
        return
    missing = [name for name in WEIGHT_FORMATS if name in served - measured]
    if missing:
        yield (
            f"  quality in {' and '.join(missing)} was not measured: `quire bench perplexity FILE"
            f" --model {model} --quantization {NONE} {' '.join(missing)}` does so on a text"
        )


def _origin(result: MeasuredQuality) -> str:
    version = "" if result.version == __version__ else f", quire {result.version}"
    return (
        f"  quality beside {result.reference}, measured on {result.texts}"
        f" ({result.num_tokens:,} tokens, {result.date}{version})"
    )


def _line(result: MeasuredQuality, own_dtype: str) -> str:
    is_auto = result.kv_cache_dtype == AUTO
    formats = [result.quantization or (AS_STORED if is_auto else "")]
    formats.append("" if is_auto else f"KV {result.kv_cache_dtype}")
    formats.append("" if result.dtype == own_dtype else f"in {result.dtype}")
    error = 100 * result.loss_change_error * (1 + result.change)
    return (
        f"    {' '.join(filter(None, formats)):<14}  perplexity {100 * result.change:+.2f}% ± "
        f"{error:.2f}, mean KLD {result.divergence:.4f}, "
        f"same top token {100 * result.agreement:.1f}%"
    )
