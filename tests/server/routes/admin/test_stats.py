"""GET /stats, /stats/events and /stats/table of a real server."""

import base64
import json

import pytest

from quire.core.memory.block_records import RECORD_BYTES
from quire.server.stats.engine_view import PARTS

NUM_BLOCKS = 512
BODY = {"prompt": "def f(" + "a, " * 40, "max_tokens": 300, "temperature": 1.0}
BODY |= {"ignore_eos": True, "stream": True}
EVERYTHING = ",".join(PARTS)


def test_a_snapshot_has_the_server_and_each_part_of_its_engine(http):
    found = http.get("/stats", params={"parts": EVERYTHING}).raise_for_status().json()
    (engine,) = found["engines"]
    assert found["model"] == "embedded" and found["state"] == engine["state"] == "ready"
    assert engine["answers"] and set(PARTS) <= set(engine)
    assert engine["facts"]["num_blocks"] == engine["blocks"]["num_blocks"] == NUM_BLOCKS
    records = base64.b64decode(engine["blocks"]["records"])
    assert len(records) == NUM_BLOCKS * RECORD_BYTES
    assert engine["memory"]["total_bytes"] > 0
    assert set(http.get("/stats").json()["engines"][0]) >= {"stats", "events", "requests", "memory"}


def test_a_stream_shows_a_request_from_its_steps_to_its_end(http):
    """The first event is whole, later ones have the changes."""
    changes = []
    parts = {"parts": "events,requests,blocks", "interval": "0.25"}
    with http.stream("GET", "/stats/events", params=parts) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        with http.stream("POST", "/v1/completions", json=BODY) as answer:
            answer.read()
        for line in stream.iter_lines():
            if line.startswith("data: "):
                changes.append(json.loads(line.removeprefix("data: "))["engines"][0])
            events = [event for change in changes for event in change["events"]]
            ended = [event for event in events if event["event"] == "end"]
            if ended:
                break
    assert "facts" in changes[0] and "facts" not in changes[-1]
    assert "records" in changes[0]["blocks"]
    assert sum(event["event"] == "step" for event in events) >= 100
    assert ended[-1]["num_output_tokens"] == 300 and ended[-1]["finish_reason"] == "length"
    assert http.get("/stats").json()["num_listeners"] <= 1


def test_the_table_of_a_running_request_has_its_blocks(http):
    # Drafts don't hold at this temperature, so it still runs when its table is asked for.
    long = BODY | {"max_tokens": 900, "temperature": 2.0}
    with http.stream("POST", "/v1/completions", json=long) as stream:
        lines = stream.iter_lines()  # kept, since the connection is closed with the iterator
        line = next(filter(None, lines))
        name = json.loads(line.removeprefix("data: "))["id"] + "-0"
        found = http.get("/stats/table", params={"request_id": name}).raise_for_status().json()
        (branch,) = found["branches"]
        assert branch["num_tokens"] > 40 and len(branch["groups"][0]) >= 3
    assert http.get("/stats/table", params={"request_id": "no"}).json()["branches"] == []


@pytest.mark.parametrize(
    ("path", "param", "reason"),
    [
        ("/stats?parts=stats,x", "parts", "has 'x', but the parts are: stats"),
        ("/stats?since=1", "since", "known are: parts"),
        ("/stats/events?interval=0.1", "interval", "from 0.25 to 10"),
        ("/stats/events?interval=x", "interval", "from 0.25 to 10"),
        ("/stats/events?interval=nan", "interval", "from 0.25 to 10"),
        ("/stats/table?request_id=a&replica=7", "replica", "there are: none"),
        ("/stats/table", "request_id", "is missing"),
    ],
)
def test_invalid_parameter_is_refused_by_name(http, path, param, reason):
    answer = http.get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
