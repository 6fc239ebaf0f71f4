"""Reports the measured quality cost of number formats for a model.

For `quire doctor MODEL`; called by `model`. `quire bench perplexity` makes the measurements.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from quire.bench.quality.kept_quality import KeptQuality
from quire.bench.quality.table import AS_STORED, NONE
from quire.formats.registry import weight_format_names
from quire.version import __version__

if TYPE_CHECKING:
    from quire.assembly.reports.model_report import ModelReport

AUTO = "auto"


def quality_lines(model: str, found: "ModelReport", kept: Sequence[KeptQuality]) -> Iterator[str]:
    """A line for each measured combination, then how to measure the remaining weight formats.

    A model that predicts no tokens gets no lines.
    """
    if not found.generates:
        return
    yield ""
    for origin, group in groupby(sorted(kept, key=_origin), key=_origin):
        yield origin
        for each in group:
            yield _line(each, found.dtype)
    served = {each.name for each in found.precisions if each.obstacle is None}
    measured = {each.quantization for each in kept}
    if AS_STORED in served:
        if None not in measured:
            yield (
                f"  quality {AS_STORED} was not measured: `quire bench perplexity FILE --model"
                f" ORIGINAL --model {model}` compares it on a text with the model that it was made"
                " of"
            )
        return
    missing = [name for name in weight_format_names() if name in served - measured]
    if missing:
        yield (
            f"  quality in {' and '.join(missing)} was not measured: `quire bench perplexity FILE"
            f" --model {model} --quantization {NONE} {' '.join(missing)}` does so on a text"
        )


def _origin(kept: KeptQuality) -> str:
    version = "" if kept.version == __version__ else f", quire {kept.version}"
    return (
        f"  quality beside {kept.reference}, measured on {kept.texts}"
        f" ({kept.num_tokens:,} tokens, {kept.date}{version})"
    )


def _line(kept: KeptQuality, own_dtype: str) -> str:
    is_auto = kept.kv_cache_dtype == AUTO
    formats = [kept.quantization or (AS_STORED if is_auto else "")]
    formats.append("" if is_auto else f"KV {kept.kv_cache_dtype}")
    formats.append("" if kept.dtype == own_dtype else f"in {kept.dtype}")
    error = 100 * kept.loss_change_error * (1 + kept.change)
    return (
        f"    {' '.join(filter(None, formats)):<14}  perplexity {100 * kept.change:+.2f}% ± "
        f"{error:.2f}, mean KLD {kept.divergence:.4f}, same top token {100 * kept.agreement:.1f}%"
    )
