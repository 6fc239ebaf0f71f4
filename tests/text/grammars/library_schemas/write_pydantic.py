"""Writes pydantic.json: the JSON schema of each type of pydantic, with values that obey it or not.

    pip install 'pydantic[email]' pydantic-extra-types jsonschema
    python write_pydantic.py > pydantic.json

Each type: what it is, values that pydantic and the schema accept, values that one of them refuses.
"""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional

import jsonschema
import pydantic
from annotated_types import Len
from pydantic import BaseModel, Field, StringConstraints
from pydantic_extra_types.color import Color
from pydantic_extra_types.coordinate import Coordinate
from typing_extensions import TypedDict

UUID = "a1b2c3d4-0000-{}000-8000-0123456789ab"
MAX_64 = 2**63 - 1
Letter = enum.Enum("Letter", {"A": "a", "B": "b"})
Number = enum.IntEnum("Number", {"ONE": 1, "TWO": 2})
Mixed = enum.Enum("Mixed", {"A": "a", "TWO": 2})
Short = Annotated[str, StringConstraints(min_length=1, max_length=3)]
Keyed = Annotated[str, StringConstraints(pattern="^k_")]


class Plain(BaseModel):
    a: int
    b: str | None = None


class Closed(BaseModel, extra="forbid"):
    a: int


class Open(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, int]
    a: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Chain(BaseModel):
    value: int
    next: Optional["Chain"] = None


class Tree(BaseModel):
    name: str
    children: list["Tree"] = []


class Documented(BaseModel):
    model_config = pydantic.ConfigDict(json_schema_extra={"my_note": "n", "x-order": 1})
    a: int = Field(description="d", examples=[1], deprecated=True, json_schema_extra={"unit": "kg"})


class Root(pydantic.RootModel[list[int]]):
    pass


class Named(NamedTuple):
    x: int
    y: str = "a"


class Typed(TypedDict):
    a: int
    b: NotRequired[str]


@dataclasses.dataclass
class Data:
    a: int
    b: str = "x"


TYPES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "str": (str, ["", "ü"], [1, None]),
    "constr": (
        Annotated[str, StringConstraints(min_length=2, max_length=4, pattern="^[a-z]+$")],
        ["ab", "abcd"],
        ["a", "abcde", "AB"],
    ),
    "EmailStr": (pydantic.EmailStr, ["desk@example.com"], ["desk", "desk@"]),
    "NameEmail": (pydantic.NameEmail, ["Desk <desk@example.com>", "desk@example.com"], ["Desk <>"]),
    "AnyUrl": (pydantic.AnyUrl, ["https://example.com/a?b#c", "ftp://a.b"], ["example"]),
    "HttpUrl": (pydantic.HttpUrl, ["https://example.com"], ["example"]),
    "PostgresDsn": (
        pydantic.PostgresDsn,
        ["postgres://user:pass@host1:5432,host2/app?a=b"],
        ["postgres", "//host"],
    ),
    "RedisDsn": (pydantic.RedisDsn, ["redis://localhost:6379/0"], ["redis"]),
    "UUID": (uuid.UUID, [UUID.format(4)], ["a1b2"]),
    **{
        f"UUID{version}": (
            getattr(pydantic, f"UUID{version}"),
            [UUID.format(version)],
            [UUID.format(9 - version), "a1b2"],
        )
        for version in (1, 3, 4, 5, 6, 7, 8)
    },
    "Decimal": (decimal.Decimal, [1.5, "1.5", "-0.25"], [None, []]),
    "Decimal of 6 digits": (
        Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)],
        [1.5, "1234.56"],
        [None, []],
    ),
    "Fraction": (fractions.Fraction, [0.5, "1/3", "7"], ["1/0", "a", "1/"]),
    "date": (datetime.date, ["2024-02-29"], ["2023-02-29", "2024-1-1"]),
    "time": (datetime.time, ["12:30:00Z", "00:00:00.5+01:00"], ["25:00:00Z", "12"]),
    "datetime": (datetime.datetime, ["2024-01-01T00:00:00Z"], ["2024-13-01T00:00:00Z"]),
    "timedelta": (datetime.timedelta, ["P1DT2H", "PT1S"], ["P1S", "P"]),
    "IPv4Address": (ipaddress.IPv4Address, ["127.0.0.1"], ["127.0.0.256", "::1"]),
    "IPv6Address": (ipaddress.IPv6Address, ["::1", "2001:db8::7334"], ["127.0.0.1", ":::"]),
    "IPv4Network": (
        ipaddress.IPv4Network,
        ["10.0.0.0/8", "172.16.0.0/12", "0.0.0.0/0", "192.168.1.128/25", "1.2.3.4/32"],
        ["10.0.0.1/8", "172.17.0.0/12", "10.0.0.0/33"],
    ),
    "IPv6Network": (
        ipaddress.IPv6Network,
        ["2001:db8::/32", "::/0", "2001:db8:0:1200::/56"],
        ["2001:db8::1/32", "2001:db8::/129", "10.0.0.0/8"],
    ),
    "IPv4Interface": (ipaddress.IPv4Interface, ["10.0.0.1/8", "10.0.0.1"], ["10.0.0.1/33"]),
    "IPv6Interface": (ipaddress.IPv6Interface, ["2001:db8::1/32"], ["2001:db8::1/129"]),
    "IPvAnyAddress": (pydantic.IPvAnyAddress, ["127.0.0.1", "::1"], ["localhost"]),
    "IPvAnyNetwork": (pydantic.IPvAnyNetwork, ["10.0.0.0/8", "::/0"], ["10.0.0.1/8"]),
    "IPvAnyInterface": (pydantic.IPvAnyInterface, ["10.0.0.1/8", "::1"], ["10.0.0.1/40"]),
    "bytes": (bytes, ["ab"], [1]),
    "conbytes": (Annotated[bytes, Len(1, 3)], ["ab"], ["", "abcd"]),
    "Base64Bytes": (pydantic.Base64Bytes, ["QUI=", ""], ["Q", "Q=="]),
    "Base64Str": (pydantic.Base64Str, ["QUJD"], ["QUI"]),
    "Base64UrlStr": (pydantic.Base64UrlStr, ["QUI=", "QUJD"], ["QUI", "Q"]),
    "Enum": (Letter, ["a", "b"], ["A", "c"]),
    "IntEnum": (Number, [1, 2], [3, "ONE"]),
    "mixed Enum": (Mixed, ["a", 2], ["b", 1]),
    "Literal": (Literal["a", 1, None, True], ["a", 1, None, True], ["b", 2, False]),
    "Optional": (int | None, [1, None], ["a"]),
    "Union": (int | str | None, [1, "a", None], [1.5, True]),
    "discriminated union": (
        Annotated[Cat | Dog, Field(discriminator="kind")],
        [{"kind": "cat"}, {"kind": "dog", "name": "x"}],
        [{"kind": "dog"}, {"kind": "cow"}, {}],
    ),
    "dict[str, int]": (dict[str, int], [{}, {"a": 1}], [{"a": "x"}]),
    "dict[int, str]": (dict[int, str], [{"1": "a"}], [{"1": 1}]),
    "dict[Literal, bool]": (
        dict[Literal["a", "b"], bool],
        [{}, {"a": True}, {"a": True, "b": False}],
        [{"c": True}, {"a": 1}],
    ),
    "dict[Enum, int]": (dict[Letter, int], [{"a": 1, "b": 2}], [{"c": 1}]),
    "dict[constr, int]": (dict[Keyed, int], [{"k_a": 1}], [{"k_a": "x"}]),
    "dict[short, int]": (dict[Short, int], [{"abc": 1}], [{"": 1}, {"abcd": 1}]),
    "dict[UUID, int]": (dict[uuid.UUID, int], [{UUID.format(4): 1}], [{"a": 1}]),
    "dict[date, int]": (dict[datetime.date, int], [{"2024-02-29": 1}], [{"2023-02-29": 1}]),
    "condict": (Annotated[dict[str, int], Len(1, 2)], [{"a": 1}], [{}]),
    "defaultdict": (collections.defaultdict[str, int], [{"a": 1}], [{"a": "x"}]),
    "Counter": (collections.Counter[str], [{"a": 1}], [{"a": "x"}]),
    "Mapping": (Mapping[str, int], [{"a": 1}], [{"a": "x"}]),
    "list": (list[int], [[], [1, 2]], [["a"], {}]),
    "conlist": (Annotated[list[int], Len(1, 3)], [[1], [1, 2, 3]], [[], [1, 2, 3, 4]]),
    "set[Literal]": (
        set[Literal["a", "b", "c"]],
        [[], ["b"], ["c", "a"], ["b", "c", "a"]],
        [["a", "a"], ["d"], ["a", "b", "a"]],
    ),
    "set[Enum]": (set[Letter], [["b", "a"]], [["a", "a"], ["c"]]),
    "frozenset[bool]": (frozenset[bool], [[True, False], []], [[True, True], [1]]),
    "conset": (
        Annotated[set[Literal["a", "b", "c", "d", "e", "f"]], Len(1, 2)],
        [["f"], ["f", "a"]],
        [[], ["a", "a"], ["a", "b", "c"]],
    ),
    "tuple": (tuple[int, str], [[1, "a"]], [[1], [1, "a", 2], ["a", 1]]),
    "tuple of any length": (tuple[int, ...], [[], [1, 2]], [["a"]]),
    "empty tuple": (tuple[()], [[]], [[1]]),
    "NamedTuple": (Named, [[1, "a"]], [[], ["a"]]),
    "TypedDict": (Typed, [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": "x"}]),
    "dataclass": (Data, [{"a": 1}], [{}, {"a": "x"}]),
    "deque": (collections.deque[int], [[1]], [["a"]]),
    "Sequence": (Sequence[int], [[1]], [["a"]]),
    "Iterable": (Iterable[int], [[1]], [["a"]]),
    "BaseModel": (Plain, [{"a": 1}, {"a": 1, "b": None}], [{}, {"a": "x"}, {"a": 1, "b": 2}]),
    "model without others": (Closed, [{"a": 1}], [{"a": 1, "c": 2}]),
    "model with others": (Open, [{"a": 1, "c": 2}], [{"a": 1, "c": "x"}]),
    "RootModel": (Root, [[1]], [["a"]]),
    "recursive": (Chain, [{"value": 1, "next": {"value": 2}}], [{"value": 1, "next": {}}]),
    "recursive list": (Tree, [{"name": "a", "children": [{"name": "b"}]}], [{"children": []}]),
    "documented": (Documented, [{"a": 1}], [{}, {"a": "x"}]),
    "int": (int, [0, -7], ["a", 1.5]),
    "conint": (Annotated[int, Field(gt=1, lt=9, multiple_of=2)], [2, 8], [1, 3, 10]),
    "float": (float, [0, 1.5, 1e3], ["a"]),
    "confloat": (Annotated[float, Field(ge=0, le=1)], [0, 0.5, 1], [-0.1, 1.1]),
    "PositiveInt": (pydantic.PositiveInt, [1], [0]),
    "NonPositiveInt": (pydantic.NonPositiveInt, [0, -1], [1]),
    "NonNegativeFloat": (pydantic.NonNegativeFloat, [0, 0.5], [-0.5]),
    "bounds of 64 bits": (
        Annotated[int, Field(ge=-MAX_64 - 1, le=MAX_64)],
        [0, -(10**18), 9 * 10**18],
        [MAX_64 + 1, -MAX_64 - 2, 10**19],
    ),
    "bounds of 64 bits without sign": (Annotated[int, Field(ge=0, lt=2**64)], [0, 9], [-1, 2**64]),
    "int32": (
        Annotated[int | None, Field(json_schema_extra={"format": "int32"})],
        [1, None],
        ["a"],
    ),
    "bool": (bool, [True, False], [2, "x"]),
    "None": (None, [None], [0]),
    "complex": (complex, ["1+2j"], [[]]),
    "SecretStr": (pydantic.SecretStr, ["a"], [1]),
    "Secret[int]": (pydantic.Secret[int], [1], ["a"]),
    "Json": (pydantic.Json, ["[1]"], [1]),
    "Json[list[int]]": (pydantic.Json[list[int]], ["[1]"], [1]),
    "Path": (pathlib.Path, ["a/b"], [1]),
    "DirectoryPath": (pydantic.DirectoryPath, ["/"], [1]),
    "NewPath": (pydantic.NewPath, ["/no-such-file"], [1]),
    "Pattern": (
        re.Pattern,
        ["^a+(b|c)*$", r"\d{3}", "[a-z]?", "(?:(a))"],
        ["a(", "*a", "[a", "\\"],
    ),
    "ByteSize": (pydantic.ByteSize, [10, "10kb"], [None]),
    "Any": (Any, [1, "a", None, {}], []),
    "JsonValue": (pydantic.JsonValue, [[1, None]], []),
    "Color": (Color, ["red", "#00ff00"], [1]),
    "Coordinate": (Coordinate, [{"latitude": 1.5, "longitude": "2.5"}], [1]),
}
REFUSED = {"set[str]": set[str], "set[int]": set[int], "frozenset[int]": frozenset[int]}
"""Types whose schemas have uniqueItems for values that can't be listed."""


def lines() -> Iterator[str]:
    """One for each type. Raises ValueError where pydantic thinks otherwise of a value."""
    for name, (kind, good, bad) in TYPES.items():
        adapter = pydantic.TypeAdapter(kind)
        schema = adapter.json_schema()
        validator = jsonschema.Draft202012Validator(schema)
        for values, expected in ((good, True), (bad, False)):
            for value in values:
                if (is_accepted(adapter, value) and validator.is_valid(value)) != expected:
                    raise ValueError(f"{name}: {value!r}")
        found = {"schema": schema, "good": good, "bad": bad}
        yield f"{json.dumps(name)}: {json.dumps(found, ensure_ascii=False)}"
    for name, kind in REFUSED.items():
        found = {"schema": pydantic.TypeAdapter(kind).json_schema(), "is_refused": True}
        yield f"{json.dumps(name)}: {json.dumps(found)}"


def is_accepted(adapter: pydantic.TypeAdapter[Any], value: Any) -> bool:
    """Whether pydantic takes the value."""
    try:
        adapter.validate_json(json.dumps(value))
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    print("{\n" + ",\n".join(lines()) + "\n}")
