"""The claims that parallel samples and beams share memory, counted by `bench.memory.sharing`."""

from collections.abc import Sequence
from typing import Any

from benchmarks.claims.claim import COMMAND, Claim, Setting, StudyResult
from benchmarks.memory.load import SHAPES, MemoryLoad
from benchmarks.memory.results import PUBLISHED_SAVED
from benchmarks.memory.sharing import BEAMS, PARALLEL, Saved, Sharing, share

SOURCE = "Kwon et al., PagedAttention, SOSP 2023, section 6.3, figure 15"
SHAPE = "alpaca"
WIDTHS = (2, 4, 6)
NUM_PROMPTS = 16
NAMES = {PARALLEL: "Parallel samples", BEAMS: "Beam search"}


def study_branches(setting: Setting) -> StudyResult:
    """The share of blocks that branches save, for the paper's shorter lengths."""
    shape = SHAPES[SHAPE]
    options: dict[str, Any] = {"speculation": "off"}
    options |= {} if setting.model is None else {"model": setting.model}
    spec = Sharing(
        MemoryLoad(input_mean=shape.input_mean, output_mean=shape.output_mean),
        branches=WIDTHS[:1] if setting.is_quick else WIDTHS,
        num_prompts=2 if setting.is_quick else NUM_PROMPTS,
        only_model=setting.is_quick,
        options=options,
    )
    found = list(share(spec))
    notes = (
        f"Prompts have {shape.input_mean} and outputs {shape.output_mean} tokens on average,"
        " without other load. At each step two numbers of blocks are counted: those held, and"
        " those that the same tables would hold without sharing. The savings of parallel samples"
        " follow from the lengths alone, over 600 simulated requests. The lives of beams depend"
        f" on a model's probabilities: these are {spec.num_prompts} requests of real text on"
        f" {setting.model or 'the embedded model'}. A line holds if every width saves at least"
        " nine tenths of the published figure, since lengths and models differ.",
    )
    claims = tuple(_claim(kind, [case for case in found if case.kind == kind]) for kind in NAMES)
    return StudyResult("Branches share memory", claims, notes)


def _claim(kind: str, cases: Sequence[Saved]) -> Claim:
    published = {case.width: PUBLISHED_SAVED[SHAPE][(kind, case.width)] for case in cases}
    saved = ", ".join(f"{case.share:.1%} ({case.width})" for case in cases)
    promised = ", ".join(f"{share:.1%} ({width})" for width, share in published.items())
    mean = sum(case.share for case in cases) / len(cases)
    return Claim(
        f"{NAMES[kind]}: blocks saved by sharing {promised} branches",
        SOURCE,
        f"{saved} saved: {1 - mean:.2f} of the blocks on average",
        "0% saved: all blocks (the same tables without sharing, counted in the same run)",
        1 - mean,
        all(case.share >= 0.9 * published[case.width] for case in cases),
        f"{COMMAND} sharing; python -m benchmarks.memory --lengths {SHAPE}",
    )
