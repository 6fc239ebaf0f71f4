"""Tests of the pictures of `quire top`: what they say, and that they fit into the terminal."""

import io

import pytest
from rich.console import Console
from tests.cli.top.watching import (
    CACHED,
    FREE,
    blocks,
    engine,
    event,
    held,
    memory,
    request,
    step,
)

from quire.cli.top.block_picture import CACHED as GREY
from quire.cli.top.block_picture import FREE as DARK
from quire.cli.top.block_picture import block_picture, owner_colour
from quire.cli.top.screen import ORDERS, Choices, Page, render
from quire.cli.top.watched import WatchedBlocks, WatchedServer


def _server(num_requests: int = 3) -> WatchedServer:
    server = WatchedServer()
    requests = [
        request(f"r{at}", ("queued", "decoding", "preempted")[at % 3], num_blocks=at)
        for at in range(num_requests)
    ]
    parts = {
        "facts": {"max_num_seqs": 8},
        "stats": {"num_running": 2, "num_waiting": 1, "num_preemptions": 1_234},
        "memory": memory(useful_bytes=1 << 20, free_bytes=3 << 20, saved_bytes=2048),
        "requests": requests,
        "events": [step(109.0, 100), step(109.5, 0, 50, num_drafts=8, num_accepted_drafts=6)],
        "blocks": blocks([held(1)] * 20 + [CACHED] * 10 + [FREE] * 10, {1: "r0"}),
    }
    finished = {"stop": 7}
    server.take(event(engine(110.0, **parts), first_token=(0, 4, 0, 0), finished=finished))
    return server


def _text(server: WatchedServer, page: Page, choices: Choices | None = None) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=page.width, force_terminal=True, color_system=None)
    console.print(render(server, "http://h:1", choices or Choices(), page))
    return out.getvalue().splitlines()


def test_a_model_that_is_not_in_memory_has_no_engine_and_stands_among_the_models() -> None:
    server = WatchedServer()
    loaded = {"name": "small", "state": "loaded", "memory_bytes": 3 << 20}
    unloaded = {"name": "code", "state": "unloaded", "memory_bytes": 0}
    server.take(event(model="code", state="unloaded", models=[loaded, unloaded]))
    text = "\n".join(_text(server, Page(120, 40)))
    for part in (
        "code  http://h:1  unloaded",
        "small: loaded, 3.0 MiB   code: unloaded",
        "no engine",
    ):
        assert part in text


def test_a_picture_has_the_rates_the_ledger_the_blocks_and_the_requests() -> None:
    text = "\n".join(_text(_server(), Page(120, 40)))
    for part in (
        *("quire 9.9  small  http://h:1  ready", "output tokens/s 20", "prompt tokens/s 40"),
        *("step 10 ms", "of the machine's bound 40%", "drafts accepted 75%", "running 2 of 8"),
        *("waiting 1", "preemptions 1,234", "first token p50, p99 55 ms, 99.1 ms", "ended 7 stop"),
        *("KV cache: 4.0 MiB", "useful 1.0 MiB", "free 3.0 MiB", "saved by sharing 2.0 KiB"),
        *("blocks: 40, one a square", "requests: 3, by state", "250 ms", "10 s"),
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [20, 40, 79, 200])
@pytest.mark.parametrize("height", [4, 10, 24, 60])
@pytest.mark.parametrize("num_requests", [0, 300])
def test_a_picture_fits_into_the_terminal(width: int, height: int, num_requests: int) -> None:
    lines = _text(_server(num_requests), Page(width, height))
    assert len(lines) == height
    assert max(len(line) for line in lines) <= width
    assert lines[-1].startswith("q quit")


def test_a_table_that_is_cut_off_says_how_many_requests_are_missing() -> None:
    lines = _text(_server(300), Page(100, 24))
    num_shown = sum(line.startswith("■ ") and " ms " in line for line in lines)
    assert any(f"and {300 - num_shown} more" in line for line in lines)


def test_without_colours_there_is_no_block_map() -> None:
    lines = _text(_server(), Page(100, None, has_colours=False))
    assert not any("▀" in line or "a square" in line for line in lines)
    assert len(lines) < 24


def test_tiers_are_shown_by_their_bytes() -> None:
    server = _server()
    tiers = {"num_loads": 3, "by_tier": {"disk": {"used_bytes": 2048, "loads_done": 1}}}
    server.engines[""].memory["tiers"] = tiers
    assert "tiers  disk: used 2.0 KiB" in "\n".join(_text(server, Page(100, 40)))


def test_a_name_can_not_send_commands_to_the_terminal() -> None:
    server = _server()
    server.numbers["model"] = "evil\x1b[2J\x9b2J"
    assert "evil?[2J?2J" in _text(server, Page(100, 30))[0]


def test_the_chosen_order_sorts_the_requests() -> None:
    server = _server()
    shown = {
        order: [
            line.split()[-1]
            for line in _text(server, Page(100, None), Choices(order=order))
            if line.startswith("■") and line.split()[-1].startswith("r")
        ]
        for order in ORDERS
    }
    assert shown["blocks"] == ["r2", "r1", "r0"]
    assert shown["state"] == ["r1", "r2", "r0"]


def test_another_replica_is_shown_when_the_reader_asks_for_it() -> None:
    server = WatchedServer()
    server.take(
        event(
            engine(name="a", requests=[request("ra")], memory=memory()),
            engine(name="b", requests=[request("rb")], memory=memory()),
        )
    )
    first, second = ("\n".join(_text(server, Page(120, 30), Choices(engine=at))) for at in (0, 3))
    assert "replicas" in first and "ra" in first and "rb" not in first
    assert "rb" in second


def test_a_server_without_engines_is_shown() -> None:
    server = WatchedServer()
    server.take(event())
    assert "no engine" in "\n".join(_text(server, Page(80, 10)))


def test_blocks_have_the_colours_of_their_owners() -> None:
    found = WatchedBlocks(4, {}, bytearray(held(2) + CACHED + FREE + held(9)))
    (line,), per_place = block_picture(found, width=2, height=4)
    colours = [
        tuple(style.get_truecolor())
        for span in line.spans
        for style in (span.style.color, span.style.bgcolor)
    ]
    assert per_place == 1
    assert colours == [owner_colour(2), DARK, GREY, owner_colour(9)]


def test_a_square_of_several_blocks_has_the_colour_of_most_of_them() -> None:
    records = bytearray((held(3) * 3 + CACHED + FREE * 4) * 2)
    lines, per_place = block_picture(WatchedBlocks(16, {}, records), width=1, height=1)
    assert (len(lines), per_place) == (1, 8)
    red, _, _ = lines[0].spans[0].style.color.get_truecolor()
    assert red == round(DARK[0] + (owner_colour(3)[0] - DARK[0]) * 0.5)
