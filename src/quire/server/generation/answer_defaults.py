"""Defaults that the operator sets for every answer, whatever its call asks for.

Plain data. `launch` makes it from the server's options; bodies and the rendering of prompts read
it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """The defaults of one server."""

    #: Each event of a stream of a completion or chat has the usage so far, and the last one has the
    #: usage of the whole call.
    includes_usage: bool = False
    #: Log-probabilities of completions and chats name tokens by their ids.
    names_token_ids: bool = False
    #: Tools are not shown to the model in a call that allows no tool calls.
    hides_unused_tools: bool = False
