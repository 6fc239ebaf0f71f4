"""The chat: history, commands, Ctrl-C and errors, on answers that are given to it."""

import json
import readline
import signal
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.cli.chat import session
from quire.cli.chat.answers import AnswerUsage, Message
from quire.cli.chat.session import ChatSession, interruptible, load_readline
from quire.cli.chat.terminal import Piece
from quire.core.sampling_params import SamplingParams
from quire.errors import InvalidRequestError, PromptTooLongError

Capture = pytest.CaptureFixture[str]


class Echo:
    """Answers with the last question, word by word; remembers what it was asked and how it ended.

    interrupt_after: raises Ctrl-C while the so many-th word is out.
    """

    name = "echo"

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.asked: list[list[Message]] = []
        self.params: list[SamplingParams] = []
        self.closed = 0
        self.usage: AnswerUsage | None = None
        self._interrupt_after = interrupt_after

    def stream(self, messages: list[Message], params: SamplingParams) -> Iterator[Piece]:
        self.asked.append(messages)
        self.params.append(params)
        words = messages[-1]["content"].split()
        try:
            for index, word in enumerate(words, 1):
                if index == self._interrupt_after:
                    signal.raise_signal(signal.SIGINT)
                yield Piece(f"{word} ")
        finally:
            self.closed += 1
            self.usage = AnswerUsage(len(words), 0.25, 2.25)

    def with_defaults(self, params: SamplingParams) -> SamplingParams:
        return params if self.name == "echo" else replace(params, min_p=0.5)

    def switch(self, name: str) -> None:
        if name == "none":
            raise InvalidRequestError("there is no model 'none'")
        self.name = name


def _type(monkeypatch: pytest.MonkeyPatch, lines: Iterable[str | type[BaseException]]) -> None:
    """Let `input` return these lines or raise these errors, and then the end of the input."""
    waiting = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def _roles(messages: list[Message]) -> str:
    return " ".join(message["role"] for message in messages)


def _run(monkeypatch: pytest.MonkeyPatch, *lines: str) -> Echo:
    """The answers of a session in which these lines are typed."""
    echo = Echo()
    _type(monkeypatch, lines)
    ChatSession(echo).run()
    return echo


def test_an_answer_is_printed_and_kept(capsys: Capture) -> None:
    session = ChatSession(Echo())
    session.ask("good morning")
    assert capsys.readouterr().out == "good morning \n"
    assert session.messages == [
        {"role": "user", "content": "good morning"},
        {"role": "assistant", "content": "good morning "},
    ]


def test_the_next_question_carries_the_history_and_the_system_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    echo = Echo()
    _type(monkeypatch, ["one", "", "  two  "])
    ChatSession(echo, "Be brief.").run()
    assert [_roles(asked) for asked in echo.asked] == [
        "system user",
        "system user assistant user",
    ]
    assert echo.asked[0][0] == {"role": "system", "content": "Be brief."}
    assert echo.asked[1][-1]["content"] == "two"


def test_reset_forgets_all_but_the_system_message(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    echo = Echo()
    _type(monkeypatch, ["one", "/reset", "two"])
    ChatSession(echo, "Be brief.").run()
    assert _roles(echo.asked[1]) == "system user"
    assert "forgotten" in capsys.readouterr().out


def test_exit_ends_the_session_before_the_input_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_run(monkeypatch, "one", "/exit", "two").asked) == 1


def test_a_question_may_have_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ('"""one', "  two", 'three"""', "a \\", "b", '"""x"""', "end\\")
    asked = _run(monkeypatch, *lines).asked
    questions = [messages[-1]["content"] for messages in asked]
    assert questions == ["one\n  two\nthree", "a\nb", "x", "end"]


def test_options_and_the_system_message_are_set_while_talking(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lines = ("/set temperature 0.3", "/set top_k 5", "/system Be kind.", "hello", "/show")
    echo = _run(monkeypatch, *lines)
    assert (echo.params[0].temperature, echo.params[0].top_k) == (0.3, 5)
    assert _roles(echo.asked[0]) == "system user"
    out = capsys.readouterr().out
    assert "model echo\ntemperature 0.3\ntop_k 5\nsystem message: Be kind." in out


def test_another_model_goes_on_with_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    echo = _run(monkeypatch, "one", "/model", "/model none", "/model other", "two")
    out, err = capsys.readouterr()
    assert "other answers from now on." in out
    assert "/model needs the name of a model" in err and "there is no model 'none'" in err
    assert _roles(echo.asked[1]) == "user assistant user"
    assert [params.min_p for params in echo.params] == [None, 0.5]


def test_options_that_were_set_are_kept_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = _run(monkeypatch, "/set top_k 5", "/model other", "hello")
    assert (echo.params[0].top_k, echo.params[0].min_p) == (5, None)


def test_a_question_is_answered_again_or_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _run(monkeypatch, "/undo", "one", "two", "/regenerate", "/undo", "three").asked
    assert [messages[-1]["content"] for messages in asked] == ["one", "two", "two", "three"]
    assert [len(messages) for messages in asked] == [1, 3, 3, 3]


def test_a_conversation_is_saved_and_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "talk.json"
    _run(monkeypatch, "/system Be brief.", "one", f"/save {path}")
    assert _roles(json.loads(path.read_text())) == "system user assistant"
    (messages,) = _run(monkeypatch, f"/load {path}", "two").asked
    assert _roles(messages) == "system user assistant user"
    (tmp_path / "other").write_text("[5]")
    _run(monkeypatch, f"/load {tmp_path / 'other'}", f"/load {tmp_path / 'none'}", "/save")
    _run(monkeypatch, f"/save {tmp_path}")
    err = capsys.readouterr().err
    assert "is no conversation that /save wrote" in err
    assert f"{tmp_path} can't be written: Is a directory" in err
    assert "No such file" in err and "/save needs the name of a file" in err


def test_tokens_per_second_are_shown_if_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _run(monkeypatch, "a b c d e", "/stats", "a b c d e f g", "/stats", "end")
    out = capsys.readouterr().out
    assert out.count("tokens/s") == 2  # of the answer before /stats, and of the next one
    assert "(7 tokens, 3.0 tokens/s, first token after 0.25 s)" in out


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/help", "/reset           forget the conversation"),
        ("/rset", "There is no command /rset; did you mean /reset?"),
        ("/quux", "There is no command /quux; try /help."),
        ("/set top_q 1", "/set takes one of temperature, top_p,"),
        ("/set top_k many", "top_k must be a number, not 'many'"),
        ("/set top_p 7", "top_p"),
    ],
)
def test_a_command_is_answered_without_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, command: str, expected: str
) -> None:
    echo = _run(monkeypatch, command)
    out, err = capsys.readouterr()
    assert expected in out + err
    assert echo.asked == []


def test_ctrl_c_stops_the_answer_closes_it_and_keeps_the_session(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    echo = Echo(interrupt_after=2)
    _type(monkeypatch, ["a b c d", "x"])
    session = ChatSession(echo)
    session.run()
    assert capsys.readouterr().out == "a b \nx \n"
    assert session.messages[1] == {"role": "assistant", "content": "a b "}
    assert echo.closed == len(echo.asked) == 2


def test_a_second_ctrl_c_is_the_usual_one() -> None:
    with interruptible() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_afterwards_ctrl_c_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), interruptible():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_drops_the_line_only(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    echo = Echo()
    _type(monkeypatch, [KeyboardInterrupt, "one"])
    ChatSession(echo).run()
    assert len(echo.asked) == 1
    assert "/exit or Ctrl-D" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            PromptTooLongError("99 tokens, above 64"),
            "no longer fits into the model's context: 99 tokens, above 64. Type /reset",
        ),
        (InvalidRequestError("the template has no system role"), "quire: error: the template has"),
    ],
)
def test_a_refused_question_is_explained_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    error: InvalidRequestError,
    expected: str,
) -> None:
    class Refusing(Echo):
        def stream(self, messages: list[Message], params: SamplingParams) -> Iterator[Piece]:
            if messages[-1]["content"] == "two":
                raise error
            return super().stream(messages, params)

    _type(monkeypatch, ["one", "two", "three"])
    session = ChatSession(Refusing())
    session.run()
    assert expected in capsys.readouterr().err
    questions = [entry["content"] for entry in session.messages if entry["role"] == "user"]
    assert questions == ["one", "three"]


def test_on_a_terminal_there_is_a_prompt_and_a_last_line_end(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    prompts = []

    def end(prompt: str = "") -> str:
        prompts.append(prompt)
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    ChatSession(Echo()).run()
    assert prompts == [">>> "]
    assert capsys.readouterr().out == "\n"


def test_questions_are_kept_over_sessions_for_their_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "history"
    monkeypatch.setattr(session, "HISTORY_FILE", path)
    load_readline()
    readline.clear_history()
    readline.add_history("one")
    session._save_history(path)
    readline.clear_history()
    load_readline()
    assert readline.get_history_item(1) == "one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
