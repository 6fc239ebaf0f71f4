"""The command line: a report, or the command that replays the failure."""

import pytest

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.simulation.__main__ import main, replay_command
from quire.simulation.simulator import run
from quire.simulation.workload import SimulationConfig
from quire.simulation.worlds import draw_draft_world, draw_hybrid_world, draw_world


def test_it_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "4", "--num-requests", "10", "--overlap", "1"]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["seed"] == "4"
    assert printed["num_requests"] == "10"
    assert len(printed["digest"]) == 32
    assert int(printed["steps_per_s"]) > 0


def test_help_explains_options_with_the_comments_of_their_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--nan-rate NAN_RATE The share of requests that fail" in shown
    assert "--seed SEED (default: 0)" in shown
    assert "block size; 0 means the KV memory's default. (default: 0)" in shown


def test_a_failure_prints_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCacheManager, "end_step", lambda self, step_id, **_: None)
    words = ["--seed", "4", "--overlap", "1", "--prompt-tokens", "2,9", "--num-blocks", "20"]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "seed 4, after " in error
    command = error.splitlines()[-1]
    assert command == (
        "replay: python -m quire.simulation"
        " --seed 4 --num-blocks 20 --prompt-tokens 2,9 --overlap 1"
    )
    assert main(command.split()[4:]) == 1
    assert capsys.readouterr().err == error


def test_everything_runs_worlds_and_adds_them_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--everything", "--seed", "2", "--num-steps", "30", "--check-every", "5"]
    assert main(words) == 0
    out, error = capsys.readouterr()
    printed = dict(line.split(maxsplit=1) for line in out.splitlines() if len(line.split()) > 1)
    expected = run(draw_world(2, 0, 30, 5))
    assert printed["num_steps"] == str(expected.num_steps)
    assert printed["finished"] == str(dict(sorted(expected.finished.items())))
    assert error == f"world 1: {expected.num_steps} steps\n"


def test_a_failure_in_one_world_is_replayed_without_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCacheManager, "end_step", lambda self, step_id, **_: None)
    assert main(["--everything", "--seed", "2", "--num-steps", "300"]) == 1
    error, command = capsys.readouterr().err.splitlines()[-2:]
    assert main(command.split()[4:]) == 1
    assert capsys.readouterr().err.splitlines()[-2:] == [error, command]


def test_a_pool_without_room_for_any_request_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else none would ever be computed, and the simulation never end."""
    words = ["--kinds", "full,state:40", "--num-blocks", "80", "--num-steps", "5"]
    assert main(words) == 2
    assert "the shortest request takes 82 blocks of full,state:40" in capsys.readouterr().err
    assert main([*words, "--num-blocks", "82"]) == 0


def test_options_that_everything_draws_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--everything", "--num-steps", "5", "--overlap", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: overlap is 1, but --everything draws it from the seed; leave one of them out\n"
    )


def test_a_bad_option_is_refused_with_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--overlap", "3"]) == 2
    assert capsys.readouterr().err == "error: overlap is 3, but must be 0 or 1\n"


@pytest.mark.parametrize("words", [["--unknown", "1"], ["--enable-prefix-caching", "maybe"]])
def test_words_that_it_does_not_know_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_the_replay_command_names_only_what_differs_from_the_defaults() -> None:
    assert replay_command(SimulationConfig()) == "python -m quire.simulation --seed 0"
    config = SimulationConfig(seed=2, num_steps=9, enable_prefix_caching=False, arrivals="bursts")
    assert replay_command(config) == (
        "python -m quire.simulation --seed 2 --num-steps 9 --enable-prefix-caching False"
        " --arrivals bursts"
    )


def test_a_policys_options_an_order_and_the_steps_cost_can_be_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--policy", "priority", "--policy-options", "ageing_s=2.5", "--eviction", "lru"]
    words += ["--step-base-s", "0.002", "--step-token-s", "1e-05", "--num-requests", "8"]
    assert main(words) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["latencies_s"].startswith("p50 ")
    config = SimulationConfig(
        policy="priority", policy_options=(("ageing_s", 2.5),), eviction="lru"
    )
    assert replay_command(config).endswith(
        "--policy priority --policy-options ageing_s=2.5 --eviction lru"
    )
    slow = run(SimulationConfig(num_requests=8, arrivals="at_once"))
    fast = run(SimulationConfig(num_requests=8, arrivals="at_once", step_base_s=0.001))
    assert 0 < fast.virtual_s < slow.virtual_s


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policy fcfs --policy-options ageing_s=2", "'fcfs' has no option 'ageing_s'"),
        ("--eviction fifo", "eviction order is 'fifo', but must be one of "),
        ("--step-token-s 0", "step_token_s is 0.0, but must be above 0"),
    ],
)
def test_invalid_simulation_options_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_policy_options_are_names_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--policy", "priority", "--policy-options", "ageing_s=soon"])
    assert "'ageing_s=soon' must be NAME=NUMBER,NAME=NUMBER" in capsys.readouterr().err


def test_kinds_of_groups_and_worlds_of_them_can_be_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--kinds", "full,window:6,latent,state:3", "--num-requests", "8", "--num-blocks", "99"]
    assert main(words) == 0
    config = SimulationConfig(kinds="full,window:6,latent,state:3", num_requests=8, num_blocks=99)
    out = capsys.readouterr().out
    assert run(config).digest in out
    assert " --kinds full,window:6,latent,state:3" in replay_command(config)
    assert main(["--hybrids", "--seed", "2", "--num-steps", "30"]) == 0
    out, error = capsys.readouterr()
    world = draw_hybrid_world(2, 0, 30, 1)
    assert error == f"world 1: {run(world).num_steps} steps\n"
    assert main(["--drafts", "--seed", "2", "--num-steps", "30", "--check-every", "5"]) == 0
    out, error = capsys.readouterr()
    report = run(draw_draft_world(2, 0, 30, 5))
    assert error == f"world 1: {report.num_steps} steps\n" and report.num_drafts > 0
