"""A plan's load: requests with arrival times and lengths, from a description or a trace.

    prompt=1024,output=128,rate=4        100 requests, 4 a second at random times (Poisson)
    prompt=256-2048,output=16-256,at_once,requests=50,shared=128

or the name of a file with a trace. Token ids are synthetic; only shared prefixes are preserved.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.errors import ConfigurationError
from quire.traces.read import read_trace
from quire.traces.tokens import PromptTokens
from quire.traces.trace import Trace

DEFAULT_NUM_REQUESTS = 100
#: Maximum number of tokens of all requests together. A plan simulates this number in a few seconds.
MOST_TOKENS = 400_000
_VOCABULARY = 1 << 30
_KEYS = ("prompt", "output", "rate", "at_once", "requests", "shared")
_FORM = (
    "prompt=N,output=N and rate=R (requests a second) or at_once, where N may be a range such as"
    " 256-2048; also requests=N and shared=N (tokens that all prompts begin with)"
)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request of a load."""

    #: The arrival time, in seconds since the beginning of the load.
    at_s: float
    #: The prompt's token ids.
    prompt: Sequence[int]
    #: Number of tokens of each answer.
    num_output_tokens: int
    #: Requests share cached prefixes only with requests of the same domain.
    cache_domain: str = ""
    #: Number of answers to the prompt.
    num_choices: int = 1
    #: Number of beams of a beam search, instead of `num_choices`; 0 for a request that samples.
    beam_width: int = 0
    has_grammar: bool = False
    #: The name of the request's adapter; empty for the base model.
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class LengthLoad:
    """A load described by lengths."""

    #: The fewest and the most prompt tokens of a request; lengths are drawn uniformly.
    prompt: tuple[int, int]
    #: The fewest and the most output tokens of a request; lengths are drawn uniformly.
    output: tuple[int, int]
    #: Requests per second; None if all arrive at once.
    rate: float | None
    num_requests: int = DEFAULT_NUM_REQUESTS
    #: Number of tokens in the prefix that all prompts share.
    num_shared: int = 0


def parse_lengths(text: str) -> LengthLoad:
    """Parse a description in the form that the module's docstring shows. Raises
    ConfigurationError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _KEYS or key in found or (key == "at_once") == bool(value):
            raise ConfigurationError(f"load has {part!r:.80}, but must be a file or {_FORM}")
        found[key] = value
    if "prompt" not in found or "output" not in found or ("rate" in found) == ("at_once" in found):
        raise ConfigurationError(f"load is {text!r:.200}, but must be a file or {_FORM}")
    load = LengthLoad(
        _range("prompt", found["prompt"]),
        _range("output", found["output"]),
        _rate(found["rate"]) if "rate" in found else None,
        _count("requests", found.get("requests", str(DEFAULT_NUM_REQUESTS)), 1),
        _count("shared", found.get("shared", "0"), 0),
    )
    if load.num_shared >= load.prompt[0]:
        raise ConfigurationError(
            f"load has shared={load.num_shared}, but must be below the shortest prompt's"
            f" {load.prompt[0]} tokens"
        )
    return load


def draw_lengths(load: LengthLoad, seed: int = 0) -> list[LoadRequest]:
    """Draw a load's requests from a seed; prompts share only their first `num_shared` tokens."""
    rng = random.Random(f"lengths {seed}")
    shared = [rng.getrandbits(30) for _ in range(load.num_shared)]
    requests, at_s = [], 0.0
    for _ in range(load.num_requests):
        num_own = rng.randint(*load.prompt) - load.num_shared
        prompt = shared + [rng.getrandbits(30) for _ in range(num_own)]
        requests.append(LoadRequest(at_s, prompt, rng.randint(*load.output)))
        at_s += rng.expovariate(load.rate) if load.rate is not None else 0.0
    return requests


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that a plan simulates."""

    #: The description, or the name of the trace's file.
    name: str
    #: At least one request, in order of arrival.
    requests: tuple[LoadRequest, ...]
    #: Number of requests at the end of a trace that are left out, since a plan's tokens are
    #: limited.
    num_left_out: int = 0

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence, prompt and answer together."""
        return max(len(each.prompt) + each.num_output_tokens for each in self.requests)


def read_load(text: str, most_tokens: int = MOST_TOKENS) -> Load:
    """Read a load from a trace file, or from a description by lengths.

    A trace is read until its prompts and outputs have `most_tokens` tokens; later requests are left
    out. Raises ConfigurationError, also for a description with more tokens.
    """
    if Path(text).is_file():
        return _from_trace(text, read_trace(Path(text)), most_tokens)
    lengths = parse_lengths(text)
    longest = lengths.prompt[1] + lengths.output[1]
    if lengths.num_requests * longest > most_tokens:
        raise ConfigurationError(
            f"load asks for {lengths.num_requests} requests of up to {longest} tokens, but a plan"
            f" simulates at most {most_tokens} tokens; give fewer requests"
        )
    return Load(text, tuple(draw_lengths(lengths)))


def _from_trace(name: str, trace: Trace, most_tokens: int) -> Load:
    """The load of a trace.

    Leaves out refused requests, and requests without a prompt or an answer.
    """
    tokens = PromptTokens(trace, _VOCABULARY)
    first_s: float | None = None
    found: list[LoadRequest] = []
    num_tokens = num_left_out = 0
    for number, request in enumerate(trace.requests):
        if request.end == "refused" or not (
            request.num_prompt_tokens and request.num_output_tokens
        ):
            continue
        options = request.options
        num_choices = options.beam_width or options.num_choices
        num_tokens += request.num_prompt_tokens + num_choices * request.num_output_tokens
        if num_tokens > most_tokens and found:
            num_left_out += 1
            continue
        first_s = request.at_s if first_s is None else first_s
        found.append(
            LoadRequest(
                request.at_s - first_s,
                tokens.prompt(number),
                request.num_output_tokens,
                str(request.tenant),
                options.num_choices,
                options.beam_width,
                # A beam search obeys no grammar.
                options.has_grammar and not options.beam_width,
                str(options.adapter or ""),
            )
        )
    if not found:
        raise ConfigurationError(f"the trace {name} has no request with a prompt and an answer")
    return Load(name, tuple(found), num_left_out)


def at_once(load: Sequence[LoadRequest]) -> list[LoadRequest]:
    """The same requests in the same order, but all arrive at time 0."""
    return [replace(each, at_s=0.0) for each in load]


def offered_rate(load: Sequence[LoadRequest]) -> float | None:
    """The arrivals per second; None if all arrive at once."""
    span_s = load[-1].at_s - load[0].at_s
    return (len(load) - 1) / span_s if span_s > 0 else None


def _count(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(
            f"load has {name}={text!r:.40}, but must be a whole number from {least} up"
        )
    return int(text)


def _range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    first, last = _count(name, low, 1), _count(name, high or low, 1)
    if last < first:
        raise ConfigurationError(f"load has {name}={text}, but a range begins with its least")
    return first, last


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ConfigurationError(
            f"load has rate={text!r:.40}, but must be a number of requests a second above 0"
        )
    return rate
