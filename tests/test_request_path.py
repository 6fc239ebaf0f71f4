"""docs/request-path.md shows the path that a streamed chat takes."""

import re

import pytest
from tools.request_path import DOCUMENT, PICTURE, PICTURED, first_line, picture, trace_chat

#: Two processes that work at the same time may call functions in another order, so a trace that
#: differs from the picture is taken again this number of times.
NUM_TRACES = 3

#: server, core, server, text, engine_client, server, engine_client.
MAX_PACKAGE_CHANGES = 6


def boxes(text: str) -> list[str]:
    return text.rpartition("```")[0].splitlines()


def test_the_picture_is_that_of_a_traced_chat() -> None:
    """`python tools/request_path.py --document` writes the picture."""
    written = PICTURE.findall(DOCUMENT.read_text())[0]
    for _ in range(NUM_TRACES):
        trace = trace_chat()
        traced = picture(trace)
        if boxes(traced) == boxes(written):
            break
    packages = [name.partition("/")[0] for name in trace.way_in]
    assert trace.num_package_changes <= MAX_PACKAGE_CHANGES, packages
    assert boxes(traced) == boxes(written)
    counts = [re.findall(r"\d[\d,]*", text.rpartition("```")[2]) for text in (written, traced)]
    for said, counted in zip(*counts, strict=True):
        assert abs(int(said.replace(",", "")) / int(counted.replace(",", "")) - 1) < 0.1


def test_at_most_twenty_files_are_named() -> None:
    names = [name for files in PICTURED.values() for name in files]
    assert len(names) == len(set(names)) <= 20


@pytest.mark.parametrize("name", [name for files in PICTURED.values() for name in files])
def test_each_box_has_the_first_line_of_its_file(name: str) -> None:
    assert f'"{name}<br/>{first_line(name)}"' in DOCUMENT.read_text()
