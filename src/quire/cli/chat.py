"""The interactive chat: history, commands, and answers that can be stopped.

Independent of the engine: `main` passes a function that maps messages to pieces of the answer.
"""

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from quire.errors import InvalidRequestError, PromptTooLongError, did_you_mean

Message = dict[str, str]
StreamChat = Callable[[list[Message]], Iterator[str]]

COMMANDS = {
    "/help": "show this",
    "/reset": "forget the conversation",
    "/exit": "leave (also Ctrl-D)",
}
HELP = "\n".join(f"{name:8}{text}" for name, text in COMMANDS.items()) + (
    "\nCtrl-C  stop the answer; twice: leave"
)


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

    def __init__(self, stream_chat: StreamChat, system: str | None = None) -> None:
        #: Maps messages to an iterator over pieces of the answer. Closing the iterator ends the
        #: request.
        self._stream_chat = stream_chat
        self._system = system
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def ask(self, question: str) -> None:
        """Stream the answer to the terminal. Ctrl-C ends the answer and keeps its beginning.

        Raises InvalidRequestError if the question can't be answered, and forgets the question.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        answer = ""
        with interruptible() as interrupt:
            pieces = self._stream_chat(messages)
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True)
                if interrupt.requested:
                    break
            if isinstance(pieces, Generator):
                pieces.close()
        print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def run(self) -> None:
        """Read questions and answer them until /exit or the end of the input."""
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                if line == "/exit":
                    return
                self._run_command(line)
            elif line:
                self._ask_or_explain(line)

    def _run_command(self, command: str) -> None:
        if command == "/reset":
            self.reset()
            print("The conversation is forgotten.")
        elif command == "/help":
            print(HELP)
        else:
            hint = did_you_mean(command, COMMANDS) or "; try /help."
            print(f"There is no command {command}{hint}")

    def _ask_or_explain(self, question: str) -> None:
        try:
            self.ask(question)
        except PromptTooLongError as error:
            print(
                f"The conversation no longer fits into the model's context: {error}. "
                "Type /reset to begin a new one.",
                file=sys.stderr,
            )
        except InvalidRequestError as error:
            print(f"quire: error: {error}", file=sys.stderr)


def load_readline() -> None:
    """Give `input` line editing and history, if Python was built with them."""
    with suppress(ImportError):
        import readline  # noqa: F401 - works by being imported; only an interactive chat needs it


def _read_line() -> str | None:
    """The next line, stripped; None at the end of the input. Ctrl-C drops the current line."""
    prompt = ">>> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt).strip()
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
        except EOFError:
            if prompt:
                print()
            return None
