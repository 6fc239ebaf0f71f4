"""What a test leaves open: descriptors and threads that were not there before."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def open_descriptors() -> set[tuple[int, str]]:
    """Of this process: numbers, and where they lead."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the one that lists them
            continue
    return found


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """Whatever is opened inside is closed at the end.

    What was open before may be closed meanwhile: objects of earlier tests are collected, and their
    threads end, whenever they do.
    """
    gc.collect()
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    yield
    assert open_descriptors() <= descriptors
    assert set(threading.enumerate()) <= threads
