"""Bodies whose JSON is refused though Python takes it, and long ones that are parsed in pieces."""

import asyncio
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from tests.server.generation.test_http_generation import FakeEngine
from tests.server.working import StepClock, finished

from quire.errors import InvalidRequestError
from quire.server.http import json_body
from quire.server.http.json_body import (
    MAX_DEPTH,
    MAX_NUMBER_CHARACTERS,
    parse_in_pieces,
    unique_fields,
)
from quire.server.http.long_work import WorkPieces
from quire.server.routes.endpoint import read_json
from quire.server.served_models import ServedModels
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
def test_bodies_that_are_no_utf_8_json_are_refused(body, kind):
    with pytest.raises(kind):
        parse(body)


@pytest.mark.parametrize("long_bytes", [1 << 30, 0])
def test_a_body_is_read_the_same_whether_it_is_long_or_short(long_bytes, monkeypatch):
    monkeypatch.setattr(json_body, "LONG_BODY_BYTES", long_bytes)
    assert parse(b'{"a": ["\\ud83d\\ude00", 1e3, {"b": null}]}') == {"a": ["😀", 1e3, {"b": None}]}
    for body in (b'{"a": [1], "a": [1]}', b'{"a": ["\\ud800"]}', b"[" + b"1" * 401 + b"]"):
        refusal(body)


def test_a_long_body_delays_no_other_call(tokenizer):
    """Between two pieces of the work the loop does other things."""
    body = b"[" + b",".join([b'{"a":"\\ud83d\\ude00"}'] * 60_000) + b"]"
    service = Service(FakeEngine(), tokenizer, None, "model", work=WorkPieces(StepClock()))
    app = Starlette()
    app.state.models = ServedModels.of(service)

    async def play():
        request = Request({"type": "http", "headers": [], "app": app})
        parsing = asyncio.create_task(read_json(request, body, None))
        num_turns = 0
        while not parsing.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert len(await parsing) == 60_000
        return num_turns

    assert asyncio.run(play()) > 100


def parse_long(text):
    return finished(parse_in_pieces(text))[0]


def outcome(read, text):
    try:
        return read(text)
    except json.JSONDecodeError:
        return "no JSON"
    except InvalidRequestError as error:
        return str(error)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**60), 10**60)
    | st.floats(allow_nan=False)
    | st.text()
    | st.text('"\\/\n\t\r [],:{}0é😀', max_size=400),
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=20)
    ),
    max_leaves=60,
)


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_json_written_by_python_is_read_unchanged(value, indent, ascii_only):
    assert parse_long(json.dumps(value, indent=indent, ensure_ascii=ascii_only)) == value


@given(VALUES, st.data())
def test_damaged_json_is_refused_exactly_if_python_refuses_it(value, data):
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 2))
    sign = data.draw(st.sampled_from([*'[]{},:"\\1-.e \n', "", "\x00", "true"]))
    text = text[:at] + sign + text[at + cut :]
    python = json.JSONDecoder(object_pairs_hook=unique_fields).decode
    ours, theirs = outcome(parse_long, text), outcome(python, text)
    # A field is twice there before the end is seen, which Python sees first.
    assert ours == theirs or (theirs == "no JSON" and "twice in one object" in str(ours))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "[",
        "[1",
        "[1,",
        "[1,]",
        "[,1]",
        "[1 2]",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        '{"a":1',
        "{1:2}",
        "[1}",
        '{"a":1]',
        "]",
        "1]",
        "[]]",
        "[] []",
        '"',
        '"a',
        '["a\nb", 1]',
        "[01, 1]",
        "[1., 1]",
        "[-, 1]",
        "[nul, 1]",
        '["\\x", 1]',
        "[[1, 2, 3}, 1]",
        '[{"a": 1, 2}, 1]',
    ],
)
def test_mistakes_are_told_with_their_place(text):
    with pytest.raises(json.JSONDecodeError) as found:
        parse_long(text)
    assert 0 <= found.value.pos <= len(text)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_the_place_is_that_in_the_whole_text():
    with pytest.raises(json.JSONDecodeError) as found:
        parse_long('{"a": [1, 2, 3, 4], "b": [1, 2, 03, 4]}')
    assert found.value.pos == '{"a": [1, 2, 3, 4], "b": [1, 2, 03, 4]}'.index("3, 4]}")


LONG = {
    "numbers": [1] * 30_000,
    "long numbers": [10**39] * 5_000,
    "numbers that are none": [math.inf, -math.inf] * 15_000,
    "texts": ["abc"] * 30_000,
    "texts with escapes": ["a\n\té"] * 30_000,
    "lists": [[1]] * 30_000,
    "empty lists": [[]] * 30_000,
    "lists of lists": [[[1], [2]]] * 5_000,
    "long lists": [[1] * 20] * 2_000,
    "fields": {f"a{at}": at for at in range(30_000)},
    "objects": [{"role": "user", "content": "hello"}] * 10_000,
    "texts of some length": ["x" * 300] * 3_000,
}


@pytest.mark.parametrize("name", LONG)
def test_a_step_is_short_however_long_the_text(name, monkeypatch):
    """No call in C is given more than some KB, and no step is given more than one such call."""
    longest = 0
    decode = json_body._DECODER.decode

    class Decoder:
        def decode(self, text):
            nonlocal longest
            longest = max(longest, len(text))
            return decode(text)

    monkeypatch.setattr(json_body, "_DECODER", Decoder())
    value, num_pauses = finished(parse_in_pieces(json.dumps(LONG[name])))
    assert value == LONG[name]
    assert longest < 50_000
    assert num_pauses >= len(json.dumps(LONG[name])) // 50_000


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e000001", "1E-0000000001"])
def test_runs_are_as_long_whatever_form_the_numbers_have(value):
    """A step for each would take eight seconds for the longest body."""
    found, num_pauses = finished(parse_in_pieces(f"[{','.join([value] * 5000)}]"))
    assert repr(found) == repr(json.loads(f"[{','.join([value] * 5000)}]"))
    assert num_pauses < 20


def test_space_is_read_in_steps_too(monkeypatch):
    monkeypatch.setattr(json_body, "_SPACES", re.compile(r"[ \t\n\r]{0,100}+"))
    for text in (" " * 5000 + "[1]", "[" + " " * 5000 + "1]", "[1]" + "\n" * 5000):
        value, num_pauses = finished(parse_in_pieces(text))
        assert value == [1] and num_pauses >= 50


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("[" + "[]," * 98 + "[]]", False),
        ("[" + "[]," * 99 + "[]]", True),
        ("[" + "[[[[]]]]," * 24 + "[]]", False),
        ("[" + "[[[[]]]]," * 25 + "[]]", True),
        ('{"a":' * 50 + "1" + "}" * 50, False),
        ('{"a":' * 51 + "1" + "}" * 51, True),
        ("{" + ",".join(f'"a{at}":1' for at in range(99)) + "}", False),
        ("{" + ",".join(f'"a{at}":1' for at in range(100)) + "}", True),
        ("[" + ",".join(['{"a":1}'] * 49) + "]", False),
        ("[" + ",".join(['{"a":1}'] * 51) + "]", True),
        ("[" + "1," * 998 + "1]", False),
        ("[" + "1," * 1000 + "1]", True),
        ("[" + '"",' * 1000 + '""]', True),
        ("[" + ",".join(["[1,1,1,1,1,1,1,1,1,1]"] * 90) + "]", False),
        ("[" + ",".join(["[1,1,1,1,1,1,1,1,1,1]"] * 92) + "]", True),
        # Texts may be full of signs, whatever else is in them.
        ('{"a": "' + "[,{" * 1000 + '"}', False),
        ('{"a": "' + '[{\\"' * 1000 + '\\\\"}', False),
    ],
)
def test_too_many_values_are_refused_before_they_are_there(text, is_refused, monkeypatch):
    monkeypatch.setattr(json_body, "MAX_PARTS", 100)
    work = parse_in_pieces(text, 1000)
    if not is_refused:
        assert finished(work)[0] == json.loads(text)
        return
    sentence = "more than 1000 values, or more than 100 lists, objects and fields; send less"
    with pytest.raises(InvalidRequestError, match=sentence):
        finished(work)


def test_the_bound_of_values_is_the_body_s():
    body = b"[" + b"1," * json_body.LONG_BODY_BYTES + b"1]"
    assert len(finished(json_body.parse(body, 70_000))[0]) == 65_537
    with pytest.raises(InvalidRequestError, match="the body has more than 60000 values"):
        finished(json_body.parse(body, 60_000))


def test_numbers_are_bounded_by_their_characters():
    longest = "9" * MAX_NUMBER_CHARACTERS
    assert parse_long(f"[{longest}, 1]") == [int(longest), 1]
    assert parse_long(f'["{longest}9", 1]') == [longest + "9", 1]
    for text in (f"[{longest}9, 1]", f'{{"a": 1.{longest}}}', f"-{longest}"):
        with pytest.raises(InvalidRequestError, match="above the bound of 400; send fewer digits"):
            parse_long(text)


def test_nesting_is_bounded():
    assert parse_long("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for opening in ("[", '{"a":'):
        with pytest.raises(InvalidRequestError, match="nested too deeply: more than 900"):
            parse_long(opening * (MAX_DEPTH + 1))


@pytest.mark.parametrize(
    "text",
    [
        '{"b": 1, "a": 1, "a": 2}',
        '{"a": [[[]]], "a": 2, "c": 3}',
        '{"a": 1, "b": [[[]]], "a": 2, "c": 3}',
        '{"a": 1, "b": [[[]]], "a": [[[]]]}',
        '[[[]], {"a": 1, "a": 2}, 1]',
    ],
)
def test_a_field_that_is_given_twice_in_long_json_is_refused(text):
    with pytest.raises(InvalidRequestError, match="has the field 'a' twice in one object") as bad:
        parse_long(text)
    assert bad.value.param == "a"
