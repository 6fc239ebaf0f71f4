"""A conversation in the terminal: questions, commands, and answers that can be stopped.

Independent of the engine, which is behind `Answers`.
"""

import atexit
import json
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from quire.cli.chat.answers import Answers, Message, shown_params
from quire.cli.chat.terminal import AnswerWriter, Spinner
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError, PromptTooLongError, QuireError, did_you_mean

COMMANDS = {
    "/help": "show this",
    "/set NAME VALUE": "set a sampling option: temperature, top_p, top_k, min_p, seed, max_tokens",
    "/model NAME": "talk with another model, or with another one that the server serves",
    "/system TEXT": "set the system message, and forget the conversation",
    "/show": "show the model, the sampling options and the system message",
    "/stats": "show tokens per second after each answer; again: no longer",
    "/regenerate": "answer the last question again",
    "/undo": "forget the last question and its answer",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "go on with the conversation of a file",
    "/reset": "forget the conversation",
    "/exit": "leave (also Ctrl-D)",
}
HELP = "\n".join(f"{name:17}{text}" for name, text in COMMANDS.items()) + (
    '\n"""              begins and ends a question of several lines'
    "\n\\                at the end of a line: the question goes on in the next one"
    "\nCtrl-C           stop the answer; twice: leave"
)
QUOTES = '"""'
HISTORY_FILE = Path("~/.cache/quire/chat_history")
MAX_HISTORY_LINES = 1000

_NUMBERS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
}
"""The options that /set takes."""


@dataclass(slots=True)
class Interrupt:
    """Records whether Ctrl-C was pressed since the answer began."""

    requested: bool = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into a flag, so that Ctrl-C never interrupts an engine step.

    The second Ctrl-C raises KeyboardInterrupt as usual. Only the main thread may call this.
    """
    interrupt = Interrupt()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class ChatSession:
    """One conversation.

    Invariant: `messages` has an answer, possibly a partial one, for each question.
    """

    def __init__(
        self,
        answers: Answers,
        system: str | None = None,
        params: SamplingParams | None = None,
        *,
        shows_stats: bool = False,
        is_plain: bool = False,
        told: Callable[[str], str] = str,
    ) -> None:
        """`is_plain` prints answers as they are, without styles. `told` names flags in an error."""
        self._told = told
        self._given = params or SamplingParams(max_tokens=None)
        #: The params before any /set; the present model's defaults are among them.
        self._defaults = answers.with_defaults(self._given)
        self.params = self._defaults
        self._is_plain = is_plain
        self._answers = answers
        self._system = system
        self._shows_stats = shows_stats
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages: list[Message] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def ask(self, question: str) -> None:
        """Stream the answer to the terminal. Ctrl-C ends the answer and keeps its beginning.

        Raises InvalidRequestError if the question can't be answered, and forgets the question.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        answer, writer, spinner = "", AnswerWriter(is_plain=self._is_plain), Spinner()
        try:
            with interruptible() as interrupt:
                pieces = self._answers.stream(messages, self.params)
                for piece in pieces:
                    spinner.stop()
                    answer += "" if piece.is_reasoning else piece.text
                    writer.write(piece)
                    if interrupt.requested:
                        break
                if isinstance(pieces, Generator):
                    pieces.close()
        finally:
            spinner.stop()
        writer.end()
        if self._shows_stats and self._answers.usage is not None:
            print(f"({self._answers.usage})")
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def run(self) -> None:
        """Read questions and answer them until /exit or the end of the input."""
        while (line := _read_question()) is not None:
            if line.startswith("/"):
                if line == "/exit":
                    return
                self._try(self._run_command, line)
            elif line:
                self._try(self.ask, line, self._told)

    def _try(
        self, action: Callable[[str], None], text: str, told: Callable[[str], str] = str
    ) -> None:
        """Act, and print an error as a sentence, which `told` rewords."""
        try:
            action(text)
        except PromptTooLongError as error:
            print(
                f"The conversation no longer fits into the model's context: {told(str(error))}. "
                "Type /reset to begin a new one.",
                file=sys.stderr,
            )
        except (QuireError, OSError) as error:
            print(f"quire: error: {told(str(error))}", file=sys.stderr)

    def _run_command(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        actions: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/set": self._set,
            "/model": self._switch_model,
            "/system": self._set_system,
            "/show": self._show,
            "/stats": self._toggle_stats,
            "/regenerate": self._regenerate,
            "/undo": self._undo,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._forget,
        }
        if command in actions:
            actions[command](rest.strip())
        else:
            hint = did_you_mean(command, actions) or "; try /help."
            print(f"There is no command {command}{hint}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        read = _NUMBERS.get(name)
        if read is None:
            raise ConfigurationError(
                f"/set takes one of {', '.join(_NUMBERS)}{did_you_mean(name, _NUMBERS)}"
            )
        try:
            self.params = replace(self.params, **{name: read(value)})
        except ValueError as error:
            raise ConfigurationError(f"{name} must be a number, not {value!r}") from error
        print(f"{name} is {value} from now on.")

    def _switch_model(self, name: str) -> None:
        if not name:
            raise ConfigurationError("/model needs the name of a model")
        spinner = Spinner(text=f"loading {name}")
        try:
            self._answers.switch(name)
        finally:
            spinner.stop()
        if self.params == self._defaults:
            self.params = self._defaults = self._answers.with_defaults(self._given)
        print(f"{self._answers.name} answers from now on.")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self.reset()
        print("The system message is set, and the conversation is forgotten.")

    def _show(self, _: str) -> None:
        print(f"model {self._answers.name}")
        print("\n".join(shown_params(self.params) or ["the model's own sampling options"]))
        print(f"system message: {self._system or 'none'}")

    def _toggle_stats(self, _: str) -> None:
        self._shows_stats = not self._shows_stats
        now = self._answers.usage if self._shows_stats else None
        print(now or ("on" if self._shows_stats else "off"))

    def _forget(self, _: str) -> None:
        self.reset()
        print("The conversation is forgotten.")

    def _regenerate(self, _: str) -> None:
        question = self._pop_question()
        if question is not None:
            self.ask(question)

    def _undo(self, _: str) -> None:
        if (question := self._pop_question()) is not None:
            print(f"Forgotten: {question}")

    def _pop_question(self) -> str | None:
        """Remove the last question and its answer; None if there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            print("There is no question yet.")
            return None
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        return question

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        text = json.dumps(self.messages, indent=1, ensure_ascii=False)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"{path} can't be written: {error.strerror}") from error
        print(f"{path} has the conversation.")

    def _load(self, name: str) -> None:
        path = _path(name, "/load")
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
            found = [{"role": m["role"], "content": m["content"]} for m in messages]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"{path} is no conversation that /save wrote") from error
        self._system = next((m["content"] for m in found if m["role"] == "system"), None)
        self.messages = found
        print(f"The conversation has {len(found)} messages.")


def _path(name: str, command: str) -> Path:
    if not name:
        raise ConfigurationError(f"{command} needs the name of a file")
    return Path(name).expanduser()


def load_readline() -> None:
    """Give `input` line editing, and the history of earlier sessions, if Python has them."""
    with suppress(ImportError):
        import readline  # only an interactive chat needs it

        path = HISTORY_FILE.expanduser()
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.read_history_file(path)
        readline.set_history_length(MAX_HISTORY_LINES)
        atexit.register(_save_history, path)


def _save_history(path: Path) -> None:
    import readline  # only an interactive chat needs it

    with suppress(OSError):  # the folder is read-only
        readline.write_history_file(path)


def _read_question() -> str | None:
    """The next question, which may have several lines; None at the end of the input."""
    line = _read_line(">>> ")
    if line is None:
        return None
    if line.lstrip().startswith(QUOTES):
        return _read_quoted(line.lstrip().removeprefix(QUOTES))
    lines = []
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1].rstrip())
        line = _read_line("... ")
    return "\n".join([*lines, line or ""]).strip()


def _read_quoted(line: str | None) -> str:
    """The lines up to the one that ends with QUOTES."""
    lines = []
    while line is not None:
        lines.append(line.removesuffix(QUOTES))
        if line.endswith(QUOTES):
            break
        line = _read_line("... ")
    return "\n".join(lines).strip()


def _read_line(prompt: str) -> str | None:
    """The next line; None at the end of the input. Ctrl-C drops the current line."""
    prompt = prompt if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt).rstrip()
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
        except EOFError:
            if prompt:
                print()
            return None
