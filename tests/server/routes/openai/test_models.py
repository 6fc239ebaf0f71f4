"""/v1/models: the one model, by its name."""

import anthropic
import openai
import pytest


def test_the_model_is_listed_and_found_by_name(client):
    (listed,) = client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == ("embedded", "model", "quire")
    assert listed.max_model_len == 1024
    assert client.models.retrieve("embedded") == listed


def test_anthropics_client_finds_it_in_its_own_form(server, http):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        page = client.models.list(limit=5)
        (listed,) = list(page)
        assert (listed.type, listed.id, listed.display_name) == ("model", "embedded", "embedded")
        assert listed.created_at.year >= 2020 and listed.max_input_tokens == 1024
        assert not page.has_more and page.first_id == page.last_id == "embedded"
        assert client.models.retrieve("embedded") == listed
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("claude")


@pytest.mark.parametrize("name", ["gpt-4", "someone/some-model"])
def test_other_models_are_not_found(client, name):
    with pytest.raises(openai.NotFoundError, match="this server has 'embedded'") as caught:
        client.models.retrieve(name)
    assert caught.value.code == "model_not_found"
