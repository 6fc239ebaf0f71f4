"""The table of docs/security.md, held against every route, and against two worlds.

In the first no tenant has sent what a tenant is about to send; in the second another tenant has all
of it cached, and has streams open. The tenant's answers must be the same, number by number.
"""

import json
import random
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.launching import SEED, launched, launched_with_keys

from quire.server.endpoint_registry import ENDPOINTS
from quire.server.generation.seeds import Seeds

ROOT = Path(__file__).parents[3]
ANY_OTHER = "any other path"
NEW, OPERATORS = "new each time", "The operator alone"
TIMEOUT_S = 60

TEXT = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu " * 12
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": TEXT}]

OLLAMA = {"num_predict": 4, "temperature": 0}

EXAMPLES = {
    ("POST", "/v1/completions"): SHORT | {"prompt": TEXT, "logprobs": 2, "return_token_ids": True},
    ("POST", "/v1/chat/completions"): SHORT
    | {"messages": MESSAGES, "logprobs": True, "return_token_ids": True},
    ("POST", "/v1/messages"): {"messages": MESSAGES, "max_tokens": 4, "temperature": 0},
    ("POST", "/v1/messages/count_tokens"): {"messages": MESSAGES},
    ("POST", "/v1/responses"): {"input": TEXT, "max_output_tokens": 4, "temperature": 0},
    ("POST", "/v1/responses/input_tokens"): {"input": TEXT},
    ("POST", "/api/chat"): {"messages": MESSAGES, "stream": False, "options": OLLAMA},
    ("POST", "/api/generate"): {"prompt": TEXT, "stream": False, "options": OLLAMA},
    ("POST", "/api/show"): {"model": "embedded"},
    ("POST", "/api/pull"): {"model": "embedded", "stream": False},
    ("POST", "/api/embed"): {"input": TEXT},
    ("POST", "/api/embeddings"): {"prompt": TEXT},
    ("POST", "/v1/embeddings"): {"input": TEXT},
    ("POST", "/tokenize"): {"prompt": TEXT, "return_token_strs": True},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "a", "lora_path": "/x"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "a"},
    ("POST", "/replicas/restart"): {"replica": "0"},
    ("POST", "/replicas/scale"): {"num_replicas": 2},
    ("POST", "/detokenize"): {"tokens": list(range(300, 330))},
    ("POST", "/v1/files"): {},
    ("POST", "/v1/batches"): {
        **{"input_file_id": "file-1", "endpoint": "/v1/completions"},
        "completion_window": "24h",
    },
    ("POST", "/v1/batches/{batch_id}/cancel"): {},
    ("POST", "/sleep"): {},
    ("POST", "/wake_up"): {},
}
EXAMPLES |= {
    ("POST", path): {"query": "alpha", "documents": [TEXT, "beta"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank")
}
EXAMPLES |= {
    ("POST", path): {"text_1": "alpha", "text_2": [TEXT, "beta"]}
    for path in ("/score", "/v1/score")
}
"""Bodies by route: a new route that takes one needs one here."""

NAMES = {"/v1/models/{name}": "/v1/models/embedded", ANY_OTHER: "/no/such/path"}
NAMES |= {
    f"/v1/responses/{{response_id}}{rest}": f"/v1/responses/resp_1{rest}"
    for rest in ("", "/input_items")
}
NAMES |= {f"/v1/files/{{file_id}}{rest}": f"/v1/files/file-1{rest}" for rest in ("", "/content")}
NAMES |= {
    f"/v1/batches/{{batch_id}}{rest}": f"/v1/batches/batch_1{rest}" for rest in ("", "/cancel")
}
NAMES["/sleep"] = "/sleep?level=3"  # the server must stay awake
NAMES["/page/{name}"] = "/page/app.js"
NAMES["/stats/events"] = "/stats/events?interval=99"  # a stream would not end
NAMES["/stats/table"] = "/stats/table?request_id=a"
"""What to ask for where the table's path is none."""

MISTAKES = [
    {"prompt": TEXT, "top_p": 7},
    {"prompt": TEXT, "max_tokens": "x"},
    {"prompt": [10**9]},
    {"prompt": TEXT, "n": 129},
    {"prompt": [[5]] * 200, "n": 128},
    {"prompt": TEXT * 200},
    {"prompt": TEXT, "model": "another"},
    {"prompt": TEXT, "deadline_s": 1e-9},
    {"prompt": TEXT, "cache_salt": "x" * 300},
    {"prompt": TEXT, "allowed_token_ids": [300], "stop_token_ids": [300], "min_tokens": 3},
]


class Row(NamedTuple):
    """A line of the table. statuses: by role. fields: of a tenant's answer, by what moves them."""

    method: str
    path: str
    statuses: dict[str, int]
    fields: dict[str, set[str]]

    def ask(self, client, headers):
        """The answer to an example of such a call."""
        path = NAMES.get(self.path, self.path)
        body = EXAMPLES[self.method, self.path] if self.method == "POST" else None
        return client.request(self.method, path, json=body, headers=headers)


def table():
    text = (ROOT / "docs" / "security.md").read_text()
    section = text.split("## Who sees what\n")[1].split("\n## ")[0]
    rows = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = re.fullmatch(r"`(GET|POST|DELETE)(?: (/\S*))?`(.*)", cells[0])
        if found is None:
            continue
        statuses = zip(("stranger", "tenant", "operator"), map(int, cells[1:4]), strict=True)
        fields: dict[str, set[str]] = {}
        for part in re.split(r"[;.] ", cells[4]):
            kind, _, names = part.partition(": ")
            fields[kind] = set(re.findall("`(.+?)`", names))
        path = found[2] or found[3].strip()
        rows.append(Row(found[1], path, dict(statuses), fields))
    return rows


ROWS = table()


def test_every_route_is_in_the_table():
    routes = [route for _, each in ENDPOINTS.items() for route in each.own_routes]
    served = {(name, each.path_format) for each in routes for name in each.methods - {"HEAD"}}
    assert ("GET", "/health") in served and ("POST", "/tokenize") in served
    assert {(row.method, row.path) for row in ROWS} == served | {("GET", ANY_OTHER)}


# Memory for all that is cached here: what is evicted depends on who else calls, and when.
ROOMY = {"num_blocks": 4096, "max_num_seqs": 16, "max_model_len": 1024, "seed": SEED}


@pytest.fixture(scope="module")
def roomy_server():
    with launched(ROOMY) as running:
        yield running


@pytest.fixture(scope="module")
def roomy_guarded(tmp_path_factory):
    with launched_with_keys(tmp_path_factory.mktemp("keys"), ROOMY) as running:
        yield running


@pytest.fixture(params=["roomy_guarded", "roomy_server"], ids=["guarded", "server"])
def world(request):
    """A server, with keys or without, and by role the headers of its calls."""
    running = request.getfixturevalue(request.param)
    if request.param == "roomy_guarded":
        running.roles = {
            "stranger": {"Authorization": "Bearer no-such-key"},
            "tenant": {"Authorization": "Bearer bob-key-1"},
            "operator": running.operator,
            "dave": {"Authorization": "Bearer dave-key-1"},
            "erin": {"Authorization": "Bearer erin-key-1"},
            "other": {"Authorization": "Bearer alice-key-2"},
        }
    else:
        running.roles = {"tenant": {"X-Api-Key": "anything"}, "operator": {}}
        running.roles |= {name: {"X-Api-Key": name} for name in ("dave", "erin", "other")}
    with httpx.Client(base_url=running.url, timeout=TIMEOUT_S) as client:
        running.client = client
        yield running
    running.wait_until(lambda stats: stats["num_held_blocks"] == stats["num_running"] == 0)


def test_each_role_gets_the_status_of_the_table(world):
    for row in ROWS:
        for role, status in row.statuses.items():
            if role in world.roles:
                answer = row.ask(world.client, world.roles[role])
                assert answer.status_code == status, (row, role, answer.text)


def test_every_field_of_a_tenant_s_answer_is_in_the_table(world):
    for row in ROWS:
        answer = row.ask(world.client, world.roles["tenant"])
        listed = set().union(*row.fields.values()) - row.fields.get(OPERATORS, set())
        if answer.status_code == 403:
            assert (listed, set(answer.json())) == (set(), {"error"}), row
        elif row.method == "POST" or listed:
            assert set(answer.json()) <= listed, row
    health = next(row for row in ROWS if row.path == "/health")
    operators = world.client.get("/health", headers=world.roles["operator"]).json()
    assert set(operators) == set().union(*health.fields.values())


def test_a_tenant_can_t_see_what_another_has_cached_or_open(world):
    """dave calls before his prompts were ever sent, erin when another tenant has sent hers."""
    operator = world.roles["operator"]
    alone = look(world, "dave")
    before = world.client.get("/health", headers=operator).json()
    with busy(world):
        crowded = look(world, "erin")
        during = world.client.get("/health", headers=operator).json()
    assert before["engine"] != during["engine"], "the operator sees no difference either"
    assert alone.keys() == crowded.keys()
    for what, answer in alone.items():
        assert answer == crowded[what], what
    first, again = (alone[f"{turn}: /v1/completions"][2]["usage"] for turn in ("first", "again"))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["prompt_tokens_details"]["cached_tokens"] > 0, "a hit would be seen"


@contextmanager
def busy(world):
    """Another tenant has all prompts of `look` cached, and streams that go on until this ends.

    They are always the same, so that they put nothing more into the cache.
    """
    headers = world.roles["other"]
    for row in ROWS:
        row.ask(world.client, headers)
    begun, ended = threading.Event(), threading.Event()
    body = SHORT | {"prompt": TEXT, "max_tokens": 100, "n": 2, "stream": True}

    def stream():
        with httpx.Client(base_url=world.url, timeout=TIMEOUT_S) as client:
            while not ended.is_set():
                with client.stream("POST", "/v1/completions", json=body, headers=headers) as lines:
                    for _ in lines.iter_lines():
                        begun.set()

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        assert begun.wait(TIMEOUT_S)
        yield
    finally:
        ended.set()
        thread.join(TIMEOUT_S)


def look(world, name):
    """{call: (status, headers, body)}: all that this tenant's key shows, but for what is random or
    of the clock."""
    client, headers = world.client, world.roles[name] | {"X-Request-ID": "mine"}
    seen = {}
    for turn in ("first", "again"):
        for row in ROWS:
            answer = row.ask(client, headers)
            what = f"{turn}: {row.path}" + " (DELETE)" * (row.method == "DELETE")
            seen[what] = visible(answer, name, row.fields.get(NEW, set()))
            path = NAMES.get(row.path, row.path)
            for method in ("HEAD", "OPTIONS", "DELETE"):
                other = client.request(method, path, headers=headers)
                seen[f"{turn}: {method} {row.path}"] = visible(other, name)
    for index, body in enumerate(MISTAKES):
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code >= 400, (body, answer.text)
        seen[f"mistake {index}"] = visible(answer, name)
    body = SHORT | {"prompt": TEXT, "n": 4, "max_tokens": 200, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        head = next(lines)
        if "Authorization" in headers:  # a server without keys bounds no tenant
            answer = client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 429
            seen["too much at once"] = visible(answer, name)
        seen["stream"] = joined([head, *lines])
    return seen


def visible(answer, name, new=frozenset()):
    headers = {key: value for key, value in answer.headers.items() if key != "date"}
    if answer.headers.get("content-type") != "application/json":
        return answer.status_code, headers, answer.text
    text = re.sub('"msg_[0-9a-f]{32}"', '"msg_"', answer.text.replace(f"'{name}'", "'NAME'"))
    body = json.loads(text) if text else None
    if new:
        assert new <= set(body)
        if "total_duration" in new:  # has some digits more or less
            headers.pop("content-length")
        body = {key: value for key, value in body.items() if key not in new}
    return answer.status_code, headers, body


def joined(lines):
    """A stream without the bounds of its events, which are a matter of speed."""
    texts, reasons, usage = {}, {}, None
    for line in lines:
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            reasons[index] = choice["finish_reason"] or reasons.get(index)
    return texts, reasons, usage


def cache_numbers(world):
    """The operator's numbers of the prefix cache."""
    headers = world.roles["operator"]
    engine = world.client.get("/health", headers=headers).json()["engine"]
    found = {name: engine[name] for name in ("num_query_tokens", "num_hit_tokens")}
    found |= engine["prefix_misses"]
    scraped = world.client.get("/metrics", headers=headers).text
    for family in text_string_to_metric_families(scraped):
        for sample in family.samples:
            if "prefix" in sample.name and not sample.name.endswith("_created"):
                found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_no_number_answers_a_guess(world):
    """The operator's numbers move alike whether another domain has the prompt that is sent or not:
    a reader of a dashboard, and a client of a server without keys, learns nothing by guessing."""
    world.wait_until(lambda stats: stats["num_held_blocks"] == stats["num_running"] == 0)
    numbers = random.Random(11)

    def send(role, prompt, salt):
        body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "cache_salt": salt}
        headers = world.roles[role]
        world.client.post("/v1/completions", json=body, headers=headers).raise_for_status()

    moved = {True: [], False: []}
    for index in range(6):
        prompt = [numbers.randrange(300, 4000) for _ in range(64)]
        is_known = index % 2 == 0
        if is_known:
            send("other", prompt, "theirs")
        before = cache_numbers(world)
        send("tenant", prompt, f"guess {index}")  # in a domain of its own: no other prompt is near
        after = cache_numbers(world)
        deltas = {name: value - before.get(name, 0) for name, value in after.items()}
        moved[is_known].append({name: delta for name, delta in deltas.items() if delta})
    steps = moved[True] + moved[False]
    assert all(step == steps[0] for step in steps), steps
    assert steps[0]["num_query_tokens"] == 64 and steps[0]["never_seen"] == 1


def test_seeds_of_unseeded_calls_are_the_tenant_s_own(guarded):
    """Whatever others have sent before. fred calls nowhere else."""
    wish = SHORT | {"prompt": "def f(", "temperature": 1.5, "max_tokens": 12}
    series = Seeds(guarded.seed)
    for _ in range(3):
        seeded = wish | {"seed": series.draw("fred")}
        expected = guarded.http.post("/v1/completions", json=seeded).raise_for_status().json()
        headers = {"Authorization": "Bearer fred-key-1"}
        answer = guarded.http.post("/v1/completions", json=wish, headers=headers).json()
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
