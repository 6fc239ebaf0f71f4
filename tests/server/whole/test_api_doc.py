"""docs/api.md lists every field as it is: those that the code has, refuses, and that OpenAI has."""

import re
from pathlib import Path

import pytest
from openai.types import EmbeddingCreateParams
from tests.server.asking import CHAT, COMPLETIONS, RESPONSES, openai_fields

from quire import errors
from quire.hub.local_models import ModelInUseError, ModelNotHereError
from quire.server.adapter_names import UnknownAdapterError
from quire.server.batch.file_store import StorageError
from quire.server.generation.body import StreamOptions
from quire.server.hosted_model import ModelLoadError, ModelNotLoadedError, NoRoomError
from quire.server.http import guard
from quire.server.http.errors import _CODES
from quire.server.routes.admin.health import NotReadyError
from quire.server.routes.admin.page import NoFileError
from quire.server.routes.openai.batches import UnknownBatchError
from quire.server.routes.openai.chat_body import ChatCompletionRequest
from quire.server.routes.openai.completions import CompletionRequest
from quire.server.routes.openai.embeddings import EmbeddingRequest
from quire.server.routes.openai.responses.request_body import ResponsesRequest
from quire.server.routes.openai.responses.stored_responses import UnknownResponseError
from quire.server.routes.openai.uploaded_files import UnknownFileError
from quire.server.routes.unsupported import FAMILIES, NotSupportedError
from quire.server.routes.vllm.scoring import RerankRequest, ScoreRequest
from quire.server.routes.vllm.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.service import UnknownModelError

DOC = Path(__file__).parents[3] / "docs" / "api.md"
BOTH = "Both, /v1/completions and /v1/chat/completions"
PATHS = ("completions", "chat/completions", "responses")
STATUSES = {"works", "ours", "hint", "refused"}


def sections():
    """Heading -> text."""
    _, *parts = re.split(r"^## (.+)$", DOC.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def fields_of(heading):
    """Field -> status, of a section's table. Each field stands there once."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", sections()[heading], flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)), heading
    return dict(rows)


def expected(body, known):
    """What the table of a body must say, given the fields that OpenAI's package knows."""
    found = {name: "works" if name in known else "ours" for name in body.model_fields}
    if body.takes_extra_body:
        found["extra_body"] = "ours"
    return found | dict.fromkeys(body.hints, "hint") | dict.fromkeys(body.not_supported, "refused")


TABLES = [
    (CompletionRequest, (BOTH, "/v1/completions"), COMPLETIONS),
    (ChatCompletionRequest, (BOTH, "/v1/chat/completions"), CHAT),
    (ResponsesRequest, ("/v1/responses",), RESPONSES),
    (StreamOptions, ("stream_options",), "stream_options"),
]


@pytest.mark.parametrize(("body", "headings", "api"), TABLES)
def test_the_tables_say_what_the_code_does(body, headings, api):
    listed = {name: status for heading in headings for name, status in fields_of(heading).items()}
    assert listed == expected(body, openai_fields(api))


@pytest.mark.parametrize(("body", "headings", "api"), TABLES)
def test_every_field_that_openais_client_can_send_is_listed(body, headings, api):
    known = openai_fields(api)
    assert len(known) >= 2
    assert known <= {name for heading in headings for name in fields_of(heading)}


@pytest.mark.parametrize(
    ("body", "heading"),
    [
        (TokenizeRequest, "/tokenize"),
        (DetokenizeRequest, "/detokenize"),
        (ScoreRequest, "/score"),
        (RerankRequest, "/rerank"),
    ],
)
def test_the_tables_of_the_token_routes_are_whole(body, heading):
    assert fields_of(heading) == expected(body, set())


def test_the_table_of_embeddings_is_whole():
    known = set(EmbeddingCreateParams.__annotations__)
    assert fields_of("/v1/embeddings") == expected(EmbeddingRequest, known)
    assert known <= fields_of("/v1/embeddings").keys()


def test_no_field_stands_in_two_tables_of_one_api():
    shared = set(fields_of(BOTH))
    assert not shared & set(fields_of("/v1/completions"))
    assert not shared & set(fields_of("/v1/chat/completions"))


def test_every_row_has_a_status_and_every_refusal_its_exceptions():
    for heading in (BOTH, *(f"/v1/{name}" for name in PATHS), "stream_options"):
        text = sections()[heading]
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) ?\|$", text, flags=re.MULTILINE)
        assert {status for _, status, _ in rows} <= STATUSES
        for name, status, note in rows:
            bodies = (CompletionRequest, ChatCompletionRequest, ResponsesRequest, StreamOptions)
            harmless = [value for body in bodies for value in body.not_supported.get(name, ())]
            if status == "refused" and harmless:
                assert re.search("unless|but for", note), name


def test_the_codes_of_errors_are_those_that_clients_can_meet():
    rows = re.findall(r"^\| \d+ \| (.*?) \|", sections()["Errors"], flags=re.MULTILINE)
    listed = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.QuireError)
        and not issubclass(kind, errors.ConfigurationError)
    ]
    more = (NotReadyError, NotSupportedError, UnknownModelError, UnknownResponseError)
    more += (ModelLoadError, ModelNotLoadedError, NoRoomError, NoFileError)
    more += (ModelNotHereError, ModelInUseError)
    more += (UnknownAdapterError, UnknownBatchError, UnknownFileError, StorageError)
    codes = {kind.code for kind in (*kinds, *more)} | set(_CODES.values())
    codes |= set(guard.CODES.values())
    inner = {errors.SchedulerStalledError.code, errors.NoReplicaError.code}  # met by no client
    assert codes - inner == listed


def test_the_families_that_are_named_are_refused():
    named = set(re.findall(r"`/v1/(\w+)`", sections()["Other paths"]))
    assert len(named) > 5
    assert named - {"models"} <= set(FAMILIES)
