"""Expressions for formats, against the functions of Python that read such texts."""

import base64
import datetime
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from tests.text.grammars.walks import accepts, random_answer

from quire.core.structured_outputs import StructuredOutputsParams
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of
from quire.text.grammars.schemas.patterns.format_patterns import OF_LIBRARIES, OF_NAMES, STANDARD

READERS: dict[str, Callable[[str], Any]] = {
    "base64": lambda text: base64.b64decode(text, validate=True),
    "base64url": base64.urlsafe_b64decode,
    "date": datetime.date.fromisoformat,
    "hex": lambda text: int(text or "0", 16),
    "ip": ipaddress.ip_address,
    "ipv4interface": ipaddress.IPv4Interface,
    "ipv4network": ipaddress.IPv4Network,
    "ipv6interface": ipaddress.IPv6Interface,
    "ipv6network": ipaddress.IPv6Network,
    "ipvanynetwork": ipaddress.ip_network,
    "regex": re.compile,
    **{
        f"uuid{version}": lambda text, version=version: [1][uuid.UUID(text).version - version]
        for version in range(1, 9)
    },
}


@pytest.mark.parametrize("name", READERS)
def test_strings_that_a_format_allows_can_be_parsed(compiler: GrammarCompiler, name: str) -> None:
    schema = {"type": "string", "format": name}
    grammar = grammar_of(StructuredOutputsParams(json=schema))
    num_read = 0
    for seed in range(6):
        answer = random_answer(compiler, grammar, seed, max_tokens=60)
        if answer is not None and (name != "date" or not answer.startswith(b'"0000')):
            READERS[name](json.loads(answer))
            num_read += 1
    assert num_read


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("json-pointer", ["", "/a~0b/~1", "/"], ["a", "/~", "/~2"]),
        ("relative-json-pointer", ["0#", "1/a", "0"], ["/a", "01", "-1", "0##"]),
        ("uri-reference", ["", "/a?b#c", "//h/p", "a/b", "mailto:a"], ["\\", "a b", "%zz", ":a"]),
        ("iri", ["http://ƒøø.ßår/?∂éœ=πîx#πîüx"], ["ƒøø", "http:// "]),
        ("uri-template", ["http://a/{b}{?c,d*}{+e:3}"], ["{", "{a", "a b"]),
        ("idn-hostname", ["例え.ほん", "a-b.c"], ["-a", "a..b", "〮"]),
        ("idn-email", ["실례@실례.테스트"], ["실례", "@"]),
        ("fraction", ["1/2", "-3"], ["1/0", "/2"]),
        ("time-local", ["12:30", "12:30:59.5"], ["12:30Z", "24:00"]),
        ("multi-host-uri", ["mongodb://u:p@a:1,b:2/c?d=e"], ["a:1", "//a"]),
        ("name-email", ["Help Desk <a@b.co>", "a@b.co"], ["Help a@b.co", "<a@b.co"]),
    ],
)
def test_formats(compiler: GrammarCompiler, name: str, good: list[str], bad: list[str]) -> None:
    params = StructuredOutputsParams(json={"type": "string", "format": name})
    for text in good:
        assert accepts(compiler, params, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not accepts(compiler, params, json.dumps(text, ensure_ascii=False)), text


def test_networks_have_no_bits_behind_the_prefix() -> None:
    networks = re.compile(OF_LIBRARIES["ipv4network"])
    draw = random.Random(7)
    for _ in range(2_000):
        length = draw.randint(0, 32)
        address = ipaddress.IPv4Address(draw.getrandbits(32) >> (s := draw.randint(0, 32)) << s)
        text = f"{address}/{length}"
        is_network = not int(address) & (2 ** (32 - length) - 1)
        assert bool(networks.fullmatch(text)) == is_network, text


def test_no_format_has_two_meanings() -> None:
    assert not STANDARD.keys() & OF_LIBRARIES.keys()
    assert not OF_NAMES.keys() & (STANDARD.keys() | OF_LIBRARIES.keys())
