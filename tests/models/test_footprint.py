"""Bytes of a model by its config alone: those stored, and those that a token reads."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from quire.formats.dense import DenseMethod
from quire.formats.format_registry import load_weight_format
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.layers.sharded import LinearMethods
from quire.models import footprint as module
from quire.models.checkpoints.loader import load_model, weight_bytes
from quire.models.checkpoints.readers import open_checkpoint
from quire.models.footprint import footprint, num_weights
from quire.models.registry import load_config

CONFIG = load_config(EMBEDDED_MODEL)
DTYPE = torch.bfloat16


def test_weights_are_counted_as_the_checkpoint_holds_them():
    checkpoint = open_checkpoint(EMBEDDED_MODEL)
    counted = sum(torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names)
    assert CONFIG.tie_word_embeddings
    assert num_weights(CONFIG).weight_bytes == counted
    table = CONFIG.vocab_size * CONFIG.hidden_size
    assert num_weights(replace(CONFIG, tie_word_embeddings=False)).weight_bytes == counted + table


@pytest.mark.parametrize("name", [None, "int8", "int4"])
def test_stored_bytes_are_those_of_the_memory_plan(name):
    methods = LinearMethods(load_weight_format(name).torch_method())
    planned = weight_bytes(EMBEDDED_MODEL, CONFIG, DTYPE, methods)
    assert footprint(CONFIG, DTYPE, methods).weight_bytes == planned


def test_a_token_reads_one_row_of_the_embedding_and_all_of_the_head():
    model = load_model(
        EMBEDDED_MODEL, CONFIG, dtype=DTYPE, device=torch.device("cpu"), max_model_len=16
    )
    stored = sum(each.numel() * each.element_size() for each in model.parameters())
    row = CONFIG.hidden_size * DTYPE.itemsize
    for config in (CONFIG, replace(CONFIG, tie_word_embeddings=False)):
        assert footprint(config, DTYPE, LinearMethods(DenseMethod())).token_bytes == stored + row


class _Experts(nn.Module):
    active_share = 0.25

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 2, bias=False)
        self.inner = nn.ModuleList([nn.Linear(8, 8, bias=False)])


def test_a_share_counts_for_all_that_is_inside():
    experts = _Experts()
    whole = nn.ModuleList([experts, nn.Linear(2, 2, bias=False)])
    assert module._read_bytes(whole, DTYPE, 1.0) == 2 * (0.25 * (8 + 64) + 4)
