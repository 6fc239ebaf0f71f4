"""The flags of `quire serve`: one for each field of ServerConfig; only what was given counts."""

from dataclasses import fields

import pytest

from quire.cli.flags import engine_options, server_options
from quire.cli.parser import build_parser
from quire.server.config import ServerConfig

WORDS = (
    "serve org/model --host 0.0.0.0 --port 81 --served-model-name m --drain-timeout-s 3"
    " --keep-alive-s 2.5 --api-key alice:alice-key --api-key bob:bob-key-1 --api-key-file keys"
    " --allowed-origins https://a.example --allowed-origins https://b.example"
    " --max-queued-requests 7 --max-tenant-requests 4 --max-tenant-tokens-per-minute 1000"
    " --max-body-bytes 1024 --max-prompts 2 --max-inputs 9 --max-n 3 --max-choices 5"
    " --max-stop-strings 6 --max-list-length 8 --response-store-bytes 4096"
    " --default-deadline-s 1.5 --heartbeat-timeout-s 9 --max-engine-restarts 0"
    " --log-level debug --log-format json --otlp-endpoint http://127.0.0.1:4318"
    " --record load.jsonl --record-block-tokens 128 --record-time-ms 10"
    " --tool-call-parser hermes --reasoning-parser granite --chat-template t.jinja"
    ' --default-chat-template-kwargs {"enable_thinking":false} --unknown-fields ignore'
    " --return-tokens-as-token-ids --enable-force-include-usage"
    " --exclude-tools-when-tool-choice-none --lora-modules a=/a b=/b"
    " --routing-policy least_work --ray-address auto --replica-cpus 2 --replica-gpus 0.5"
    " --cluster-key-file key --link-heartbeat-s 1 --agents a:1 b:2 --replicas 3 --max-replicas 5"
    " --scale-wait-s 0.5 --max-connections 500 --max-connections-per-address 50"
    " --idle-unload 60 --manage-models"
    " --models models.yaml --models-memory 4096 --models-wait-s 7 --models-keep-processes"
    " --batch-dir batches --max-batch-file-bytes 1000 --max-tenant-batch-bytes 2000"
    " --max-total-body-bytes 4096 --max-tenant-body-bytes 2048 --metrics-names vllm"
    " --allowed-hosts a.example --no-page"
)


def test_every_field_of_the_server_has_its_flag() -> None:
    given = server_options(build_parser().parse_args(WORDS.split()))
    assert set(given) == {field.name for field in fields(ServerConfig)}
    assert given["api_keys"] == ("alice:alice-key", "bob:bob-key-1")
    assert given["allowed_origins"] == ("https://a.example", "https://b.example")
    server = ServerConfig(**given | {"max_body_bytes": int(given["max_body_bytes"])})
    unchanged = ServerConfig()
    for field in fields(ServerConfig):
        assert getattr(server, field.name) != getattr(unchanged, field.name), field.name


def test_omitted_flags_yield_no_server_options() -> None:
    assert server_options(build_parser().parse_args(["serve"])) == {}


@pytest.mark.parametrize("words", ["serve a/b", "serve --model a/b", "serve a/b --model a/b"])
def test_the_model_may_come_by_its_place_or_as_a_flag(words: str) -> None:
    assert engine_options(build_parser().parse_args(words.split())) == {"model": "a/b"}


@pytest.mark.parametrize("words", ["serve a/b --model c/d", "serve --model c/d a/b"])
def test_two_models_are_one_too_many(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(words.split())
    assert "the model is given twice" in capsys.readouterr().err


def test_the_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    printed = capsys.readouterr().out
    groups = ["server", "access", "limits", "recovery", "logging"]
    groups += ["model", "memory", "scheduling", "computation"]
    places = [printed.index(f"\n{group}:\n") for group in groups]
    assert places == sorted(places)
    assert "open generations of all tenants; above: 429 (1024)" in " ".join(printed.split())
