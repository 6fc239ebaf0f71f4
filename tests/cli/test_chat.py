"""The chat: history, commands, Ctrl-C and errors, on answers that are given to it."""

import signal
from collections.abc import Iterable, Iterator

import pytest

from quire.cli.chat import ChatSession, Message, interruptible, load_readline
from quire.errors import InvalidRequestError, PromptTooLongError


class Echo:
    """Answers with the last question, word by word; remembers what it was asked and how it ended.

    interrupt_after: raises Ctrl-C while the so many-th word is out.
    """

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.asked: list[list[Message]] = []
        self.closed = 0
        self._interrupt_after = interrupt_after

    def __call__(self, messages: list[Message]) -> Iterator[str]:
        self.asked.append(messages)
        try:
            for index, word in enumerate(messages[-1]["content"].split(), 1):
                if index == self._interrupt_after:
                    signal.raise_signal(signal.SIGINT)
                yield f"{word} "
        finally:
            self.closed += 1


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


def test_an_answer_is_printed_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = Echo()
    _type(monkeypatch, ["one", "/reset", "two"])
    ChatSession(echo, "Be brief.").run()
    assert _roles(echo.asked[1]) == "system user"
    assert "forgotten" in capsys.readouterr().out


def test_exit_ends_the_session_before_the_input_does(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo()
    _type(monkeypatch, ["one", "/exit", "two"])
    ChatSession(echo).run()
    assert len(echo.asked) == 1


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/help", "/reset  forget the conversation"),
        ("/rset", "There is no command /rset; did you mean /reset?"),
        ("/quux", "There is no command /quux; try /help."),
    ],
)
def test_a_command_is_answered_without_the_model(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    expected: str,
) -> None:
    echo = Echo()
    _type(monkeypatch, [command])
    ChatSession(echo).run()
    assert expected in capsys.readouterr().out
    assert echo.asked == []


def test_ctrl_c_stops_the_answer_closes_it_and_keeps_the_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    capsys: pytest.CaptureFixture[str],
    error: InvalidRequestError,
    expected: str,
) -> None:
    echo = Echo()

    def refuse_second(messages: list[Message]) -> Iterator[str]:
        if messages[-1]["content"] == "two":
            raise error
        yield from echo(messages)

    _type(monkeypatch, ["one", "two", "three"])
    session = ChatSession(refuse_second)
    session.run()
    assert expected in capsys.readouterr().err
    questions = [entry["content"] for entry in session.messages if entry["role"] == "user"]
    assert questions == ["one", "three"]


def test_on_a_terminal_there_is_a_prompt_and_a_last_line_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_readline_is_there_to_load() -> None:
    load_readline()
