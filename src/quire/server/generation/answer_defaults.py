"""What the operator has every answer have, whether or not its call asks for it.

Plain data. Made by `launch` of the server's options, read by bodies and by what renders prompts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """Of one server.

    includes_usage: streams of completions and chats have the usage so far in each event, and end
    with that of the whole call. names_token_ids: their log-probabilities name tokens by their ids.
    hides_unused_tools: a call that allows no calls of tools does not show them to the model.
    """

    includes_usage: bool = False
    names_token_ids: bool = False
    hides_unused_tools: bool = False
