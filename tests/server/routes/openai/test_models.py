"""/v1/models: the one model, by its name."""

import openai
import pytest


def test_the_model_is_listed_and_found_by_name(client):
    (listed,) = client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == ("embedded", "model", "quire")
    assert listed.max_model_len == 1024
    assert client.models.retrieve("embedded") == listed


@pytest.mark.parametrize("name", ["gpt-4", "someone/some-model"])
def test_other_models_are_not_found(client, name):
    with pytest.raises(openai.NotFoundError, match="this server has 'embedded'") as caught:
        client.models.retrieve(name)
    assert caught.value.code == "model_not_found"
