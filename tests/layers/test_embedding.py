"""The two ends of a model, tied and untied."""

import pytest
import torch

from quire.layers.embedding import LMHead, VocabEmbedding


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def embedding(request) -> VocabEmbedding:
    embedding = VocabEmbedding(1013, 6, dtype=request.param, device=torch.device("cpu"))
    embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    return embedding


def test_looks_up_rows(embedding):
    token_ids = torch.tensor([1012, 0, 7, 7])
    assert torch.equal(embedding(token_ids), embedding.weight[token_ids])


def test_a_tied_head_has_the_embeddings_weight(embedding):
    head = LMHead(embedding, tied=True)
    assert head.weight is embedding.weight
    hidden = embedding(torch.tensor([3, 4]))
    logits = head(hidden)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, (hidden @ embedding.weight.T).float())


def test_an_untied_head_has_its_own(embedding):
    head = LMHead(embedding, tied=False)
    assert head.weight.shape == embedding.weight.shape
    assert head.weight.dtype == embedding.weight.dtype
    before = embedding.weight.clone()
    head.weight.fill_(1.0)
    assert torch.equal(embedding.weight, before)
    assert head(torch.ones(1, 6, dtype=before.dtype)).tolist() == [[6.0] * 1013]


def test_no_rows_give_no_logits(embedding):
    hidden = torch.empty(0, 6, dtype=embedding.weight.dtype)
    assert LMHead(embedding, tied=True)(hidden).shape == (0, 1013)
