"""The command as a user runs it: what it prints, how it ends, how fast it is there."""

import io
import logging
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import quire
from quire.cli import main as cli
from quire.core.sampling_params import SamplingDefaults
from quire.core.scheduling.options import SERVED_COSTS_FILE
from quire.engine_client.process import early_process as early_module
from quire.errors import CheckpointError
from quire.server.config import ServerConfig
from quire.server.http import open_files
from quire.version import __version__

QUESTION = "What does os.path.join do?"
ANSWER = "`os.path.join(a, *p)`\n\nJoin two or more pathname components"

Capture = pytest.CaptureFixture[str]


LOOP = [sys.executable, "-c", "sum(i * i for i in range(1_500_000))"]
"""Takes 0.1 to 0.2 s of processor time on a core of 2021, by the load of the machine."""


def _loops(command: list[str]) -> float:
    """The processor time of a command, as a multiple of LOOP's.

    Each is the least of five runs, in turns: other programs on the machine lengthen both.
    """

    def run_s(command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    times = [(run_s(command), run_s(LOOP)) for _ in range(5)]
    return min(each for each, _ in times) / min(each for _, each in times)


# ---- light start ----------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize(
    ("words", "limit"), [(["--version"], 1.0), (["--help"], 3.0), (["serve", "--help"], 3.0)]
)
def test_version_and_help_are_there_at_once(words: list[str], limit: float) -> None:
    assert _loops([sys.executable, "-m", "quire", *words]) < limit


@pytest.mark.alone
def test_importing_quire_is_light() -> None:
    code = (
        "import sys, time; before = time.process_time(); import quire\n"
        "print(time.process_time() - before); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, check=True, capture_output=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.05


def test_the_version_is_written_once() -> None:
    command = [sys.executable, "-m", "quire", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"quire {__version__}\n"
    assert quire.__version__ == __version__


def test_the_version_tells_what_computes_if_asked(capsys: Capture) -> None:
    assert cli.main(["--version", "-v"]) == 0
    version, below, kernels = capsys.readouterr().out.splitlines()
    assert version == f"quire {__version__}"
    assert "torch" in below
    assert kernels.startswith("kernels: ")


def test_quire_alone_prints_its_help(capsys: Capture) -> None:
    assert cli.main([]) == 0
    assert "pull" in capsys.readouterr().out


def test_verbose_is_for_the_version_alone(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["-v", "generate", "x"])
    assert caught.value.code == 2
    assert "-v goes with --version" in capsys.readouterr().err


def test_every_exported_name_can_be_imported() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
        assert name in dir(quire)
    with pytest.raises(AttributeError, match="quire has no Llm"):
        quire.Llm  # noqa: B018 - the access is the test


@pytest.fixture(autouse=True)
def _quiet_logger() -> Iterator[None]:
    """The command sets logging up for its process; here that is the process of all tests."""
    logger = logging.getLogger("quire")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


# ---- in this process, with a model that is made up --------------------------------------------


class FakeLLM:
    """Takes options, streams the prompt back in two pieces."""

    made_with: dict[str, object]
    engine = SimpleNamespace(
        limits=SimpleNamespace(defaults=SamplingDefaults()),
        stats=lambda: SimpleNamespace(num_generated_tokens=2),
    )

    def __init__(self, **options: object) -> None:
        FakeLLM.made_with = options

    def stream(self, prompt: str, params: object) -> Iterator[str]:
        yield f"{prompt}:"
        yield f"{getattr(params, 'max_tokens', None)}"

    def stream_chat(self, messages: list[dict[str, str]], params: object) -> Iterator[str]:
        yield from self.stream(messages[-1]["content"], params)


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setitem(sys.modules, "quire.offline.llm", SimpleNamespace(LLM=FakeLLM))
    return FakeLLM


def test_generate_without_a_text_is_wrong_usage(fake_llm: type, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate"])
    assert stop.value.code == 2
    assert "the following arguments are required: PROMPT" in capsys.readouterr().err


def test_generate_takes_no_model_for_a_text(
    fake_llm: type, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", str(tmp_path), "a text"])
    assert stop.value.code == 2
    assert f"{tmp_path} is a model; write --model {tmp_path}" in capsys.readouterr().err
    assert cli.main(["generate", "-p", str(tmp_path)]) == 0, "-p always takes a text"


def test_generate_streams_the_text_and_nothing_else(fake_llm: type, capsys: Capture) -> None:
    assert cli.main(["generate", "one", "--max-tokens", "7", "--max-model-len", "64"]) == 0
    assert capsys.readouterr().out == "one:7\n"
    assert FakeLLM.made_with == {"max_model_len": 64}


def test_several_prompts_are_told_apart(fake_llm: type, capsys: Capture) -> None:
    assert cli.main(["generate", "one", "-p", "two"]) == 0
    assert capsys.readouterr().out == "==> one <==\none:128\n\n==> two <==\ntwo:128\n"


def test_a_dash_reads_standard_input(
    fake_llm: type, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.read", lambda: "from a pipe", raising=False)
    assert cli.main(["generate", "-"]) == 0
    assert capsys.readouterr().out == "from a pipe:128\n"


def test_bad_sampling_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "quire.offline.llm", None)  # an import of it would fail
    assert cli.main(["generate", "x", "--temperature", "101"]) == 1
    assert capsys.readouterr().err == (
        "quire: error: --temperature is 101.0, but must be at least 0 and at most 100\n"
    )


def _refuse(**options: object) -> None:
    raise CheckpointError("there is no model here")


def test_an_error_is_one_sentence_unless_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "quire.offline.llm", SimpleNamespace(LLM=_refuse))
    assert cli.main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "quire: error: there is no model here\n"
    with pytest.raises(CheckpointError):
        cli.main(["generate", "x", "--debug"])
    monkeypatch.setenv("QUIRE_DEBUG", "0")
    assert cli.main(["generate", "x"]) == 1
    monkeypatch.setenv("QUIRE_DEBUG", "1")
    with pytest.raises(CheckpointError):
        cli.main(["generate", "x"])


def test_a_bad_log_level_is_refused(
    fake_llm: type, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "loud")
    assert cli.main(["generate", "x"]) == 1
    assert "the log level is 'loud', but must be one of debug" in capsys.readouterr().err


def test_ctrl_c_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupt(**options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "quire.offline.llm", SimpleNamespace(LLM=interrupt))
    for words in (["generate", "x"], ["chat"]):
        assert cli.main(words) == 130
        assert capsys.readouterr().err == "\nquire: interrupted while the model was loading\n"


def test_ctrl_c_while_a_server_or_a_benchmark_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.server.launch.serve", interrupt)
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == "\nquire: interrupted while the model was loading\n"
    monkeypatch.setattr("quire.bench.throughput.main", interrupt)
    assert cli.main(["bench", "throughput"]) == 130
    assert capsys.readouterr().err == f"\n{cli.BENCH_INTERRUPTED}\n"
    monkeypatch.setattr(cli, "_benchmarks", interrupt)  # while torch is imported
    assert cli.main(["bench", "throughput"]) == 130
    assert capsys.readouterr().err == f"\n{cli.BENCH_INTERRUPTED}\n"


@pytest.mark.parametrize("command", ["generate x", "chat", "serve", "doctor", "bench throughput"])
def test_too_little_address_space_is_a_sentence(command: str) -> None:
    words = f"ulimit -v 700000; exec {sys.executable} -m quire {command}"
    run = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("quire: error: the address space of this process is limited to")
    assert "`ulimit -v unlimited`" in run.stderr and run.stderr.count("\n") == 1


Handed = list[tuple[dict[str, object], ServerConfig]]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    """What reached the server, which ends with the number of its start as exit code."""
    seen: Handed = []

    def serve(
        options: dict[str, object], server: ServerConfig, models: object, early: object
    ) -> int:
        assert (models, early) == (None, None if server.replicas > 1 else early_process)
        seen.append((options, server))
        return len(seen)

    early_process = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(early_module, "EarlyProcess", lambda: early_process)
    monkeypatch.setitem(sys.modules, "quire.server.launch", SimpleNamespace(serve=serve))
    for name in ("QUIRE_API_KEYS", "QUIRE_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_the_engine_process_starts_first_and_inherits_the_limit_of_open_files(
    handed: Handed, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    start = early_module.EarlyProcess
    monkeypatch.setattr(early_module, "EarlyProcess", lambda: calls.append("start") or start())
    monkeypatch.setattr(open_files, "raise_open_files", lambda: calls.append("raise the limit"))
    assert cli.main(["serve"]) == 1
    assert calls == ["raise the limit", "start"]
    assert cli.main(["serve", "--replicas", "2"]) == 2
    assert len(calls) == 2, "a fleet starts its processes itself"


def test_serve_hands_its_options_to_the_server(handed: Handed) -> None:
    assert cli.main(["serve"]) == 1
    words = "serve org/model --host 0.0.0.0 --port 81 --served-model-name m --seed 4 --num-blocks 9"
    more = ["--max-itl-ratio", "0", "--disable-log-stats", "--max-body-bytes", "2KiB"]
    assert cli.main([*words.split(), *more]) == 2
    assert handed == [
        (
            {
                "max_itl_ratio": 2.7,
                "start_costs": SERVED_COSTS_FILE,
                "disable_log_stats": False,
            },
            ServerConfig(),
        ),
        (
            {
                "model": "org/model",
                "num_blocks": 9,
                "max_itl_ratio": 0.0,
                "start_costs": SERVED_COSTS_FILE,
                "seed": 4,
                "disable_log_stats": True,
            },
            ServerConfig(host="0.0.0.0", port=81, served_model_name=("m",), max_body_bytes=2048),
        ),
    ]


def test_keys_come_from_the_environment_too(
    handed: Handed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "alice:alice-key, bob:bob-key-1\ncarol-key-1")
    cli.main(["serve", "--api-key", "dave:dave-key"])
    keys = ("alice:alice-key", "bob:bob-key-1", "carol-key-1", "dave:dave-key")
    assert handed[0][1].api_keys == keys


def test_the_flag_wins_over_the_environments_log_level(
    handed: Handed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "ERROR")
    cli.main(["serve"])
    assert logging.getLogger("quire").level == logging.ERROR
    cli.main(["serve", "--log-level", "debug"])
    assert logging.getLogger("quire").level == logging.DEBUG
    assert [server.log_level for _, server in handed] == ["error", "debug"]


@pytest.mark.parametrize("text", ["", " , \n"])
def test_keys_that_are_missing_open_no_server(
    text: str, handed: Handed, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", text)
    assert cli.main(["serve", "--api-key", "dave:dave-key"]) == 1
    assert "QUIRE_API_KEYS is set, but has no key in it" in capsys.readouterr().err
    assert handed == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("serve --port 70000", "--port is 70000, but must be from 0"),
        ("serve --log-format xml", "--log-format is 'xml', but must be one of text, json"),
        ("serve --max-body-bytes big", "--max-body-bytes is 'big', but must be a number of bytes"),
        ("serve --keep-alive-s 0", "--keep-alive-s is 0, but must be above 0"),
    ],
)
def test_a_server_that_cannot_be_is_refused_in_one_line(
    words: str, expected: str, handed: Handed, capsys: Capture
) -> None:
    assert cli.main(words.split()) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"quire: error: {expected}") and printed.count("\n") == 1
    assert handed == []


def test_doctor_has_the_exit_code_of_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def examine(port: int, measure: bool) -> int:
        calls.append((port, measure))
        return len(calls) - 1

    monkeypatch.setitem(sys.modules, "quire.cli.doctor.findings", SimpleNamespace(examine=examine))
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--port", "81", "--no-measure"]) == 1
    assert calls == [(8000, True), (81, False)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_knows_commands_and_flags(shell: str, capsys: Capture) -> None:
    assert cli.main(["--print-completion", shell]) == 0
    printed = capsys.readouterr().out
    for word in ("serve", "doctor", "max-model-len", "max-tenant-requests"):
        assert word in printed, word


@pytest.mark.parametrize("name", ["throughput", "perplexity"])
def test_bench_hands_its_words_to_the_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--num-prompts", type=int),
        main=lambda args: args.num_prompts,
    )
    homes = {"perplexity": "quality.perplexity"}
    package, _, module = f"quire.bench.{homes.get(name, name)}".rpartition(".")
    monkeypatch.setitem(sys.modules, f"{package}.{module}", benchmark)
    monkeypatch.setattr(f"{package}.{module}", benchmark, raising=False)
    assert cli.main(["bench", name, "--num-prompts", "3"]) == 3


# ---- with the embedded model ---------------------------------------------------------------------


def test_one_question_is_answered_by_the_embedded_model(
    kernel_flags: list[str], capsys: Capture
) -> None:
    assert cli.main(["chat", "--prompt", QUESTION, *kernel_flags]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(ANSWER)


def _chat(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert cli.main(["chat", *words]) == 0


def test_a_session_over_a_pipe(
    kernel_flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lines = f"{QUESTION}\n/reset\n{QUESTION}\n/exit\nmore\n"
    _chat(monkeypatch, lines, "--max-tokens", "8", *kernel_flags)
    out, err = capsys.readouterr()
    first, second = out.split("The conversation is forgotten.\n")
    assert err == "" and first == second
    assert ANSWER.startswith(first.rstrip("\n"))


def test_a_conversation_that_no_longer_fits_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _chat(monkeypatch, f"{QUESTION}\n{QUESTION}\n/reset\nHello!\n", "--max-model-len", "32")
    out, err = capsys.readouterr()
    assert err.count("no longer fits") == 1 and "--max-model-len" in err
    assert "Type /reset" in err
    assert out.count("\n") >= 3


def test_missing_model_is_named(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["generate", "x", "--model", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("quire: error: ")
    assert "nothing" in err
    assert err.count("\n") == 1


# ---- as a process --------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_in_one_line(kernel_flags: list[str]) -> None:
    words = ["generate", "x", "--max-tokens", "2", *kernel_flags]
    command = [sys.executable, "-m", "quire", *words]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert run.returncode == 1
    assert run.stderr.startswith("quire: error: ") and run.stderr.count("\n") == 1


@pytest.fixture
def generating(kernel_flags: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A long generation whose first character has come."""
    # The process that starts the tests may ignore SIGINT (a shell's job in the background), and
    # processes inherit that.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from quire.cli.main import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", program, "generate", "import os", "--max-tokens", "3000"]
    words += kernel_flags
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        yield process
        process.kill()


def test_ctrl_c_ends_a_generation(generating: subprocess.Popen[str]) -> None:
    generating.send_signal(signal.SIGINT)
    _, errors = generating.communicate(timeout=30)
    assert (generating.returncode, errors) == (130, "")


def test_a_reader_that_goes_away_is_no_error(generating: subprocess.Popen[str]) -> None:
    assert generating.stdout is not None
    assert generating.stderr is not None
    generating.stdout.close()
    assert generating.stderr.read() == ""
    assert generating.wait(timeout=30) == 1


def test_a_batch_has_its_answers_beside_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[Path] = []

    def run_batch(options: object, server: object, job: SimpleNamespace) -> int:
        outputs.append(job.output)
        return 0

    monkeypatch.setattr("quire.server.batch.run.run_batch", run_batch)
    assert cli.main(["batch", "a/calls.jsonl"]) == 0
    assert cli.main(["batch", "-i", "a/calls.jsonl", "-o", "b.jsonl"]) == 0
    assert outputs == [Path("a/calls_output.jsonl"), Path("b.jsonl")]
