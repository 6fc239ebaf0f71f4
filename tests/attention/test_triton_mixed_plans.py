"""Plans of captured mixed steps: bounds of their lists, and the results of replayed steps.

A replayed step launches again what its capture launched, with the same memory. So these tests plan
once, change the memory in place, and run again.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.attention.paged import make_spec
from tests.attention.test_latent import make_latent

from quire.attention.interface import AttentionBatch, GroupBatch, MixedPlan, MixedSize
from quire.kernels.attention_inputs import AttentionInputs

pytest.importorskip("triton")

from tests.attention.test_triton_plan import DTYPES, H200, SPECS, make_batch
from tests.attention.triton_step import TritonStep, torch_write

from quire.attention import triton_paged, triton_plan
from quire.attention.triton_paged import TritonPagedAttention
from quire.attention.triton_plan import (
    chunk_rule,
    decode_shape,
    host_work,
    mixed_shapes,
    padding_items,
)
from quire.attention.triton_plan_words import ListBounds, PlanLayout, in_turns

NUM_TOKENS, NUM_SEQS = 32, 6


def draw_lens(rng, num_tokens, num_seqs):
    """Query lengths of a mixed step, those of one token first."""
    lens = [1] * rng.randint(0, min(num_seqs, num_tokens) - 1)
    while len(lens) < num_seqs and sum(lens) < num_tokens:
        lens.append(rng.randint(1, num_tokens - sum(lens)))
        if rng.random() < 0.3:
            break
    return sorted(lens)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lists_of_all_steps_of_a_size_fit_their_words(name, dtype):
    spec, rng = SPECS[name], random.Random(name)
    shapes = mixed_shapes(spec, 16, dtype, H200)
    for _ in range(40):
        size = MixedSize(rng.choice([32, 96, 512]), rng.choice([1, 3, 40]), 8192)
        bounds = ListBounds.of(shapes, size)
        words = np.zeros(PlanLayout((bounds, bounds)).num_words, np.int64)
        lens = draw_lens(rng, size.num_tokens, size.num_seqs)
        batch = make_batch(lens, [n + rng.choice([0, 100, 7000]) for n in lens])
        for shape in shapes:
            work = host_work(batch, shape, chunk_rule(shape, size.max_context))
            assert work.num_parts <= bounds.num_parts
            padding = padding_items(shape, sum(lens), size.num_tokens)
            assert int(padding[:, 2].sum()) == size.num_tokens - sum(lens)
            work = replace(work, items=np.concatenate((work.items, padding)))
            words[:] = 0
            used = PlanLayout((bounds, bounds)).write([work, work], sum(lens), words)
            words[used:] = 0  # these are not sent
            for lists in PlanLayout((bounds, bounds)).open(words, np.int32):
                assert np.array_equal(lists.items[: int(lists.num_items[0])], work.items)
                merges = lists.merges[: int(lists.num_merges[0])].tolist()
                padding = [[token, 0, 0, 0] for token in range(sum(lens), size.num_tokens)]
                assert merges == [*work.merges.tolist(), *padding]


@pytest.mark.parametrize("name", SPECS)
def test_the_list_of_all_decoding_sequences_fits_its_words(name):
    shape, rng = decode_shape(SPECS[name], 16, torch.bfloat16, H200), random.Random(name)
    for _ in range(20):
        size = MixedSize(rng.choice([32, 512]), rng.choice([1, 3, 40]), 8192)
        bounds = ListBounds.of_decodes(shape, size)
        layout = PlanLayout((bounds, bounds))
        lens = draw_lens(rng, size.num_tokens, size.num_seqs)
        batch = make_batch(lens, [n + rng.choice([0, 100, 7000]) for n in lens])
        decodes = slice(batch.num_decodes)
        work = host_work(batch, shape, chunk_rule(shape, size.max_context), decodes)
        assert work.num_parts <= bounds.num_parts
        assert set(work.items[:, 1].tolist()) == set(range(batch.num_decodes))
        assert (work.items[:, 2] == 1).all()
        words = np.zeros(layout.num_words, np.int64)
        layout.write([work, work], sum(lens), words)
        for lists in layout.open(words, np.int32):
            assert np.array_equal(lists.items[: int(lists.num_items[0])], work.items)
            assert np.array_equal(lists.merges[: len(work.merges)], work.merges)


def test_each_program_gets_about_as_many_keys_as_the_others():
    """A prompt of 64 tiles, whose items grow by a tile each, for 8 programs."""
    items = np.arange(64, 0, -1, dtype=np.int32)[:, None]
    ordered = in_turns(items, 8)
    assert sorted(ordered.tolist()) == sorted(items.tolist())
    assert {int(ordered[first::8].sum()) for first in range(8)} == {260}
    assert in_turns(items[:13], 8)[8:].tolist() == items[8:13][::-1].tolist()


def static_batch(step, lens, contexts):
    """The mixed step in tensors of NUM_TOKENS, before it is planned."""
    given = step.batch(lens, contexts)
    missing = torch.full((NUM_TOKENS - sum(lens),), -1)
    groups = [
        GroupBatch(group.block_tables.clone(), torch.cat([group.slot_mapping, missing]))
        for group in given.groups
    ]
    max_context = groups[0].block_tables.shape[1] * step.block_size
    size = MixedSize(NUM_TOKENS, NUM_SEQS, max_context)
    words = np.zeros(step.backend.num_plan_words(size), np.int64)
    variant, used = step.backend.write_plan(given, size, words)
    words[used:] = -1  # these are not sent
    return AttentionBatch(
        query_start=given.query_start,
        context_lens=given.context_lens,
        rows=given.rows,
        query_lens_list=[],
        context_lens_list=[],
        rows_list=[],
        num_decodes=0,
        groups=tuple(groups),
        mixed=MixedPlan(size, variant, torch.from_numpy(words)),
    )


def padded_inputs(step, layer, lens, contexts):
    q, k, v, sinks, _ = step.inputs(layer, lens, contexts)
    q, k, v = (None if x is None else pad(x) for x in (q, k, v))
    return AttentionInputs(q, k, v, sinks)


def pad(x):
    return torch.cat([x, x.new_full((NUM_TOKENS - len(x), *x.shape[1:]), 7.0)])


@pytest.mark.parametrize(
    ("specs", "invariant"),
    [
        ((make_spec(4, 2, 16), make_spec(4, 2, 16, window=30, has_sinks=True)), False),
        ((make_spec(4, 2, 16, soft_cap=5.0),), True),
        ((make_latent(3), make_latent(3, window=40, has_sinks=True)), False),
    ],
    ids=["window", "uniform", "latent"],
)
def test_a_replayed_step_has_the_bits_of_one_that_is_launched(specs, invariant, monkeypatch):
    monkeypatch.setattr(triton_paged, "rotate_and_write", torch_write)
    monkeypatch.setattr(triton_plan, "MIN_LATENT_CHUNK_TOKENS", 64)
    monkeypatch.setattr(triton_plan, "MIN_UNIFORM_CHUNK_TOKENS", 64)
    contexts = [90, 17, 140, 20]
    backend = TritonPagedAttention(batch_invariant=invariant)
    step = TritonStep(backend, specs, contexts, groups=tuple(range(len(specs))))
    captured = static_batch(step, [1, 1, 3, 20], contexts)
    backend.plan(captured)
    work = backend._work
    for lens, lengths in (([1, 1, 1, 6], [70, 1, 140, 6]), ([2, 9, 9, 12], contexts)):
        step.fill([length - n for length, n in zip(lengths, lens, strict=True)])
        now = static_batch(step, lens, lengths)
        for group, new in zip(captured.groups, now.groups, strict=True):
            group.block_tables.copy_(new.block_tables)
            group.slot_mapping.copy_(new.slot_mapping)
        captured.mixed.words.copy_(now.mixed.words)
        stored, count = step.storage.clone(), sum(lens)
        expected = step.run_all(lens, lengths)
        written = step.storage.clone()
        step.storage.copy_(stored)
        backend._batch, backend._work = captured, work
        for layer, wanted in enumerate(expected):
            out = backend.run(layer, padded_inputs(step, layer, lens, lengths))
            assert torch.equal(out[:count], wanted)
            assert not out[count:].any()
        assert torch.equal(step.storage, written)


def test_short_and_long_chunks_are_different_variants():
    """In bf16 on an H200, tiles of 64 rows hold 16 tokens of 4 query heads each."""
    spec = make_spec(32, 8, 128)
    step = TritonStep(TritonPagedAttention(), (spec,), [9], dtype=torch.bfloat16)
    size = MixedSize(64, 4, 4096)
    for longest, rows in ((2, 64), (16, 64), (17, 128), (60, 128)):
        words = np.zeros(step.backend.num_plan_words(size), np.int64)
        batch = make_batch([1, longest], [900, longest])
        assert step.backend.write_plan(batch, size, words)[0] == (rows,)


@pytest.mark.parametrize(
    ("heads", "invariant", "most"),
    [
        ([(32, 8)], False, 2),
        ([(32, 8), (64, 16)], False, 2),
        ([(32, 8), (16, 8)], False, 3),
        ([(32, 8), (16, 8)], True, 1),
    ],
    ids=["one kind", "equal ratios", "two ratios", "invariant"],
)
def test_all_variants_of_a_size_are_known_beforehand(heads, invariant, most):
    specs = [make_spec(*each, 128, window=30 + place) for place, each in enumerate(heads)]
    backend = TritonPagedAttention(batch_invariant=invariant)
    assert backend.most_plan_variants(specs) == most
    groups = tuple(range(len(specs)))
    step = TritonStep(backend, tuple(specs), [9], groups=groups, dtype=torch.bfloat16)
    size, variants = MixedSize(200, 4, 4096), set()
    for longest in (2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 150):
        words = np.zeros(step.backend.num_plan_words(size), np.int64)
        variants.add(backend.write_plan(make_batch([1, longest], [900, longest]), size, words)[0])
    assert len(variants) == most
