"""The benchmark in miniature: known answers come out, and drafts are accepted."""

from pathlib import Path

import pytest
from benchmarks.speculation.command import main
from benchmarks.speculation.replay import force
from benchmarks.speculation.sides import Comparison, Counts, Job, Side, compare

from quire import LLM
from quire.core.scheduling.pacing import ConstantPacer

PERIOD = [11, 12, 13, 14, 15, 16, 17, 18]


def make_side(speculation: str) -> Side:
    llm = LLM(
        max_model_len=128, max_num_seqs=4, num_threads=1, speculation=speculation, dtype="float32"
    )
    llm.engine.scheduler.pacer = ConstantPacer()  # drafts are made whatever they cost
    return Side(llm, force(llm))


@pytest.mark.usefixtures("native_engine")
def test_outputs_are_the_known_answers_with_drafts_and_without() -> None:
    plain, drafting = make_side("off"), make_side("ngram")
    jobs = [
        Job([number, *PERIOD, number], [*PERIOD, *PERIOD, number], 17, None) for number in (5, 6)
    ]
    for side in (plain, drafting):
        counts, token_ids = side.run(jobs)
        assert token_ids == [job.answer for job in jobs]
        assert counts.num_tokens == 2 * 16
    assert counts.num_accepted > 0 and counts.num_steps < 16
    found = compare(plain, drafting, [jobs], 2)
    assert [run.num_steps for run in found.plain] == [16, 16]
    assert 1 < found.tokens_a_step <= 8 and 0 < found.acceptance <= 1
    assert found.ratio > 0 and found.best_ratio > 0 and found.wall_ratio > 0


def test_ratios_are_medians_of_pairs() -> None:
    runs = [Counts(process_s=seconds, wall_s=2 * seconds, num_tokens=8) for seconds in (2, 6, 4)]
    half = [run._replace(process_s=1.0, wall_s=1.0, num_rows=4, num_drafts=5) for run in runs]
    found = Comparison(runs, half)
    assert (found.ratio, found.best_ratio, found.wall_ratio) == (4, 2, 8)
    assert (found.plain_rate, found.tokens_a_step, found.drafts_a_step) == (4, 2, 1.25)
    assert found.acceptance == 0


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("more", [[], ["--own-answers", "--workloads", "schema"]])
def test_the_command_prints_a_line_for_each_case(
    more: list[str], repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--repeats", "1", "--cases", "1", "--max-tokens", "16", "--streams", "1,2"]
    main([*small, "--workloads", "rewrite", "--repository", str(repository), *more])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("embedded model, none")
    name = "schema" if more else "rewrite"
    assert [line.split()[:2] for line in lines[2:-1]] == [[name, "1"], [name, "2"]]
