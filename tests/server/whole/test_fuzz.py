"""Whatever JSON comes in: an answer or an error in the API's form, and never a failed server.

A few of the damaged bodies that `benchmarks/server/fuzz.py` sends, to every route that takes one.
"""

import json
import random

import pytest
from benchmarks.server.mutations import BODIES, damaged, fault_of, routes

NUM_BODIES = 12
"""Of each route."""

HEADERS = {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", routes())
def test_bodies_are_answered_and_damaged_ones_do_no_harm(http, path):
    for body in BODIES[path]:
        answer = http.post(path, json=body)
        # This server has neither adapters, nor replicas, nor a folder of batches.
        expected = 400 if path.endswith("_lora_adapter") or "/replicas/" in path else 200
        expected = 404 if path == "/v1/batches" else expected
        assert answer.status_code == expected, (body, answer.text)
        assert fault_of(answer) is None
    choose = random.Random(path)
    for _ in range(NUM_BODIES):
        body = json.dumps(damaged(path, choose))  # with NaN and lone surrogates, as Python has them
        answer = http.post(path, content=body, headers=HEADERS)
        assert answer.status_code in (200, 400, 404, 408, 413, 422), (body, answer.text)
        assert fault_of(answer) is None, body


CALLS_WITHOUT_FIELDS = ("/api/chat", "/api/generate", "/api/show", "/api/pull")


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "a", [], [{}], {}])
def test_values_that_are_no_body_are_refused(http, value):
    for path in routes():
        answer = http.post(path, json=value)
        needs_nothing = value == {} and path in CALLS_WITHOUT_FIELDS
        assert answer.status_code == (200 if needs_nothing else 400)
