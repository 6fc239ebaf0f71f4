"""/metrics of real servers: every name, what the numbers say, and what is written about them."""

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families
from tests.engine_client.fake_engine_process import COMMAND
from tests.server.launching import WAIT_S, launched
from tests.server.telemetry.tier_counts import no_moves

from quire.adapters.store import AdapterStore
from quire.core.memory.memory_report import PARTS
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.core.sequence import COUNTED_REASONS
from quire.engine.step_work import MachineRates, StepWork
from quire.engine.utilization import Utilization
from quire.engine_client.recovery import EngineState
from quire.server.hosted_model import HostedModel
from quire.server.telemetry.fleet_metrics import fleet_families, model_families
from quire.server.telemetry.metric_families import engine_families
from quire.server.telemetry.monitor import FINISH_REASONS

ROOT = Path(__file__).parents[4]
FAKE = list(COMMAND)
WORD = re.compile(r"\b(?:quire_|vllm:)[a-z0-9_]+")


def scrape(http):
    """{(name of a sample, values of its labels by their names...): value}"""
    text = http.get("/metrics").raise_for_status().text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape_idle(http):
    """The same, once nothing is under way but this scrape: what came before is counted."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        found = scrape(http)
        if found["quire_http_requests_open",] == 1 and not found["quire_generations_open",]:
            return found
        assert time.monotonic() < deadline_s, found


def names(text):
    """Names of families as they stand in HELP lines: counters with their `_total`."""
    return set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))


def names_of(families):
    """The same of families that no server has sent."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name for family in families
    }


def generate(http, **more):
    body = {"prompt": "def f(a, b):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body | more).raise_for_status().json()


def grown(http, before, *key):
    return scrape_idle(http)[key] - before.get(key, 0)


def test_prompt_and_generated_tokens_are_counted(http):
    before = scrape_idle(http)
    usage = generate(http, n=2)["usage"]
    generate(http, stop=["\n", " "], max_tokens=40)
    after = scrape_idle(http)

    def more(*key):
        return after[key] - before.get(key, 0)

    assert more("quire_generations_total", "") == 3
    finished = {why: more("quire_generations_finished_total", why, "") for why in FINISH_REASONS}
    assert finished["length"] == 2 and finished["stop"] == 1 and sum(finished.values()) == 3
    assert more("quire_generation_tokens_total", "") >= usage["completion_tokens"] == 16
    assert more("quire_prompt_tokens_total", "") == 2 * usage["prompt_tokens"]
    assert more("quire_http_requests_total", "POST", "/v1/completions", "200") == 2
    assert more("quire_time_to_first_token_seconds_count") == 3
    assert more("quire_e2e_latency_seconds_count") == 3
    assert more("quire_inter_token_latency_seconds_count") >= 14
    assert more("quire_time_per_output_token_seconds_count") >= 2
    for name in ("queue", "prefill"):
        assert more(f"quire_{name}_time_seconds_count") == 2
    assert more("quire_decode_time_seconds_count") >= 2
    assert more("quire_steps_total") == more("quire_step_duration_seconds_count")
    drafts = [key for key in after if key[0] == "quire_accepted_draft_tokens_total"]
    assert more("quire_steps_total") + sum(more(*key) for key in drafts) >= 8
    assert more("quire_sampled_tokens_total") >= 16
    assert more("quire_computed_tokens_total") >= 15
    assert more("quire_prefix_query_tokens_total") >= usage["prompt_tokens"]
    assert sum(more("quire_prefix_misses_total", why.value) for why in COUNTED_REASONS) == 2
    assert after["quire_generations_open",] == after["quire_requests_running",] == 0


def test_cached_prompt_tokens_are_counted_on_both_sides(http):
    long = "# " + "x = 1\n" * 40
    generate(http, prompt=long)
    before = scrape_idle(http)
    usage = generate(http, prompt=long)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 16
    assert grown(http, before, "quire_prompt_cached_tokens_total", "") == cached
    assert grown(http, before, "quire_prefix_hit_tokens_total") == cached


def test_errors_are_counted_by_their_code(http):
    before = scrape_idle(http)
    assert http.post("/v1/completions", json={"prompt": "a", "top_p": 7}).status_code == 400
    assert http.get("/no/such/path").status_code == 404
    after = scrape_idle(http)
    code = ("quire_http_errors_total", "invalid_request", "400")
    assert after[code] == before.get(code, 0) + 1
    other = ("quire_http_requests_total", "GET", "other", "404")
    assert after[other] == before.get(other, 0) + 1


def test_a_client_that_goes_away_is_no_error(http):
    before = scrape_idle(http)
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: the connection is closed with it
        next(lines)
        during = scrape(http)
        assert during["quire_requests_running",] == during["quire_generations_open",] == 1
        assert during["quire_kv_blocks", "held"] >= 1
        assert 0 < during["quire_kv_use_ratio",] < 1
        assert during["quire_kv_memory_bytes", "useful"] > 0
    assert grown(http, before, "quire_generations_finished_total", "disconnect", "") == 1
    assert grown(http, before, "quire_generations_finished_total", "error", "") == 0


def test_the_ledger_adds_up_and_blocks_are_in_one_state_each(http):
    found = scrape(http)
    ledger = http.get("/memory").json()
    parts = {part: found["quire_kv_memory_bytes", part] for part in PARTS}
    assert sum(parts.values()) == ledger["total_bytes"]
    states = [found["quire_kv_blocks", state] for state in ("held", "cached", "free")]
    assert sum(states) == http.get("/health").json()["engine"]["num_blocks"]


def test_metrics_of_processes_and_engine_state(http):
    found = scrape(http)
    for process in ("front", "engine"):
        assert found[f"quire_{process}_process_resident_memory_bytes",] > 1 << 20
        assert found[f"quire_{process}_process_cpu_seconds_total",] > 0
    states = {state.value: found["quire_engine_state", state.value] for state in EngineState}
    assert states.pop("ready") == 1 and set(states.values()) == {0}
    assert found["quire_engine_up",] == 1 and found["quire_engine_restarts_total",] == 0
    assert found["quire_engine_last_sign_of_life_age_seconds",] >= 0


def test_all_of_the_engine_s_time_has_a_use(http):
    before = scrape_idle(http)
    generate(http)
    after = scrape_idle(http)
    name = "quire_engine_time_seconds_total"
    spent = {use: after[name, use] - before[name, use] for use in ("busy", "gap", "idle")}
    assert min(spent.values()) > 0
    assert after["quire_step_bytes_total",] > before["quire_step_bytes_total",]
    assert after["quire_step_operations_total",] > before["quire_step_operations_total",]
    assert 0 < after["quire_busy_ratio",] < 1


def test_labels_are_of_a_fixed_set(http):
    for path in ("/a/1", "/a/2", "/v1/models/x", "/v1/models/y"):
        http.get(path)
    http.request("PROPFIND", "/health")  # of WebDAV, so both parsers take it
    routes = {key[2] for key in scrape(http) if key[0] == "quire_http_requests_total"}
    methods = {key[1] for key in scrape(http) if key[0] == "quire_http_requests_total"}
    assert {"other", "/v1/models/{name}"} <= routes
    assert not {"/a/1", "/a/2", "/v1/models/x", "/v1/models/y"} & routes
    assert "other" in methods and "PROPFIND" not in methods


def test_metrics_are_openmetrics_if_the_client_accepts_it(http):
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = http.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family.type for family in parse_openmetrics(answer.text)}
    assert families["quire_time_to_first_token_seconds"] == "histogram"
    assert families["quire_steps"] == "counter"
    plain = http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")


def test_the_buckets_reach_from_a_tenth_of_a_millisecond_to_minutes(http):
    bounds = [
        float(key[1])
        for key in scrape(http)
        if key[0] == "quire_inter_token_latency_seconds_bucket"
    ]
    assert min(bounds) == 1e-4 and sorted(bounds)[-2] >= 300 and max(bounds) == float("inf")


def read_nothing(folder):
    raise AssertionError(folder)


def measured_on_a_gpu():
    """With everything that an engine may know of its use."""
    times = Utilization(0.0)
    times.work, times.rates = StepWork(1, 1, 1, 1, 1, 1), MachineRates(1.0, 1.0)
    times.monitor = SimpleNamespace(read=lambda: {"busy_share": 0.5, "memory_share": 0.25})
    times.expected = StepCostModel.fit([StepSample(StepLoad(1), 0.5)])
    times.record_arrival(0.0)
    times.account_step(1.0, 0.0, 0.0, StepLoad(1), 1)
    return times.as_dict(1.0, is_running=False)


@pytest.fixture
def exposed(http):
    """The names of a served request, and those of a tier, of adapters and of images."""
    generate(http)
    text = http.get("/metrics").text
    assert not any(name.startswith("quire_tier_") for name in names(text)), "there is none"
    store = AdapterStore(read_nothing, 1)
    own = ("num_slots", "num_resident", "num_loads")
    adapters = dict.fromkeys((*own, *store.counts()), 0)
    contents = dict.fromkeys(("num_waiting", "num_encoded", "encode_s", "num_hits"), 0)
    drafts = {"by_proposer": {"ngram": {"verified": [1], "accepted": [1]}}, "saved_s": 0.5}
    more = engine_families(
        {
            "tiers": no_moves(),
            "adapters": adapters,
            "contents": contents | {"cache_bytes": 0},
            "drafts": drafts,
            "utilization": measured_on_a_gpu(),
        }
    )
    counted = ("num_open", "num_prompts", "num_uncached_tokens", "wait_s", "num_requested_restarts")
    overview = {"0": dict.fromkeys(counted, 1)}
    several = names_of(model_families([HostedModel(("m",))], 1))
    return names(text) | names_of(more) | names_of(fleet_families(overview, 1, 1)) | several


def test_every_metric_is_written_about_and_nothing_else(exposed):
    text = (ROOT / "docs" / "observability.md").read_text()
    described = set(WORD.findall(text))
    assert exposed - described == set(), "missing in docs/observability.md"
    assert described - exposed == set(), "in docs/observability.md, but not in /metrics"


def panels(dashboard):
    """All panels, those inside of rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def test_the_dashboard_can_be_imported_and_asks_for_metrics_that_exist(exposed):
    dashboard = json.loads((ROOT / "docs" / "grafana" / "quire.json").read_text())
    found = [panel for panel in panels(dashboard) if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels(dashboard)}) == len(list(panels(dashboard)))
    asked = set()
    for panel in found:
        assert panel["title"] and panel["description"], panel
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(WORD.findall(target["expr"]))
            assert used, target
            asked |= {re.sub("_(bucket|sum|count)$", "", name) for name in used}
    assert asked - exposed == set()
    ours = {name for name in exposed if name.startswith("quire_")}  # the others say the same
    assert ours - asked == set(), "no panel shows these"
    variables = {each["name"]: each["type"] for each in dashboard["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    for row in (panel["gridPos"] for panel in found):
        assert row["x"] >= 0 and row["x"] + row["w"] <= 24


def test_the_alert_rules_ask_for_metrics_that_exist_and_say_what_to_do(exposed):
    rules = yaml.safe_load((ROOT / "docs" / "prometheus" / "quire.rules.yml").read_text())
    (group,) = rules["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 8
    for rule in group["rules"]:
        asked = {re.sub("_(bucket|sum|count)$", "", name) for name in WORD.findall(rule["expr"])}
        assert asked <= exposed and (asked or rule["alert"] == "QuireDown"), rule
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "action"}


def test_metrics_of_the_api_server_come_while_the_engine_recovers():
    """A fake engine takes its time to start again."""
    with launched(command=FAKE, fake={"step_s": 0.005, "hang_s": 1.0}) as server:
        generate(server.http, prompt=[10, 11])
        before = scrape(server.http)
        assert before["quire_engine_up",] == 1
        os.kill(server.engine.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + WAIT_S
        downs = []
        while True:
            found = scrape(server.http)
            assert found["quire_generations_total", ""] == 1
            downs.append(found["quire_engine_up",] == 0)
            if found["quire_engine_restarts_total",] == 1 and found["quire_engine_up",] == 1:
                break
            assert time.monotonic() < deadline_s
        assert any(downs)
        generate(server.http, prompt=[10, 11])
        assert httpx.get(f"{server.url}/ready").status_code == 200


def test_tenants_and_the_causes_of_refusals_are_told_apart():
    keys = {"alice": "alice-secret-1", "bob": "bob-secret-22", "operator": "operator-secret-3"}
    entries = [f"{name}:{key}" for name, key in keys.items()]
    alice, bob, operator = ({"Authorization": f"Bearer {key}"} for key in keys.values())
    body = {"prompt": [10, 11], "max_tokens": 3}
    server = launched(command=FAKE, fake={"step_s": 0.01}, api_keys=entries, max_tenant_requests=1)
    with server as running:
        http, url = running.http, "/v1/completions"
        for path in ("/metrics", "/memory"):
            assert http.get(path).status_code == 401
        assert http.get("/health").json() == {"status": "ok"}
        endless = body | {"max_tokens": 10**6, "stream": True}
        with http.stream("POST", url, json=endless, headers=alice) as stream:
            lines = stream.iter_lines()  # kept: the connection is closed with it
            next(lines)
            assert http.post(url, json=body, headers=alice).status_code == 429
            http.post(url, json=body, headers=bob).raise_for_status()
            http.headers.update(operator)
            found = scrape(http)
            text = http.get("/metrics").text
            assert http.get("/health").json()["engine"]["num_running"] == 1
        assert found["quire_tenant_generations_open", "alice"] == 1
        assert found["quire_tenant_generations_open", "bob"] == 0
        assert found["quire_http_errors_total", "tenant_busy", "429"] == 1
        assert found["quire_http_errors_total", "invalid_api_key", "401"] == 2
        assert found["quire_generations_finished_total", "length", "bob"] == 1
        assert found["quire_prompt_tokens_total", "bob"] == 2
        assert not any(key in text for key in keys.values())
