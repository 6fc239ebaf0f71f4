"""Turns requests of a load into calls: token ids of exact lengths, or chats of words.

Token ids need a server that takes them and `ignore_eos`: quire, vLLM and SGLang do. Chats have only
fields of OpenAI's API, so any server with that API takes them. Their answers end by themselves,
except with `ignores_eos`.
"""

from typing import Any, Protocol

WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "kid",
    "body",
    "information",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "education",
]
"""Common words, each of which is one token in most vocabularies."""


class CallKind(Protocol):
    """How a request of a load becomes a call."""

    #: The path of the server's endpoint.
    path: str

    def fields(self, prompt: list[int], num_output_tokens: int) -> dict[str, Any]:
        """The fields of the body that hold the prompt and the length of the answer."""
        ...


class TokenCalls:
    """Prompts as token ids, with answers of exactly the given length."""

    path = "/v1/completions"

    def fields(self, prompt: list[int], num_output_tokens: int) -> dict[str, Any]:
        """See `CallKind`."""
        return {
            "prompt": prompt,
            "max_tokens": num_output_tokens,
            "min_tokens": num_output_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }


class ChatCalls:
    """Prompts as one message of common words, about one for each token."""

    path = "/v1/chat/completions"

    def __init__(self, ignores_eos: bool = False) -> None:
        #: Whether answers have exactly the given length, which needs vLLM's field `ignore_eos`.
        self.ignores_eos = ignores_eos

    def fields(self, prompt: list[int], num_output_tokens: int) -> dict[str, Any]:
        """See `CallKind`."""
        text = " ".join(WORDS[token % len(WORDS)] for token in prompt)
        messages = [{"role": "user", "content": text}]
        fields: dict[str, Any] = {"messages": messages, "max_tokens": num_output_tokens}
        if self.ignores_eos:
            fields |= {"min_tokens": num_output_tokens, "ignore_eos": True}
        return fields
