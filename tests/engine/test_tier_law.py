"""Nothing that happens in a tier changes a token, nor a log-probability, by a bit.

Each kind of memory with one number format, chunk and size of blocks, which take turns; all
combinations are in `tier_law`.
"""

from pathlib import Path

import pytest
from tests.engine.tier_law import BLOCK_SIZES, CHUNKS, FORMATS, KINDS, Case, answers_alone, run_case
from tests.runtime.hybrid_family import registered, save_hybrid


@pytest.mark.parametrize(("place", "kind"), list(enumerate(KINDS)), ids=lambda value: str(value))
def test_nothing_that_happens_in_a_tier_changes_a_token(
    place: int, kind: str, tmp_path: Path
) -> None:
    number_format = list(FORMATS)[(place + 2) % 3]
    # Of larger blocks hardly a sequence is preempted in the first three.
    block_size = BLOCK_SIZES[(0, 0, 0, 1, 2, 2)[place]]
    case = Case(kind, number_format, CHUNKS[(place + place // 3) % 3], block_size)
    with registered():
        folder = save_hybrid(tmp_path, layer_types=KINDS[kind])
        alone = answers_alone(folder, number_format)
        if alone is None:
            pytest.skip("torch's products have other bits in other steps")
        # A busy machine loads contents late, and its sequences may then run one after the other.
        for _ in range(3):
            counts = run_case(folder, case, alone, tmp_path)
            num_preempted = counts.pop("preempted")
            assert counts.total() == 9
            # With all kinds of layers, a row's first blocks have room for all of its tokens.
            if num_preempted or kind == "all kinds":
                break
        else:
            pytest.fail("no sequence was preempted in three runs")
