"""Bodies whose JSON Python would take, and which mean different things to different readers."""

import asyncio
import json

import pytest
from fastapi import FastAPI
from tests.server.generation.test_http_generation import FakeEngine
from tests.server.working import StepClock, finished

from quire.errors import InvalidRequestError
from quire.server.http import json_body
from quire.server.http.json_body import JSONRequest
from quire.server.http.long_work import WorkPieces
from quire.server.service import Service


def parse(body):
    return finished(json_body.parse(body))[0]


def refusal(body):
    with pytest.raises(InvalidRequestError) as caught:
        parse(body)
    return caught.value


@pytest.mark.parametrize(
    "value",
    [{}, [], "x", 1.5, None, {"a": {"b": 1}, "c": [{"b": 2}, {"b": 3}]}, {"": 1, " ": 2}, [[], {}]],
)
def test_json_is_read_as_python_reads_it(value):
    assert parse(json.dumps(value).encode()) == value


def test_characters_beyond_16_bits_may_be_written_in_halves():
    text = "clef \N{MUSICAL SYMBOL G CLEF}, \\ud800, é"
    for escape in (True, False):
        body = json.dumps({text: [text, {"a": text}]}, ensure_ascii=escape)
        assert parse(body.encode()) == {text: [text, {"a": text}]}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"n": 1, "n": 1}', "n"),
        (b'{"a": 0, "n": null, "b": 1, "n": null}', "n"),
        (b'{"a": [{"b": {"deep": 1, "deep": 2}}]}', "deep"),
        (b'{"a": 1, "\\u0061": 2}', "a"),
        (b'{"": 1, "": 2}', ""),
        (b'{"a": {"x": 1}, "b": 2, "a": {"x": 1}}', "a"),
    ],
)
def test_a_field_that_is_given_twice_is_refused(body, name):
    error = refusal(body)
    assert error.param == name
    assert str(error) == f"the body has the field {name!r} twice in one object; give it once"


def test_the_name_of_a_field_that_is_given_twice_is_cut():
    name = b"n" * 10_000
    assert len(str(refusal(b'{"%b": 1, "%b": 2}' % (name, name)))) < 200


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ({"user": "a\ud800"}, "user", "user has U+D800 at position 1: half of a surrogate pair"),
        ({"stop": ["a", "\udfff\ud800"]}, "stop.1", "stop.1 has U+DFFF at position 0"),
        ({"m": [{"c": [{"text": "\ude00\ud83d"}]}]}, "m.0.c.0.text", "has U+DE00 at position 0"),
        ({"a \ud800": 1}, "a \ud800", r"the name of a field, 'a \ud800', has U+D800"),
        ({"bias": {"\udc80": 1}}, "bias", r"the name of a field, '\udc80', has U+DC80"),
        (["\ud83d\ud83d\ude00"], "0", "0 has U+D83D at position 0"),
    ],
)
def test_halves_of_surrogate_pairs_are_refused_by_the_place_where_they_stand(value, param, words):
    error = refusal(json.dumps(value).encode())
    assert error.param == param
    assert words in str(error)


def test_texts_that_are_deep_inside_are_looked_at_too():
    depth = 500
    body = b'{"a":' * depth + b'"\\ud800"' + b"}" * depth
    assert refusal(body).param == ".".join("a" * depth)


@pytest.mark.parametrize("value", [["é"] * 5000, {f"é{at}": "é" for at in range(5000)}])
def test_the_texts_of_a_long_list_are_looked_at_in_pieces(value):
    _, num_pauses = finished(json_body._check_texts(value))
    assert num_pauses >= 5


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'"\xed\xa0\x80"', UnicodeDecodeError),  # half of a pair, encoded as if it were UTF-8
        (b'"\xff"', UnicodeDecodeError),
        ('{"a": 1}'.encode("utf-16"), UnicodeDecodeError),
        ('{"a": 1}'.encode("utf-16-le"), json.JSONDecodeError),
        (b'{"a": 1', json.JSONDecodeError),
        (b'{"a": 1} {"a": 1}', json.JSONDecodeError),
    ],
)
def test_what_is_no_json_in_utf_8_is_no_json(body, kind):
    with pytest.raises(kind):
        parse(body)


@pytest.mark.parametrize("long_bytes", [1 << 30, 0])
def test_a_body_is_read_the_same_whether_it_is_long_or_short(long_bytes, monkeypatch):
    monkeypatch.setattr(json_body, "LONG_BODY_BYTES", long_bytes)
    assert parse(b'{"a": ["\\ud83d\\ude00", 1e3, {"b": null}]}') == {"a": ["😀", 1e3, {"b": None}]}
    for body in (b'{"a": [1], "a": [1]}', b'{"a": ["\\ud800"]}', b"[" + b"1" * 401 + b"]"):
        refusal(body)


def test_a_long_body_holds_up_nobody(tokenizer):
    """Between two pieces of the work the loop does other things."""
    body = b"[" + b",".join([b'{"a":"\\ud83d\\ude00"}'] * 60_000) + b"]"
    service = Service(FakeEngine(), tokenizer, None, "model", pieces=WorkPieces(StepClock()))
    app = FastAPI()
    app.state.service = service

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def play():
        request = JSONRequest({"type": "http", "headers": [], "app": app}, receive)
        parsing = asyncio.create_task(request.json())
        num_turns = 0
        while not parsing.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert len(await parsing) == 60_000
        return num_turns

    assert asyncio.run(play()) > 100
