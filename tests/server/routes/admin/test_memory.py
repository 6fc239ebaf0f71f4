"""GET /memory and /memory/blocks of a real server, while it serves and when it is idle."""

import json

import pytest

NUM_BLOCKS = 512
BODY = {"prompt": "def f(" + "a, " * 40, "max_tokens": 400, "n": 2, "temperature": 1.0}
BODY |= {"ignore_eos": True, "stream": True}
NUMBERS = ("useful", "unfilled", "unused", "reserved", "in_flight", "moving", "cached", "free")


def parts(report):
    return [report[f"{name}_bytes"] for name in NUMBERS]


def test_an_idle_server_holds_nothing(http):
    report = http.get("/memory").raise_for_status().json()
    assert sum(parts(report)) == report["total_bytes"] > 0
    assert sum(parts(report)[:4]) == 0 and report["useful_share"] is None
    assert report["tenants"] == {} and report["tiers"] == {}
    assert set(report["device"]) == {"weight_bytes", "kv_cache_bytes", "answer_bytes"}
    assert report["device"]["kv_cache_bytes"] == report["total_bytes"]


def test_memory_shows_a_running_requests_blocks_by_tenant_and_block(http):
    """Two branches share the blocks of their prompt."""
    key = {"Authorization": "Bearer secret-of-mine"}
    with http.stream("POST", "/v1/completions", json=BODY, headers=key) as stream:
        lines = stream.iter_lines()
        chunk = json.loads(next(line for line in lines if line).removeprefix("data: "))
        report = http.get("/memory").json()
        page = http.get("/memory/blocks", params={"num_blocks": NUM_BLOCKS}).json()
    block_bytes = report["total_bytes"] / NUM_BLOCKS
    assert sum(parts(report)) == report["total_bytes"]
    assert report["useful_bytes"] > 0 and report["saved_bytes"] >= 2 * block_bytes
    (tenant,) = report["tenants"]
    assert report["tenants"][tenant]["num_sequences"] == 2
    assert report["tenants"][tenant]["useful_bytes"] == pytest.approx(report["useful_bytes"])
    assert tenant == ""  # without keys all are one; test_guard has named ones
    assert "secret" not in json.dumps(report)
    assert page["next_block"] is None and len(page["blocks"]) == NUM_BLOCKS
    names = [name for name, _ in page["sequences"]]
    assert len(names) == 2 and all(chunk["id"] in name for name in names)
    shared = [block for block in page["blocks"] if len(block["owners"]) == 2]
    assert len(shared) >= 2
    for block in shared:
        assert (block["state"], block["ref_count"]) == ("held", 2)
        assert block["fill"] == page["block_size"]
        assert block["kind"] == "full"


def test_blocks_come_in_pages(http):
    found, first = [], 0
    while first is not None:
        params = {"first_block": first, "num_blocks": 200}
        page = http.get("/memory/blocks", params=params).raise_for_status().json()
        found += page["blocks"]
        assert page["num_blocks"] == NUM_BLOCKS and page["first_block"] == first
        first = page["next_block"]
    assert [block["block"] for block in found] == list(range(NUM_BLOCKS))
    assert {block["state"] for block in found} <= {"free", "cached"}
    assert len(http.get("/memory/blocks").json()["blocks"]) == NUM_BLOCKS


@pytest.mark.parametrize(
    ("path", "param", "reason"),
    [
        ("/memory?tenant=a", "tenant", "is not a parameter of /memory; known are: replica"),
        ("/memory/blocks?n=1", "n", "known are: first_block, num_blocks"),
        ("/memory/blocks?first_block=-1", "first_block", "is '-1', but must be a whole number"),
        ("/memory/blocks?first_block=512", "first_block", "is 512, but the pool has blocks 0 to"),
        ("/memory/blocks?first_block=x", "first_block", "from 0 to 2147483647"),
        ("/memory/blocks?num_blocks=0", "num_blocks", "is '0', but must be"),
        ("/memory/blocks?num_blocks=10001", "num_blocks", "from 1 to 10000"),
        (f"/memory/blocks?num_blocks={'9' * 5000}", "num_blocks", "whole number from 1"),
        ("/memory/blocks?num_blocks=%C2%B2", "num_blocks", "whole number from 1"),
    ],
)
def test_invalid_page_parameter_is_refused_by_name(http, path, param, reason):
    answer = http.get(path)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert param in error["message"] and reason in error["message"]
