"""What OpenAI's clients know and quire has not is refused by name, with OpenAI's shape."""

import re
from pathlib import Path

import openai
import pytest

from quire.server.routes.unsupported import FAMILIES

SERVED = {"batches", "chat", "completions", "embeddings", "files", "models", "responses"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rest", ["", "/some-id/more"])
def test_a_family_is_refused_by_name(http, family, rest):
    for method in ("POST", "GET", "DELETE"):
        answer = http.request(method, f"/v1/{family}{rest}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "not_supported"
        assert error["message"].startswith(f"/v1/{family}{rest} is not supported by quire;")


def test_openais_client_says_so(client):
    with pytest.raises(openai.NotFoundError, match="/v1/moderations is not supported") as caught:
        client.moderations.create(input="hello")
    assert caught.value.code == "not_supported"


def test_stored_chats_are_refused_and_wrong_methods_told(http):
    assert http.get("/v1/chat/completions/x").json()["error"]["code"] == "not_supported"
    answer = http.get("/v1/chat/completions")
    assert answer.status_code == 405


def test_files_and_batches_are_off_without_a_folder(http, client):
    for path in ("/v1/files", "/v1/files/file-1", "/v1/batches", "/v1/batches/batch_1"):
        error = http.get(path).json()["error"]
        assert error["code"] == "not_supported" and "--batch-dir" in error["message"]
    with pytest.raises(openai.NotFoundError, match="--batch-dir"):
        client.files.create(file=("a", b"x"), purpose="batch")


def test_other_paths_are_simply_not_there(http):
    error = http.get("/v1/nonsense").json()["error"]
    assert error["code"] != "not_supported"


def test_every_family_that_openais_client_knows_is_served_or_refused():
    folder = Path(openai.__file__).parent / "resources"
    known = {
        family
        for path in folder.rglob("*.py")
        for family in re.findall(r'"/([a-z_]+)[/"]', path.read_text(encoding="utf-8"))
    }
    assert {"responses", "files", *SERVED} <= known  # the search finds them
    assert known <= {*FAMILIES, *SERVED}


def test_adapters_are_refused_by_a_server_without(http):
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/x"})
    assert answer.status_code == 400 and "--enable-lora" in answer.json()["error"]["message"]
