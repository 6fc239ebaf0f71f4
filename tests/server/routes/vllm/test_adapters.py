"""Adapters of a running server: named as a model by every API, loaded, unloaded, and recovered."""

import os
import shutil
import signal
import threading

import anthropic
import httpx
import openai
import pytest
from tests.adapters.embedded import save_adapter
from tests.server.launching import launched

OPTIONS = {
    "dtype": "float32",
    "num_blocks": 512,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 4,
    "max_cpu_loras": 2,
}
PROMPT = "import os\n\n\ndef main(path):\n    for name in os.listdir(path):\n"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
KEYS = ["operator:operator-key", "alice:alice-key-1"]
OPERATOR = {"Authorization": "Bearer operator-key"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for name, seed in (("one", 1), ("two", 2)):
        save_adapter(root / name, seed)
    listed = root / "listed"
    shutil.copytree(root / "one", listed / "same-as-one")
    shutil.copytree(root / "two", listed / "cut")
    (listed / "cut" / "adapter_model.safetensors").write_bytes(b"x")
    return root


@pytest.fixture(scope="module")
def server(folder):
    modules = [f"one={folder / 'one'}", str(folder / "listed")]
    with launched(OPTIONS, lora_modules=modules, api_keys=KEYS) as running:
        running.http.headers["Authorization"] = "Bearer alice-key-1"
        running.operator = OPERATOR
        yield running


def complete(server, model, **more):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
    return server.http.post("/v1/completions", json=body)


def text(server, model, **more):
    answer = complete(server, model, **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def load(server, name, path, **more):
    body = {"lora_name": name, "lora_path": str(path), **more}
    return server.http.post("/v1/load_lora_adapter", json=body, headers=OPERATOR)


def unload(server, name):
    body = {"lora_name": name}
    return server.http.post("/v1/unload_lora_adapter", json=body, headers=OPERATOR)


def test_models_are_listed_with_their_parents(server, folder):
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert list(cards) == ["embedded", "one", "cut", "same-as-one"]
    assert cards["embedded"]["parent"] is None and cards["embedded"]["root"] == "embedded"
    assert cards["one"]["parent"] == "embedded" and cards["one"]["root"] == str(folder / "one")
    assert server.http.get("/v1/models/one").json() == cards["one"]
    tags = server.http.get("/api/tags").json()["models"]
    assert [each["name"] for each in tags] == list(cards)
    assert tags[1]["details"]["parent_model"] == "embedded"


def test_every_api_names_an_adapter_as_its_model(server):
    base, one = text(server, "embedded"), text(server, "one")
    assert base != one == text(server, "same-as-one")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice-key-1") as client:
        chats = [
            client.chat.completions.create(
                model=name, messages=QUESTION, max_tokens=8, temperature=0
            )
            for name in ("embedded", "one")
        ]
        assert [chat.model for chat in chats] == ["embedded", "one"]
        said = [chat.choices[0].message.content for chat in chats]
        assert said[0] != said[1]
        response = client.responses.create(
            model="one", input=QUESTION[0]["content"], max_output_tokens=8, temperature=0
        )
        assert response.output_text == said[1] and response.model == "one"
        pieces = client.completions.create(
            model="one", prompt=PROMPT, max_tokens=12, temperature=0, stream=True
        )
        assert "".join(piece.choices[0].text for piece in pieces) == one
    with anthropic.Anthropic(base_url=server.url, api_key="alice-key-1") as client:
        message = client.messages.create(
            model="one", messages=QUESTION, max_tokens=8, extra_body={"temperature": 0}
        )
        assert message.content[0].text == said[1] and message.model == "one"
    body = {"model": "one", "messages": QUESTION, "stream": False}
    body["options"] = {"num_predict": 8, "temperature": 0}
    answer = server.http.post("/api/chat", json=body).json()
    assert answer["message"]["content"] == said[1] and answer["model"] == "one"


def test_unknown_names_and_other_uses_are_refused(server):
    answer = complete(server, "three")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    body = {"model": "one", "input": "x"}
    assert server.http.post("/v1/embeddings", json=body).status_code == 400


def test_a_broken_adapter_ends_its_own_calls(server):
    for stream in (False, True):
        answer = complete(server, "cut", stream=stream)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "adapter_error" and error["message"].startswith("adapter 'cut': ")
        assert "listed" not in error["message"], "a client learns no path"
    assert text(server, "one")


def test_adapters_are_loaded_and_unloaded_while_others_are_served(server, folder):
    base, one = text(server, "embedded"), text(server, "one")
    answer = load(server, "new", folder / "two")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    two = text(server, "new")
    assert len({base, one, two}) == 3
    answer = load(server, "new", folder / "one")
    assert answer.status_code == 400 and "loaded already" in answer.json()["error"]["message"]
    assert load(server, "new", folder / "one", load_inplace=True).status_code == 200
    again = complete(server, "new").json()
    assert again["choices"][0]["text"] == one, "no block of the old one is read"
    assert unload(server, "new").text == "Success: LoRA adapter 'new' removed successfully."
    assert complete(server, "new").status_code == 404 == unload(server, "new").status_code
    for path, message in ((folder / "gone", "it is not a folder"), (folder, "it has no adapter_c")):
        answer = load(server, "bad", path)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert complete(server, "bad").status_code == 404


def test_an_unloaded_adapter_finishes_what_it_began(server, folder):
    assert load(server, "passing", folder / "two").status_code == 200
    whole = text(server, "passing", max_tokens=200, ignore_eos=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice-key-1") as client:
        stream = client.completions.create(
            model="passing",
            prompt=PROMPT,
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        got = next(stream).choices[0].text
        assert unload(server, "passing").status_code == 200
        got += "".join(piece.choices[0].text for piece in stream)
    assert got == whole


def test_only_the_operator_loads(server, folder):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "mine", "lora_path": str(folder / "one")}
        assert server.http.post(path, json=body).status_code == 403
        assert httpx.post(f"{server.url}{path}", json=body).status_code == 401


def test_bodies_are_checked(server):
    for body in ({}, {"lora_name": "a"}, {"lora_name": 3, "lora_path": "/x"}):
        answer = server.http.post("/v1/load_lora_adapter", json=body, headers=OPERATOR)
        assert answer.status_code == 400, answer.text


def test_the_numbers_of_adapters_are_counted(server):
    assert text(server, "one")
    metrics = server.http.get("/metrics", headers=OPERATOR).text
    assert "\nquire_adapter_slots 2.0\n" in metrics
    assert "\nquire_adapter_loads_total " in metrics
    memory = server.http.get("/memory", headers=OPERATOR).json()["device"]
    assert memory["adapter_bytes"] > 0
    assert any("2 slots for ranks up to 4" in line for line in server.lines)


def test_a_crowd_while_adapters_come_and_go(server, folder):
    """Each call gets its own adapter's text, whatever is loaded beside it."""
    expected = {name: text(server, name) for name in ("embedded", "one")}
    wrong, stop = [], threading.Event()

    def ask(name):
        while not stop.is_set():
            if (got := text(server, name)) != expected[name]:
                wrong.append((name, got))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("embedded", "one") * 2]
    for thread in threads:
        thread.start()
    for turn in range(6):
        path = folder / ("one", "two")[turn % 2]
        assert load(server, "turn", path, load_inplace=True).status_code == 200
        assert complete(server, "turn").status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kill_9_under_a_stream_changes_nothing(server):
    """The last of all here: the server has another engine process afterwards."""
    whole = text(server, "one", max_tokens=200, ignore_eos=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice-key-1") as client:
        stream = client.completions.create(
            model="one",
            prompt=PROMPT,
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        got = next(stream).choices[0].text
        os.kill(server.current_engine().pid, signal.SIGKILL)
        got += "".join(piece.choices[0].text for piece in stream)
    assert got == whole
    assert text(server, "one", max_tokens=200, ignore_eos=True) == whole


def test_a_module_that_cannot_be_read_ends_the_start(folder):
    with launched(
        OPTIONS, wait=False, lora_modules=[f"cut={folder / 'listed' / 'cut'}"]
    ) as failing:
        assert failing.wait_for_exit() == 1
        assert "quire: error: lora_modules: adapter 'cut': " in failing.output()
