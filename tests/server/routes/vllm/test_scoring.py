"""POST /score and /rerank: of a cross-encoder, and by similarity on a model that generates."""

import pytest
from tests.pooling_folders import make_bert
from tests.server.launching import launched

from quire.errors import InvalidRequestError
from quire.server.limits import CallLimits
from quire.server.routes.vllm.scoring import RerankRequest, ScoreRequest

QUERY = "the capital of france"
DOCUMENTS = ["cats sleep", "paris is the capital of france", {"text": "bread is a city"}]
TEXTS = ["cats sleep", "paris is the capital of france", "bread is a city"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    make_bert(folder, num_labels=1)
    with launched({"model": str(folder), "num_blocks": 64}) as running:
        yield running.http


@pytest.fixture(params=["reranker", "http"])
def scoring(request):
    return request.getfixturevalue(request.param)


def post(http, path, **fields):
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_documents_come_best_first(scoring):
    scores = post(scoring, "/score", text_1=QUERY, text_2=TEXTS)
    by_index = [entry["score"] for entry in scores["data"]]
    assert len(set(by_index)) == 3
    found = post(scoring, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [entry["relevance_score"] for entry in found] == sorted(by_index, reverse=True)
    for entry in found:
        assert entry["relevance_score"] == by_index[entry["index"]]
        assert entry["document"]["text"] == TEXTS[entry["index"]]


def test_the_paths_and_names_of_all_apis(scoring):
    wish = {"query": QUERY, "documents": DOCUMENTS}
    answers = [post(scoring, f"{v}/rerank", **wish) for v in ("", "/v1", "/v2")]
    assert answers[0]["results"] == answers[1]["results"] == answers[2]["results"]
    assert answers[0]["usage"]["total_tokens"] > 0
    texts = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
    found = [post(scoring, "/v1/score", **{a: QUERY, b: TEXTS})["data"] for a, b in texts]
    assert found[0] == found[1] == found[2]
    pairwise = post(scoring, "/score", text_1=[QUERY] * 3, text_2=TEXTS)["data"]
    assert pairwise == found[0]


def test_the_best_alone_and_without_texts(scoring):
    wish = {"query": QUERY, "documents": DOCUMENTS, "return_documents": False}
    (best,) = post(scoring, "/rerank", top_n=1, **wish)["results"]
    assert set(best) == {"index", "relevance_score"}
    assert best == post(scoring, "/rerank", top_n=0, **wish)["results"][0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/rerank", {"query": QUERY, "documents": ["x"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": QUERY, "documents": ["x"], "instruction": "y"}, "instruction"),
        ("/rerank", {"query": QUERY, "documents": ["cats"] * 2049}, "documents"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "text_1"),
        ("/score", {"text_1": "x", "documents": "x"}, "text_1"),
        ("/score", {"text_1": "x", "text_2": "y", "queries": "z"}, "text_1"),
        ("/score", {"text_1": "cats", "text_2": ["cats " * 9000]}, "text_2"),
    ],
)
def test_invalid_scoring_calls_are_refused_by_name(path, fields, param, scoring):
    answer = scoring.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_reranker_neither_embeds_nor_generates(reranker):
    asked = (("/v1/embeddings", {"input": "x"}), ("/v1/completions", {"prompt": "x"}))
    for path, fields in asked:
        answer = reranker.post(path, json=fields)
        assert answer.status_code == 400, answer.text
        assert "scor" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "name"),
    [(RerankRequest, "documents"), (ScoreRequest, "text_2"), (ScoreRequest, "queries")],
)
def test_too_many_texts_are_refused_before_a_look_at_them(body, name):
    limits = CallLimits(max_inputs=2)
    body.check_fields({name: [None, None]}, limits, 100)
    with pytest.raises(InvalidRequestError, match=f"{name} has 3 entries, above .* of 2"):
        body.check_fields({name: [None, None, None]}, limits, 100)
