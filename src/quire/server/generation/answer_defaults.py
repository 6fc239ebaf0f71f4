"""Settings by which the operator changes the answers to all calls.

Plain data. `launch` makes it from the server's options; request bodies and prompt rendering read
it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """The settings of one server."""

    #: Whether each event of a completion or chat stream has the usage so far, and the last event
    #: the usage of the whole call.
    includes_usage: bool = False
    #: Whether log-probabilities of completions and chats name tokens by their ids.
    names_token_ids: bool = False
    #: Whether the prompt omits the tools of a call that allows no tool calls.
    hides_unused_tools: bool = False
