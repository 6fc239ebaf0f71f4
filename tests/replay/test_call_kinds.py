"""The calls that requests of a load become."""

from quire.replay.call_kinds import ChatCalls, TokenCalls


def test_chats_have_openai_fields_alone_unless_lengths_are_exact() -> None:
    assert ChatCalls().fields([0, 101], 5) == {
        "messages": [{"role": "user", "content": "time year"}],
        "max_tokens": 5,
    }
    exact = ChatCalls(ignores_eos=True).fields([0], 5)
    assert (exact["min_tokens"], exact["max_tokens"], exact["ignore_eos"]) == (5, 5, True)


def test_answers_to_token_ids_have_exact_lengths() -> None:
    fields = TokenCalls().fields([7, 8], 3)
    assert (fields["prompt"], fields["min_tokens"], fields["max_tokens"]) == ([7, 8], 3, 3)
    assert fields["ignore_eos"] is True
