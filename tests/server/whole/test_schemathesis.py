"""Requests drawn from the served OpenAPI document, fitting it and not: no answer is a failure.

A few of the many that `benchmarks/server/fuzz.py` sends.
"""

import pytest

pytest.importorskip("schemathesis", reason="pip install schemathesis")

from benchmarks.server.fuzz import GENERATING, fuzz, shorten

NUM_CASES = 60


def test_no_request_that_the_document_leads_to_fails(server, http):
    fuzzed = fuzz(server.url, NUM_CASES)
    assert not fuzzed.failures, "\n\n".join(fuzzed.failures)
    assert fuzzed.num_cases >= NUM_CASES / 2
    for path in GENERATING:  # both kinds were there
        assert fuzzed.statuses[f"{path} 400"]


@pytest.mark.parametrize(
    ("body", "short"),
    [
        ([1], [1]),
        ({}, {"max_tokens": 2}),
        ({"max_tokens": 500, "n": 9, "top_k": 9}, {"max_tokens": 2, "n": 2, "top_k": 9}),
        ({"max_completion_tokens": 1}, {"max_completion_tokens": 1}),
        ({"max_tokens": "500"}, {"max_tokens": "500"}),
        ({"max_tokens": True, "model": "x"}, {"max_tokens": True}),
    ],
)
def test_only_the_length_of_answers_and_the_models_name_are_changed(body, short):
    assert shorten(body) == short
