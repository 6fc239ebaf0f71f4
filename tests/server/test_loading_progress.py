"""Progress of loading: a bar on a terminal, few lines elsewhere, and no harm from a full disk."""

import io
import re
import threading

import pytest

from quire.server.loading_progress import QUIET_S, REDRAW_S, LoadingProgress


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


def test_a_terminal_gets_a_bar_that_goes_away(clock, monkeypatch):
    monkeypatch.setattr("tqdm.std.time", clock)
    stream = Terminal()
    threads = threading.enumerate()
    progress = LoadingProgress(stream, clock)
    progress("loading weights", 1, 4)
    first = stream.getvalue()
    assert re.fullmatch(r"\rloading weights \[#{7}\S {22}\]  25%", first)
    progress("loading weights", 2, 4)  # too soon to be drawn
    assert stream.getvalue() == first
    clock.now_s += 2 * REDRAW_S
    progress("loading weights", 3, 4)
    assert stream.getvalue().endswith(" 75%")
    progress("loading weights", 4, 4)  # the end is always drawn
    assert stream.getvalue().endswith("100%")
    progress("measuring", 0, 0)
    assert re.search(r"\r +\r+measuring(\rmeasuring)*$", stream.getvalue())
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("measuring\r         \r")
    assert threading.enumerate() == threads


def test_elsewhere_quick_loading_is_silent(clock):
    stream = io.StringIO()
    progress = LoadingProgress(stream, clock)
    for done in range(101):
        progress("loading weights", done, 100)
    progress.close()
    assert stream.getvalue() == ""


def test_a_log_takes_the_lines_instead_of_the_stream(clock):
    stream, lines = Terminal(), []
    progress = LoadingProgress(stream, clock, lines.append)
    progress("loading weights", 0, 4)
    clock.now_s += QUIET_S
    progress("loading weights", 2, 4)
    progress("measuring", 0, 0)
    progress.close()
    assert stream.getvalue() == ""
    assert lines == ["loading weights: 50%", "measuring"]


def test_elsewhere_long_loading_gets_a_few_lines(clock):
    stream = io.StringIO()
    progress = LoadingProgress(stream, clock)
    for done in range(101):
        clock.now_s += QUIET_S / 10
        progress("loading weights", done, 100)
    progress("measuring", 0, 0)
    progress("measuring", 0, 0)
    lines = stream.getvalue().splitlines()
    numbers = [int(line.removeprefix("loading weights: ").rstrip("%")) for line in lines[:-1]]
    assert numbers[1:] == [25, 50, 75, 100] and numbers[0] < 25
    assert lines[-1] == "measuring"


def tell_late(progress, clock):
    progress("loading weights", 0, 2)
    clock.now_s += QUIET_S
    progress("loading weights", 1, 2)


def test_log_lines_are_dropped_on_a_full_disk_or_closed_stream(clock):
    class Full(io.StringIO):
        num_tries = 0

        def flush(self):
            self.num_tries += 1
            raise OSError(28, "No space left on device")

    full = Full()
    progress = LoadingProgress(full, clock)
    tell_late(progress, clock)
    assert full.num_tries == 1
    closed = io.StringIO()
    progress = LoadingProgress(closed, clock)
    closed.close()
    tell_late(progress, clock)
    progress = LoadingProgress(None, clock)
    tell_late(progress, clock)
    progress.close()


def test_a_terminal_that_is_gone_does_not_end_loading(clock):
    class Gone(Terminal):
        def write(self, text):
            raise OSError(5, "Input/output error")

    closed = Terminal()
    for stream in (Gone(), closed):
        progress = LoadingProgress(stream, clock)
        progress("loading weights", 1, 4)
        closed.close()
        progress("loading weights", 4, 4)
        progress("measuring", 0, 0)
        progress.close()
