"""Batches through OpenAI's client on a running server: answers, a kill, tenants, live calls."""

import io
import json
import signal
import socket
import time

import httpx
import openai
import pytest
from tests.server.launching import SEED, launched

from quire.server.batch.background import num_generations

OPTIONS = {"num_blocks": 512, "max_num_seqs": 4, "max_model_len": 512, "seed": SEED}
WAIT_S = 60
WINDOW = "24h"
ENDPOINT = "/v1/completions"


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def completion(number, **fields):
    body = {"prompt": f"def f{number}(", "max_tokens": 24, "seed": number} | fields
    return {"custom_id": f"call-{number}", "method": "POST", "url": ENDPOINT, "body": body}


def upload(client, calls):
    text = "".join(json.dumps(call) + "\n" for call in calls)
    return client.files.create(file=("calls.jsonl", text.encode()), purpose="batch")


def begin(client, calls, **fields):
    file = upload(client, calls)
    wish = {"endpoint": ENDPOINT, "completion_window": WINDOW} | fields
    return client.batches.create(input_file_id=file.id, **wish)


def wait(client, batch_id, *statuses):
    until_s = time.monotonic() + WAIT_S
    while (batch := client.batches.retrieve(batch_id)).status not in statuses:
        assert time.monotonic() < until_s, batch
        time.sleep(0.02)
    return batch


def lines_of(client, file_id):
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found), "a call was answered twice"
    return by_id


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    keys = ["alice:alice-key-1", "bob:bob-key-1", "operator:operator-key-1"]
    with launched(OPTIONS, batch_dir=str(folder), api_keys=keys, max_batch_file_bytes=5000) as run:
        run.batch_dir = folder
        run.operator = {"Authorization": "Bearer operator-key-1"}
        yield run


@pytest.fixture
def alice(server):
    with client_of(server, "alice-key-1") as client:
        yield client


def test_a_batch_is_answered_in_two_files(alice):
    calls = [completion(n) for n in range(6)]
    calls += [completion(6, max_tokens=-3), completion(7, stream=True)]
    batch = begin(alice, calls, metadata={"job": "nightly"})
    assert batch.status == "validating" and batch.metadata == {"job": "nightly"}
    done = wait(alice, batch.id, "completed")
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (8, 6, 2)
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    answers, errors = (lines_of(alice, each) for each in (done.output_file_id, done.error_file_id))
    for n in range(6):
        line = answers[f"call-{n}"]
        live = alice.completions.create(model="embedded", **completion(n)["body"])
        assert line["response"]["body"]["choices"][0]["text"] == live.choices[0].text
        assert line["response"]["request_id"] and line["error"] is None
    assert {line["response"]["status_code"] for line in errors.values()} == {400}
    assert errors["call-7"]["response"]["body"]["error"]["param"] == "stream"
    assert next(iter(alice.batches.list(limit=1))).id == batch.id


def test_files_are_listed_read_and_deleted_by_their_owner_alone(server, alice):
    file = upload(alice, [completion(1)])
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "calls.jsonl")
    assert alice.files.retrieve(file.id) == file
    assert next(iter(alice.files.list())).id == file.id
    assert json.loads(alice.files.content(file.id).text) == completion(1)
    with client_of(server, "bob-key-1") as bob:
        assert list(bob.files.list()) == [] == list(bob.batches.list())
        for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(file.id)
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window=WINDOW)
        batch = begin(alice, [completion(1)])
        for ask in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
    wait(alice, batch.id, "completed")
    assert alice.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        alice.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"endpoint": "/v1/completion"}, "did you mean /v1/completions"),
        ({"completion_window": "1d"}, "completion_window is '1d'"),
        ({"completion_window": "721h"}, "from 1h to 720h"),
        ({"metadata": {"a": "x" * 513}}, "metadata may have 16 fields"),
        ({"extra_body": {"output_expires_after": {"seconds": 1}}}, "not supported yet"),
    ],
)
def test_wishes_that_can_t_be_obeyed_are_refused(alice, fields, reason):
    with pytest.raises(openai.BadRequestError, match=reason):
        begin(alice, [completion(1)], **fields)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"file": ("a", b"x"), "purpose": (None, "fine-tune")}, "purpose is 'fine-tune'"),
        ({"file": ("a", b"x")}, "no field 'purpose'"),
        ({"purpose": (None, "batch")}, "no field 'file'"),
        ({"file": ("a", b"x"), "expires_after[seconds]": (None, "9")}, "is not supported"),
    ],
)
def test_forms_that_can_t_be_obeyed_are_refused(server, alice, form, reason):
    answer = server.http.post(
        "/v1/files", files=form, headers={"Authorization": "Bearer alice-key-1"}
    )
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


def test_long_files_are_refused(alice):
    for size in (5001, 200_000):
        with pytest.raises(openai.APIStatusError, match="longer than") as caught:
            alice.files.create(file=("a", io.BytesIO(b"x" * size)), purpose="batch")
        assert caught.value.status_code == 413


def test_an_upload_that_is_cut_off_leaves_nothing(server):
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice-key-1\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 900\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    address = httpx.URL(server.url)
    before = set(server.batch_dir.glob("files/*"))
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + b"x" * 500)
        until_s = time.monotonic() + WAIT_S
        while set(server.batch_dir.glob("files/*")) == before:
            assert time.monotonic() < until_s
            time.sleep(0.01)
    while set(server.batch_dir.glob("files/*")) != before:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    routes = server.http.get("/metrics", headers=server.operator).text
    assert 'route="/v1/files",status="499"' in routes and 'status="500"' not in routes


def test_a_file_that_is_no_batch_fails_by_its_line(alice):
    chat = completion(1) | {"url": "/v1/chat/completions", "custom_id": "b"}
    for calls, reason in (([completion(1), chat], "line 2 of {} calls"), ([], "{} has no calls")):
        batch = begin(alice, calls)
        failed = wait(alice, batch.id, "failed")
        (error,) = failed.errors.data
        assert error.message.startswith(reason.format(batch.input_file_id))


def num_withdrawn(server):
    """Generations whose callers have left: here calls of batches alone."""
    metrics = server.http.get("/metrics", headers=server.operator).text
    name = 'quire_generations_finished_total{reason="disconnect",tenant="alice"}'
    (line,) = [line for line in metrics.splitlines() if line.startswith(name)]
    return float(line.split()[-1])


def test_live_calls_go_first_and_a_batch_can_be_cancelled(server, alice):
    calls = [completion(n, max_tokens=400, ignore_eos=True) for n in range(12)]
    batch = begin(alice, calls)
    server.wait_until(lambda stats: stats["num_running"] >= 3)
    # Four rows are all that the engine has, so the batch has to give its rows back.
    prompts = ["a", "b", "c", "d"]
    live = alice.completions.create(
        model="embedded", prompt=prompts, max_tokens=400, extra_body={"ignore_eos": True}
    )
    assert len(live.choices) == 4
    assert num_withdrawn(server) >= 3
    assert alice.batches.retrieve(batch.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        alice.files.delete(batch.input_file_id)
    assert alice.batches.cancel(batch.id).status == "cancelling"
    done = wait(alice, batch.id, "cancelled")
    assert done.request_counts.completed < 12
    server.wait_until(lambda stats: stats["num_held_blocks"] == stats["num_running"] == 0)
    if done.output_file_id is not None:
        assert len(lines_of(alice, done.output_file_id)) == done.request_counts.completed


def test_a_batch_goes_on_after_a_kill_and_answers_no_call_twice(tmp_path):
    calls = [completion(n, max_tokens=64) for n in range(40)]
    with launched(OPTIONS, batch_dir=str(tmp_path)) as server, client_of(server) as client:
        batch = begin(client, calls)
        until_s = time.monotonic() + WAIT_S
        while client.batches.retrieve(batch.id).request_counts.completed < 3:
            assert time.monotonic() < until_s
        server.signal(signal.SIGKILL)
        server.process.wait(WAIT_S)
    (written,) = tmp_path.glob("batches/*.answers")
    num_before = written.read_bytes().count(b"\n")
    assert 3 <= num_before < 40
    with launched(OPTIONS, batch_dir=str(tmp_path)) as server, client_of(server) as client:
        done = wait(client, batch.id, "completed")
        assert (done.request_counts.completed, done.error_file_id) == (40, None)
        answers = lines_of(client, done.output_file_id)
        live = client.completions.create(model="embedded", **calls[0]["body"])
    assert answers["call-0"]["response"]["body"]["choices"][0]["text"] == live.choices[0].text
    assert set(answers) == {call["custom_id"] for call in calls}


def test_pages_can_t_upload_without_being_asked(server):
    form = {"file": ("a", b"x"), "purpose": (None, "batch")}
    headers = {"Origin": "https://page.example", "Authorization": "Bearer alice-key-1"}
    assert server.http.post("/v1/files", files=form, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": [[1], [2]]}, 2),
        ({"messages": [], "n": 4}, 4),
        ({"input": ["a", "b"]}, 2),
        ({"input": [{"role": "user"}]}, 1),
        ({"n": "x"}, 1),
    ],
)
def test_the_generations_of_a_call_are_counted(body, expected):
    assert num_generations(json.dumps(body).encode()) == expected
