"""The law, for the native backend: a token's attention is the same to the bit, whatever it is
computed with. All comparisons here are of bits; that they are right is `test_cpu_paged.py`'s.
"""

import pytest
import torch
from tests.attention.native import NativeStep
from tests.attention.paged import make_spec
from tests.attention.test_cpu_paged import DTYPES
from tests.attention.test_torch_shared import CONTEXTS, OPTIONS

from quire.attention.cpu_paged import CpuPagedAttention
from quire.kernels.cpu.library import NativeKernels

QUERY_LENS = [1] * len(CONTEXTS)
SPECS = (make_spec(6, 2, 40), make_spec(6, 2, 40, window=200, soft_cap=4.0, has_sinks=True))


def make_step(kernels, specs, contexts, **options):
    return NativeStep(CpuPagedAttention(kernels), specs, contexts, **options)


def assert_equal(first, second):
    """Outputs of all layers."""
    for out, other in zip(first, second, strict=True):
        assert torch.equal(out, other)


def part(results, tokens):
    return [out[tokens] for out in results]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("specs", [SPECS, (make_spec(2, 1, 80),), (make_spec(32, 1, 16),)])
def test_a_prompt_gives_the_same_in_any_chunks(kernels, dtype, specs):
    """Of one token (decoding), few (split among threads), many, over and inside of tiles."""
    total = 560
    step = make_step(kernels, specs, [total], dtype=dtype)
    whole = step.run_all([total])
    step.storage.fill_(255)
    sizes = [1, 2, 5, 8, 31, 100, 109, 1, 1, 3, 16, 282, 1]
    assert sum(sizes) == total
    start = 0
    for size in sizes:
        results = step.run_all([size], [start + size])
        assert_equal(results, part(whole, slice(start, start + size)))
        start += size


@pytest.mark.parametrize("dtype", DTYPES)
def test_contents_give_the_same_in_any_chunks_that_have_all_of_them(kernels, dtype):
    total = 560
    contents = (range(5, 12), range(20, 300), range(301, 318), range(400, 530))
    specs = (make_spec(4, 2, 64, sees_ahead=True), make_spec(4, 2, 64, window=90, sees_ahead=True))
    step = make_step(kernels, specs, [total], dtype=dtype, contents=contents)
    whole = step.run_all([total])
    step.storage.fill_(255)
    start = 0
    for end in (3, 5, 12, 20, 300, 301, 318, 330, 331, 400, 531, 558, 559, 560):
        results = step.run_all([end - start], [end])
        assert_equal(results, part(whole, slice(start, end)))
        start = end


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_of_a_prompt_is_as_if_decoded(best, dtype):
    total = 300
    step = make_step(best, SPECS, [total], dtype=dtype)
    whole = step.run_all([total])
    for position in range(total):
        assert_equal(step.run_all([1], [position + 1]), part(whole, [position]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_any_company(kernels, dtype):
    contexts = [1, 64, 300, 17, 400, 600, 65, 290, 40]
    query_lens = [1] * 6 + [3, 270, 40]
    step = make_step(kernels, SPECS, contexts, dtype=dtype)
    step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
    crowd = step.run_all(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    for order in ([0], [5], [6], [7], [8, 7], [4, 2, 0, 7, 6]):
        tokens = [t for i in order for t in range(starts[i], starts[i + 1])]
        assert_equal(step.run_all(query_lens, order=order), part(crowd, tokens))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(library, dtype):
    """Nor the shares that they happen to take: some steps are many tasks, in any order."""
    contexts = [5000, 700, 33, 2100, 400]
    query_lens = [1, 1, 1, 2, 300]
    results = []
    for num_threads in (1, 2, 3, 7):
        backend_kernels = NativeKernels(library, num_threads=num_threads)
        step = make_step(backend_kernels, SPECS, contexts, dtype=dtype)
        step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
        results += [step.run_all(query_lens) for _ in range(3)]
    for other in results[1:]:
        assert_equal(results[0], other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_block_size_changes_nothing(kernels, dtype):
    contexts, query_lens = [600, 33, 290], [1, 1, 100]
    results = []
    for block_size in (8, 16, 64, 2048):
        step = make_step(kernels, SPECS, contexts, dtype=dtype, block_size=block_size)
        step.fill([c - n for c, n in zip(contexts, query_lens, strict=True)])
        results.append(step.run_all(query_lens))
    for other in results[1:]:
        assert_equal(results[0], other)


def make_shared_steps(kernels, specs, contexts=None, **options):
    """The same tokens twice: prefixes in shared blocks, and in copies. Two of the prefixes nest."""
    contexts = contexts or CONTEXTS
    steps = []
    for in_blocks in (True, False):
        step = make_step(kernels, specs, contexts, **options)
        step.share([0, 1, 3, 4, 6], 512, in_blocks)
        step.share([0, 4], 640, in_blocks)
        step.share([7, 8], 768, in_blocks)
        step.fill([c - 1 for c in contexts])
        steps.append(step)
    return steps


def check_shared(kernels, specs, dtype):
    shared, private = make_shared_steps(kernels, specs, dtype=dtype)
    results = shared.run_all(QUERY_LENS)
    assert shared.backend.native.step.num_shared_runs > 0
    assert_equal(results, private.run_all(QUERY_LENS))
    assert private.backend.native.step.num_shared_runs == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_shared_prefix_gives_the_bits_of_a_copy(best, name, dtype):
    check_shared(best, (make_spec(**OPTIONS[name]), make_spec(14, 2, 64)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix_gives_the_bits_of_a_copy_everywhere(kernels, dtype):
    check_shared(kernels, (make_spec(14, 2, 24),), dtype)


def test_windows_share_the_tiles_that_all_of_them_see(best):
    """Contexts in step, so that the first blocks seen are the same; the first tile is cut."""
    contexts = [900] * 5 + [911] * 4
    specs = (make_spec(window=700), make_spec(window=500))
    shared, private = make_shared_steps(best, specs, contexts, dtype=torch.bfloat16)
    results = shared.run_all(QUERY_LENS)
    assert shared.backend.native.step.num_shared_runs > 0
    assert_equal(results, private.run_all(QUERY_LENS))


@pytest.mark.parametrize("block_size", [8, 128])
def test_a_shared_prefix_in_several_groups_beside_chunks(best, block_size):
    specs = (make_spec(), make_spec(window=400))
    options = {"groups": (0, 1), "padding_bytes": 512, "block_size": block_size}
    shared, private = make_shared_steps(best, specs, [700] * 9, **options)
    query_lens = [1] * 7 + [100, 110]
    results = shared.run_all(query_lens)
    assert shared.backend.native.step.num_shared_runs > 0
    assert_equal(results, private.run_all(query_lens))


def test_more_sequences_share_than_are_read_for_at_once(kernels):
    contexts = [260 + i for i in range(70)]
    steps = []
    for in_blocks in (True, False):
        step = make_step(kernels, (make_spec(4, 2, 16),), contexts, dtype=torch.bfloat16)
        step.share(list(range(70)), 256, in_blocks)
        step.fill([c - 1 for c in contexts])
        steps.append(step)
    results = [step.run_all([1] * 70) for step in steps]
    assert [step.backend.native.step.num_shared_runs for step in steps] == [1, 0]
    assert_equal(*results)


def test_decoding_needs_little_memory_beside_the_cache(library):
    """Of 32k tokens: less than a twentieth of their K and V, whatever the number of threads."""
    step = make_step(NativeKernels(library, num_threads=2), (make_spec(12, 4, 64),), [32_768])
    step.fill([32_767])
    before = _resident_bytes()
    (out,) = step.run_all([1])
    assert torch.isfinite(out).all()
    assert _resident_bytes() - before < step.storage.numel() / 20


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
