"""Bodies take known fields only; what else they accept is in their schema, too."""

import math
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field, ValidationError

from quire.errors import InvalidRequestError
from quire.server.http.body import Body


class Parent(Body):
    takes_extra_body: ClassVar = True
    not_supported: ClassVar = {"tools": ([], False), "audio": ()}

    size: int
    color: str | None = None
    is_loud: bool = False


class Child(Body):
    parent: Parent


def mistake(body, make=Parent):
    """The InvalidRequestError inside pydantic's own, and where it was."""
    with pytest.raises(ValidationError) as caught:
        make.model_validate(body)
    (found,) = caught.value.errors()
    return found["ctx"]["error"]


def test_null_means_left_out():
    body = {"size": 1, "color": None, "is_loud": None, "tools": None, "nonsense": None}
    assert Parent.model_validate(body) == Parent(size=1)


def test_an_unknown_field_is_refused_with_the_nearest_known():
    error = mistake({"size": 1, "colour": "red"})
    assert (str(error), error.param) == ("unknown field 'colour'; did you mean color?", "colour")
    assert str(mistake({"size": 1, "zzz": 3})) == "unknown field 'zzz'; leave it out"
    assert len(str(mistake({"size": 1, "z" * 10_000: 3}))) < 200


def test_unsupported_fields_are_refused_unless_they_ask_for_nothing():
    assert Parent.model_validate({"size": 1, "tools": []}) == Parent(size=1)
    assert Parent.model_validate({"size": 1, "tools": False}) == Parent(size=1)
    for value in ([1], True, 0):  # 0 equals False, but is none
        error = mistake({"size": 1, "tools": value})
        assert (str(error), error.param) == ("tools is not supported yet; leave it out", "tools")
    assert mistake({"size": 1, "audio": {}}).param == "audio"


def test_an_extra_body_counts_as_if_it_stood_at_the_top():
    flat = Parent(size=3, color="red")
    assert Parent.model_validate({"size": 3, "extra_body": {"color": "red"}}) == flat
    assert Parent.model_validate({"extra_body": {"size": 3, "color": "red"}}) == flat
    assert Parent.model_validate({"size": 3, "color": "red", "extra_body": None}) == flat
    assert Parent.model_validate({"size": 3, "color": None, "extra_body": {"color": "red"}}) == flat
    for body in ({}, {"model": None}):
        assert Parent.model_named(body | {"extra_body": {"model": "b"}}) == "b"


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"size": 1}, "size", "both at the top level and in extra_body; give it once"),
        ({"size": 2}, "size", "give it once"),
        ([1], "extra_body", "is a list, but must be an object"),
        ("x", "extra_body", "is a str"),
        ({"colour": "red"}, "colour", "did you mean color?"),
        ({"audio": {}}, "audio", "not supported"),
        ({"extra_body": {"color": "red"}}, "extra_body", "unknown field 'extra_body'"),
    ],
)
def test_errors_in_extra_body_name_the_field(extra, param, words):
    error = mistake({"size": 1, "extra_body": extra})
    assert error.param == param
    assert words in str(error)


def test_only_a_body_that_says_so_takes_an_extra_body():
    error = mistake({"extra_body": {"parent": {"size": 1}}}, Child)
    assert str(error).startswith("unknown field 'extra_body'")


def test_types_are_not_guessed():
    for body in ({"size": "1"}, {"size": 1.5}, {"size": True}, {"size": 1, "is_loud": 1}, [], "x"):
        with pytest.raises(ValidationError):
            Parent.model_validate(body)


class Lenient(Parent):
    unknown_fields: ClassVar = "ignore"


class Numbers(Body):
    whole: int | None = None
    ids: list[int] | str = ""
    lists: Annotated[list[list[int]], Field(fail_fast=True)] | None = None
    part: float = 0.5
    given: dict[str, Any] | None = None


def test_a_whole_number_may_have_a_point():
    body = Numbers.model_validate(
        {"whole": 8.0, "ids": [1, 2.0, -3.0], "lists": [[1.0], [2]], "given": {"a": 1.0}}
    )
    assert repr((body.whole, body.ids, body.lists)) == "(8, [1, 2, -3], [[1], [2]])"
    assert repr((body.given, Numbers(part=2.0).part)) == "({'a': 1.0}, 2.0)"
    for wrong in (8.5, math.inf, math.nan, True, "8"):
        for fields in ({"whole": wrong}, {"ids": [wrong]}, {"lists": [[wrong]]}):
            with pytest.raises(ValidationError):
                Numbers.model_validate(fields)


class Outer(Body):
    takes_extra_body: ClassVar = True

    lenient: Lenient | None = None
    strict: Parent | None = None


def test_an_object_inside_sets_unknown_fields_aside_where_it_ignores_them():
    inside = {"size": 1, "nonsense": 2}
    body = {"lenient": inside, "strict": inside, "other": inside}
    kept = body | {"lenient": {"size": 1}}
    assert Outer.without_unknown_inside(body) == (kept, ["lenient.nonsense"])
    assert Outer.without_unknown_inside({"extra_body": body}) == (kept, ["lenient.nonsense"])
    with pytest.raises(InvalidRequestError, match="lenient has 101 entries, above"):
        Outer.without_unknown_inside({"lenient": dict.fromkeys(map(str, range(101)), 1)})
    misspelt = {"lenient": {"sizes": 2}}
    assert Outer.without_unknown_inside(misspelt) == (misspelt, [])
    for wrong in (None, 5, []):
        assert Outer.without_unknown_inside({"lenient": wrong}) == ({"lenient": wrong}, [])


def test_the_schema_says_what_is_accepted():
    schema = Parent.model_json_schema()
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["size"]
    properties = schema["properties"]
    assert set(properties) == {"size", "color", "is_loud", "tools", "audio", "extra_body"}
    assert properties["size"]["type"] == "integer"
    assert properties["is_loud"]["type"] == ["boolean", "null"]
    assert {"type": "null"} in properties["color"]["anyOf"]
    assert properties["tools"]["enum"] == [[], False, None]
    assert properties["audio"]["enum"] == [None]
    assert properties["extra_body"]["type"] == ["object", "null"]


def test_the_schema_says_where_unknown_fields_are_ignored():
    schema = Outer.model_json_schema()
    assert schema["additionalProperties"] is schema["$defs"]["Parent"]["additionalProperties"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Lenient"]["additionalProperties"] is True


def test_a_required_field_may_not_be_null_in_the_schema_either():
    schema = Child.model_json_schema()
    assert schema["properties"]["parent"] == {"$ref": "#/$defs/Parent"}
    with pytest.raises(ValidationError):
        Child.model_validate({"parent": None})


def test_unknown_fields_can_be_set_aside_by_name():
    body = {"size": 1, "color": None, "nonsense": 3, "tools": [], "audio": {}, "gone": None}
    known, names = Lenient.without_unknown(body)
    assert names == ["nonsense"]  # what others' APIs have is known, and refused
    assert known.pop("audio") == {}
    assert Lenient.model_validate(known) == Lenient(size=1)
    assert Lenient.without_unknown({"extra_body": {"size": 2, "b": 1}}) == ({"size": 2}, ["b"])
    assert mistake(body, Lenient).param == "nonsense"  # validation alone sets nothing aside
