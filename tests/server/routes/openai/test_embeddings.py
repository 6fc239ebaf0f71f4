"""POST /v1/embeddings by OpenAI's own client and by plain HTTP; on a model that generates."""

import base64
import struct

import openai
import pytest

TEXTS = ["import os", "def f(x):\n    return x", "import os"]


def embed(http, **fields):
    return http.post("/v1/embeddings", json={"model": "embedded", **fields})


def test_the_client_decodes_what_it_asked_for(client, tokenizer):
    # The client asks for base64 unless it is told otherwise.
    found = client.embeddings.create(model="embedded", input=TEXTS)
    plain = client.embeddings.create(model="embedded", input=TEXTS, encoding_format="float")
    assert [entry.index for entry in found.data] == [0, 1, 2]
    assert [e.embedding for e in found.data] == [e.embedding for e in plain.data]
    assert found.data[0].embedding == found.data[2].embedding != found.data[1].embedding
    assert sum(x * x for x in found.data[0].embedding) == pytest.approx(1, abs=1e-5)
    num_tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert found.usage.prompt_tokens == found.usage.total_tokens == num_tokens
    assert found.model == "embedded" and found.object == "list"


def test_token_ids_are_texts(client, tokenizer):
    ids = [tokenizer.encode(text) for text in TEXTS]
    by_text = client.embeddings.create(model="embedded", input=TEXTS)
    by_ids = client.embeddings.create(model="embedded", input=ids)
    assert [e.embedding for e in by_text.data] == [e.embedding for e in by_ids.data]
    alone = client.embeddings.create(model="embedded", input=ids[1])
    assert alone.data[0].embedding == by_text.data[1].embedding


def test_a_vector_is_the_same_in_a_long_list(http):
    alone = embed(http, input=TEXTS[1]).json()["data"][0]
    crowd = embed(http, input=[*(f"x = {i}" for i in range(300)), TEXTS[1]]).json()["data"]
    assert len(crowd) == 301
    assert crowd[300]["embedding"] == alone["embedding"]


def test_dimensions_base64_and_raw_vectors(http):
    raw = embed(http, input=TEXTS[0], normalize=False).json()["data"][0]["embedding"]
    cut = embed(http, input=TEXTS[0], normalize=False, dimensions=8, encoding_format="base64")
    content = base64.b64decode(cut.json()["data"][0]["embedding"])
    assert list(struct.unpack("<8f", content)) == raw[:8]
    assert abs(sum(x * x for x in raw) - 1) > 0.01


def test_long_inputs_are_cut_where_that_is_asked_for(http, tokenizer):
    text = "x = 1\n" * 1000
    answer = embed(http, input=text)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"
    assert "max_model_len, 1024" in answer.json()["error"]["message"]
    assert (
        embed(http, input=text, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 1024
    )
    cut = embed(http, input=text, truncate_prompt_tokens=9).json()["data"][0]
    ids = tokenizer.encode(text)[:9]
    assert cut["embedding"] == embed(http, input=ids).json()["data"][0]["embedding"]
    for given in (text, tokenizer.encode(text)):
        end = embed(http, input=given, truncate_prompt_tokens=9, truncation_side="left").json()
        ids = tokenizer.encode(text)[-9:]
        assert end["data"] == embed(http, input=ids).json()["data"]


def test_a_prompt_may_fill_the_context(http):
    assert embed(http, input=[5] * 1024).status_code == 200
    assert embed(http, input=[5] * 1025).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": ""}, "input", "input 0 is empty"),
        ({"input": ["x", ""]}, "input", "input 1 is empty"),
        ({"input": [[]]}, "input", "input 0 is empty"),
        ({"input": [4096]}, "input", "token id 4096"),
        ({"input": "x", "dimensions": 257}, "dimensions", "from 1 to 256"),
        ({"input": "x", "dimensions": 0}, "dimensions", "from 1 to 256"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to"),
        ({"input": ["x"] * 2049}, "input", "bound of 2048"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "x", "priority": 3}, "priority", "reads no priorities"),
        ({"input": "x", "late_chunking": True}, "late_chunking", "unknown field"),
    ],
)
def test_invalid_embedding_calls_are_refused_by_name(fields, param, words, http):
    answer = embed(http, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_hints_are_taken_and_another_model_is_not(client):
    client.embeddings.create(model="embedded", input="x", user="ada")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")


def test_a_deadline_ends_the_call(http):
    answer = embed(http, input=["x = 1\n" * 150] * 200, deadline_s=0.001)
    assert answer.status_code == 408
