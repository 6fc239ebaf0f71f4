"""Runs `quire top`: follows a server, draws its state, and reads keys."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from quire.cli.top.feed import Feed
from quire.cli.top.screen import ORDERS, Choices, Page, render
from quire.cli.top.watched import WatchedServer
from quire.errors import EngineDeadError

FIRST_EVENTS = 3
"""Number of events that a single picture waits for: rates need some steps."""

QUIT = frozenset("q\x03\x1b")
"""The keys that end the command: q, Ctrl-C and Escape."""

KEY_S = 0.05
"""Maximum number of seconds until a pressed key is read."""


def show(
    url: str, api_key: str | None, model: str | None, interval_s: float, *, is_once: bool
) -> int:
    """Show the server until the reader quits. Returns the exit code.

    model: the name of one of several models; None means the first.
    is_once: print one picture and return; also done where the output is no terminal. Raises
    EngineDeadError if no server answers at first, InvalidRequestError if it refuses.
    """
    console = Console(highlight=False)
    is_once = is_once or not console.is_terminal
    server = WatchedServer()
    with Feed(url, api_key, model, interval_s) as feed:
        _await(feed, server, FIRST_EVENTS if is_once else 1)
        if is_once:
            page = Page(console.width, None, has_colours=console.color_system is not None)
            console.print(render(server, url, Choices(), page))
            return 0
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys():
            _draw(live, feed, server, url)
    return 0


def _draw(live: Live, feed: Feed, server: WatchedServer, url: str) -> None:
    """Draw until the reader quits. Raises InvalidRequestError if the server refuses."""
    console, choices, lost, size = live.console, Choices(), "", None
    while True:
        # First, react to keys.
        keys = _pressed()
        if QUIT.intersection(keys):
            return
        for key in keys:
            _choose(choices, key)
        # Then take what the server has sent, which waits a little.
        changes = list(feed.take(KEY_S))
        for change in changes:
            if isinstance(change, EngineDeadError):
                lost = "  (connection lost; trying again)"
            elif isinstance(change, Exception):
                raise change
            else:
                lost = ""
                server.take(change)
        # Draw only if the picture may differ.
        if keys or console.size != size or (changes and not choices.is_paused):
            size = console.size
            page = Page(size.width, size.height, console.color_system is not None)
            live.update(render(server, url + lost, choices, page), refresh=True)


def _await(feed: Feed, server: WatchedServer, num_events: int) -> None:
    """Take the first events. Raises an error that the feed yields in their place, and
    EngineDeadError if they take over 30 seconds."""
    num_taken = 0
    deadline_s = time.monotonic() + 30.0
    while num_taken < num_events:
        for change in feed.take(1.0):
            if isinstance(change, Exception):
                raise change
            server.take(change)
            num_taken += 1
        if time.monotonic() > deadline_s:
            raise EngineDeadError("the server has sent nothing for 30 seconds")


def _choose(choices: Choices, key: str) -> None:
    if key == " ":
        choices.is_paused = not choices.is_paused
    elif key == "s":
        names = list(ORDERS)
        choices.order = names[(names.index(choices.order) + 1) % len(names)]
    elif key == "\t":
        choices.engine += 1


@contextmanager
def _keys() -> Iterator[None]:
    """Give keys at once and without an echo, where input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed() -> str:
    """The keys that have been pressed since the last call."""
    if sys.stdin.isatty() and select.select([sys.stdin], [], [], 0)[0]:
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace")
    return ""
