"""Every Triton kernel on fresh random inputs beside its torch reference, and what some take.

Where a reference fixes each rounding the bound is a few units in the last place; where sums differ
in order it is the error of rounding the operands. Attention is in `attention.py`, recurrent layers
are in `states.py`, linears of block-quantized weights in `block_quantized.py`, adapters in
`adapters.py`.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.attention import relative_error
from benchmarks.gpu.harness import Bench
from quire.attention.interface import AttentionSpec
from quire.attention.kv_format import KVFormat
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.sampling_params import DecodingParams
from quire.core.step import BlockCopy
from quire.formats.format_registry import WEIGHT_FORMATS, load_weight_format
from quire.formats.weight_format import SampledMethod, TritonLinears
from quire.kernels.activations import ActivationFunction, Gating
from quire.kernels.operators import TORCH_OPERATORS, Operators
from quire.kernels.rotary import Angles, Rotation, rotate
from quire.kernels.routing import RouterSpec, Routing, route
from quire.kernels.transfers import DeviceLink
from quire.kernels.triton.attention.quantized_kv import KVPages
from quire.kernels.triton.attention.rotary_kv_write import rotate_and_write
from quire.kernels.triton.operators import TritonOperators
from quire.kernels.unnormed_rows import UnnormedRows
from quire.layers.experts import Experts, MoESpec
from quire.layers.linear import Linear, LinearKind
from quire.runtime.kv_cache import KVCache
from quire.runtime.page_layout import plan_layout
from quire.sampling.device.history import DeviceHistory
from quire.sampling.device.sampler import DeviceSampler
from quire.sampling.host.history import TokenHistory
from quire.sampling.host.sampler import Sampler, SamplingRows, StepSampler

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Activations are rounded to 8 bits on both sides, but near a half they may go either way.
QUANTIZED_BOUND = 5e-3

SKINNY_GOAL = 0.80
SAMPLING_GOAL_S = 1e-3

# Which kernel files of `quire/kernels/triton` each check launches.
COVERS = {
    "operators": ("rms_norm", "activations", "layer_norm"),
    "rotary and the write of K and V": ("rotary_kv_write",),
    "copies": ("copy_blocks",),
    "linears": (
        *("matmul", "skinny_matmul", "int8_matmul", "int4_matmul"),
        *("quantize_groups", "quantize_rows"),
    ),
    "block-quantized linears": (
        "block_quantized_matmul",
        "grouped_block_quantized_matmul",
        "block_quantized_rows",
        "widened_block_matmul",
        "float8_rows",
    ),
    "adapters": ("adapter_matmul",),
    "experts": ("group_plan", "grouped_matmul", "grouped_int8_matmul", "grouped_int4_matmul"),
    "sampling": (*("scan_logits", "gumbel_sample", "edit_logits", "penalties", "token_logprobs"),),
    "attention": (
        *("paged_attention", "decode_work", "merge_parts", "latent_write", "latent_attention"),
    ),
    "states": ("gated_delta_rule", "mamba2_scan", "causal_conv"),
}


def measure_kernels(bench: Bench) -> None:
    """Measure the parts of a step other than attention."""
    measure_skinny(bench)
    measure_sampling(bench)


def dtypes(bench: Bench) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if bench.small else tuple(BOUNDS)


def _random(bench: Bench, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=bench.device).to(dtype)


def check_operators(bench: Bench, dtype: torch.dtype) -> None:
    """Odd sizes, strided rows."""
    triton = TritonOperators()
    shapes = [(5, 48)] if bench.small else [(1, 4096), (333, 1024), (7, 16, 128), (2048, 2880)]
    worst = 0.0
    for shape in shapes:
        x = _random(bench, *shape[:-1], shape[-1] * 2, dtype=dtype)
        weight = _random(bench, shape[-1], dtype=dtype)
        part = x[..., : shape[-1]]
        expected = TORCH_OPERATORS.rms_norm(part, weight, 1e-6)
        worst = max(worst, relative_error(triton.rms_norm(part, weight, 1e-6), expected))
        worst = max(
            worst, relative_error(triton.gated(x, Gating()), TORCH_OPERATORS.gated(x, Gating()))
        )
        a, b = part.contiguous(), _random(bench, *shape, dtype=dtype)
        wanted = TORCH_OPERATORS.add_rms_norm(a.clone(), b.clone(), weight, 1e-6)
        for found, one in zip(triton.add_rms_norm(a, b, weight, 1e-6), wanted, strict=True):
            worst = max(worst, relative_error(found, one))
    name = f"rms_norm, add_rms_norm, silu_mul, {str(dtype)[6:]}"
    bench.at_most(name, worst, BOUNDS[dtype], is_time=False)
    name = f"gates, activations, soft cap, LayerNorm, {str(dtype)[6:]}"
    bench.at_most(name, _activations_error(bench, dtype), BOUNDS[dtype], is_time=False)


def _activations_error(bench: Bench, dtype: torch.dtype) -> float:
    """The largest of all functions and gates."""
    triton, size = TritonOperators(), 48 if bench.small else 2880
    x, by = (_random(bench, 5, size, dtype=dtype) for _ in range(2))
    weight, bias = (_random(bench, size, dtype=dtype) for _ in range(2))
    calls: list[Callable[[Operators], torch.Tensor]] = [
        lambda each: each.layer_norm(x, weight, bias, 1e-5),
        lambda each: each.soft_cap(x.clone(), 3.0),
        lambda each: each.gated(x, Gating(limit=1.5, alpha=1.7, up_offset=1.0)),
    ]
    for function in ActivationFunction:
        calls += [
            lambda each, function=function: each.activate(x.clone(), function),
            lambda each, function=function: each.gate(x.clone(), by, function),
            lambda each, function=function: each.gated(x, Gating(function)),
        ]
    return max(relative_error(call(triton), call(TORCH_OPERATORS)) for call in calls)


def check_rotary(bench: Bench, dtype: torch.dtype) -> None:
    """With norms of the heads and without; K and V where the slots say, and nowhere else."""
    size, block_size, num_tokens = (16, 8, 4) if bench.small else (128, 16, 321)
    num_heads, num_kv_heads = (4, 2) if bench.small else (16, 8)
    table = _angles(size).to(bench.device)
    worst = 0.0
    for has_norms in (False, True):
        qkv = _random(bench, num_tokens, num_heads + 2 * num_kv_heads, size, dtype=dtype)
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        positions = torch.randint(0, len(table), (num_tokens,), device=bench.device)
        norms = [_random(bench, size, dtype=dtype) for _ in range(2)] if has_norms else [None] * 2
        rotation = Rotation(Angles(table, positions, dtype), *norms, 1e-6)
        wanted_q, wanted_k = rotate(q.clone(), k.clone(), rotation)
        num_blocks = -(-num_tokens // block_size) + 1
        shape = (num_blocks, 2, num_kv_heads, block_size, size)
        pages = torch.full(shape, torch.nan, device=bench.device, dtype=dtype)
        slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(bench.device)
        slots[0] = -1
        found_q = rotate_and_write(q, k, v, rotation, KVPages(pages), slots)
        written = pages.transpose(2, 3).transpose(1, 2).reshape(-1, 2, num_kv_heads, size)
        worst = max(worst, relative_error(found_q, wanted_q))
        worst = max(worst, relative_error(written[slots[1:], 0], wanted_k[1:]))
        exact = torch.equal(written[slots[1:], 1], v[1:])
        count = int(torch.isfinite(written.float()).all(-1).all(-1).all(-1).sum())
        label = f"{str(dtype)[6:]}{', normed heads' if has_norms else ''}"
        bench.check(f"V is copied, padding is not: {label}", exact and count == num_tokens - 1)
    name = f"rotary and the write of K, {str(dtype)[6:]}"
    bench.at_most(name, worst, BOUNDS[dtype], is_time=False)


def _angles(size: int) -> torch.Tensor:
    """[positions, D]: cosines, then sines."""
    inverse = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(4096, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def check_copies(bench: Bench) -> None:
    """Blocks copied within the pool, all at once."""
    spec = AttentionSpec(4, 2, 16, scale=0.25)
    layout = plan_layout((spec,) * 3, TorchPagedAttention, 16, KVFormat.plain(torch.float32))
    num_blocks = 20 if bench.small else 4000
    cache = KVCache(layout, num_blocks, bench.device)
    cache.storage.random_(0, 255)
    before = cache.storage.clone()
    order = torch.randperm(num_blocks).tolist()
    half = num_blocks // 2
    pairs = list(zip(order[:half], order[half:], strict=True))
    cache.copy_blocks(tuple(BlockCopy(source, target) for source, target in pairs))
    for source, target in pairs[:: max(1, half // 50)]:
        before[target] = before[source]
    sampled = [block for pair in pairs[:: max(1, half // 50)] for block in pair]
    bench.check(f"{half} block copies", torch.equal(cache.storage[sampled], before[sampled]))


def check_linears(bench: Bench, dtype: torch.dtype) -> None:
    """The methods that an engine takes, over numbers of rows that choose different kernels."""
    sizes, rows = _products(bench)
    for is_invariant in (False, True):
        found = _linear(bench, sizes, dtype, None, is_invariant=is_invariant)
        worst = 0.0
        for num_rows in rows:
            x = _random(bench, num_rows, sizes[0], dtype=dtype)
            expected = x.double() @ found.weight.double().T
            worst = max(worst, relative_error(found(x), expected))
        worst = max(worst, _normed_error(bench, found, dtype))
        name = f"matrix products{', invariant' if is_invariant else ''}, {str(dtype)[6:]}"
        bench.at_most(name, worst, BOUNDS[dtype], is_time=False)


def _normed_error(bench: Bench, linear: Linear, dtype: torch.dtype) -> float:
    """The error of a row that the linear norms itself, against separate kernels; 0 if it can't."""
    x, residual, weight = (_random(bench, 1, linear.input_size, dtype=dtype) for _ in range(3))
    if not linear.takes_unnormed(x):
        return 0.0
    total = torch.empty_like(residual)
    rows = UnnormedRows(x, residual.clone(), total, 1.0, weight[0], 1e-6, None)
    found = linear.read(rows)
    normed, expected = TritonOperators().add_rms_norm(x.clone(), residual, weight[0], 1e-6)
    return max(relative_error(found, linear(normed)), relative_error(total, expected))


def _products(bench: Bench) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Inputs and outputs; numbers of rows."""
    if bench.small:
        return (32, 48), (1, 3)
    return (1024, 3072), (1, 7, 16, 17, 64, 300)


def check_quantized(bench: Bench) -> None:
    """The same linears with quantized weights, and as vocabulary projections, beside torch."""
    sizes, rows = _products(bench)
    dtype = bench.dtype
    for quantization, is_head in product(WEIGHT_FORMATS, (False, True)):
        found, reference = (
            _linear(bench, sizes, dtype, quantization, is_invariant=each, is_head=is_head)
            for each in (False, None)
        )
        worst = 0.0
        for num_rows in rows:
            x = _random(bench, num_rows, sizes[0], dtype=dtype)
            worst = max(worst, relative_error(found(x).cpu(), reference(x.cpu())))
        name = f"{quantization} products{' of a head' * is_head}"
        bench.at_most(name, worst, QUANTIZED_BOUND, is_time=False)


def check_experts(bench: Bench) -> None:
    """All of a layer's experts at once, beside one after the other; some get no row."""
    hidden, inner, num_experts = (64, 32, 5) if bench.small else (2048, 768, 64)
    router = RouterSpec(num_experts=num_experts, top_k=2 if bench.small else 8)
    spec = MoESpec(router=router, intermediate_size=inner)
    for quantization in (None, *WEIGHT_FORMATS):
        weight_format = load_weight_format(quantization)
        layers = []
        for linears in (TritonLinears(TritonOperators(), batch_invariant=False), None):
            device = bench.device if linears else torch.device("cpu")
            layer = Experts(hidden, spec, dtype=bench.dtype, device=device)
            random_state = torch.Generator().manual_seed(3)
            for linear in (each for each in layer.modules() if isinstance(each, Linear)):
                linear.use(weight_format.method(triton=linears), bench.dtype, device)
                for slot in linear.slots().values():
                    slot.load(0, torch.randn(slot.shape, generator=random_state) * 0.05)
                linear.finish()
            layers.append(layer)
        x = _random(bench, 3 if bench.small else 65, hidden, dtype=bench.dtype)
        logits = torch.randn(len(x), num_experts)
        routing = route(logits, None, spec.router, bench.dtype)
        moved = Routing(*(each.to(bench.device) for each in (routing.ids, routing.weights)))
        error = relative_error(layers[0](x, moved).cpu(), layers[1](x.cpu(), routing))
        name = f"experts, {quantization or str(bench.dtype)[6:]}"
        bench.at_most(name, error, max(QUANTIZED_BOUND, BOUNDS[bench.dtype]), is_time=False)


def _linear(
    bench: Bench,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    quantization: str | None,
    *,
    is_invariant: bool | None,
    is_head: bool = False,
) -> Linear:
    """A linear with the same random weights for the same sizes. If is_invariant is None, torch
    computes it on the CPU."""
    family, device = None, torch.device("cpu")
    if is_invariant is not None:
        family = TritonLinears(TritonOperators(), batch_invariant=is_invariant)
        device = bench.device
    weight_format = load_weight_format(quantization)
    choose = weight_format.head_method if is_head else weight_format.method
    method = choose(None, family)
    kind = LinearKind.REPLICATED
    linear = Linear(sizes[0], (sizes[1],), kind, bias=False, dtype=dtype, device=device)
    linear.use(method, dtype, device)
    generator = torch.Generator().manual_seed(sum(sizes))
    weight = torch.randn((sizes[1], sizes[0]), generator=generator) * sizes[0] ** -0.5
    with torch.no_grad():
        if isinstance(method, SampledMethod) and method.wants_sample:
            method.take_sample(linear, weight)
        linear.slots()["weight", 0].load(0, weight.to(dtype))
    linear.finish()
    return linear


def check_sampling(bench: Bench) -> None:
    """The tokens and ranks of the CPU's sampler, for rows with all kinds of options."""
    num_rows, vocab_size = (6, 61) if bench.small else (64, 151_936)
    num_tokens = np.full(num_rows, 40, np.int64)
    tokens = np.random.default_rng().integers(0, vocab_size, (num_rows, 64)).astype(np.int32)
    logits = _random(bench, num_rows, vocab_size) * 3
    history = TokenHistory(tokens.copy(), num_tokens)
    host = Sampler(_sampling_rows(num_rows, vocab_size))
    rows = np.arange(num_rows)
    wanted = host.sample(logits.cpu().clone(), rows, history)
    sampler = _device_sampler(bench, tokens, num_tokens, vocab_size)
    found = sampler.sample(logits.clone(), rows).fetch()
    share = float((found.token_ids != wanted.token_ids).mean())
    # Penalties are products in fp32: a near-tie may go either way.
    bench.at_most("tokens sampled other than on the CPU", share, 0.02, "of rows", is_time=False)
    errors = [
        abs(found.logprobs[row].logprob - wanted.logprobs[row].logprob)
        for row in wanted.logprobs
        if found.token_ids[row] == wanted.token_ids[row]
    ]
    bench.at_most("log-probabilities", max(errors, default=0.0), 1e-3, is_time=False)


def _sampling_rows(num_rows: int, vocab_size: int) -> SamplingRows:
    """Options in turn; among them greedy rows, and some with log-probabilities."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "logprobs": 0},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.9, "repetition_penalty": 1.2, "top_p": 0.8, "top_k": 100},
    ]
    rows = SamplingRows(num_rows, vocab_size)
    for row in range(num_rows):
        params = DecodingParams(max_tokens=64, seed=row * 977 + 3, **options[row % len(options)])
        rows.set_row(row, params, 0, 20)
    return rows


def _device_sampler(
    bench: Bench, tokens: np.ndarray[Any, Any], num_tokens: np.ndarray[Any, Any], vocab_size: int
) -> StepSampler:
    link = DeviceLink(bench.device)
    history = DeviceHistory(link.upload(tokens), num_tokens)
    return DeviceSampler(_sampling_rows(len(tokens), vocab_size), history, link)


BY_DTYPE: dict[str, Callable[..., None]] = {
    "linears": check_linears,
    "operators": check_operators,
    "rotary and the write of K and V": check_rotary,
}
"""Checks of a bench and a dtype."""

ONCE: dict[str, Callable[[Bench], None]] = {
    "experts": check_experts,
    "quantized linears": check_quantized,
    "sampling": check_sampling,
    "copies": check_copies,
}


def measure_skinny(bench: Bench) -> None:
    """A decode step's products: how much of the copy's bandwidth their weights are read at."""
    shapes = [(32, 48)] if bench.small else [(4096, 6144), (4096, 28_672), (14_336, 4096)]
    shapes += [] if bench.small else [(1024, 4096), (3072, 1024), (4096, 128_256)]
    for num_inputs, num_outputs in shapes:
        num_bytes = num_inputs * num_outputs * bench.dtype.itemsize
        # Several, so that none is found in the L2 cache.
        count = 1 if bench.small else max(1, min(32, 2**28 // num_bytes))
        sizes = (num_inputs, num_outputs)
        linears = [
            _linear(bench, sizes, bench.dtype, None, is_invariant=False) for _ in range(count)
        ]
        x = _random(bench, 1, num_inputs, dtype=bench.dtype)

        def multiply(linears: list[Linear] = linears, x: torch.Tensor = x) -> None:
            for linear in linears:
                linear(x)

        seconds = bench.time_graph_s(multiply) / count
        share = num_bytes / seconds / bench.roofline().read_bytes_s
        note = f"{seconds * 1e6:.1f} us, {num_bytes / seconds / 1e9:.0f} GB/s"
        name = f"one row by {num_outputs} x {num_inputs}"
        bench.add(name, share, "of copy bandwidth", note=note)


def measure_sampling(bench: Bench) -> None:
    """256 rows of a large vocabulary at temperature 1, and with every option."""
    num_rows, vocab_size = (3, 61) if bench.small else (256, 151_936)
    tokens = np.zeros((num_rows, 64), np.int32)
    logits = _random(bench, num_rows, vocab_size)
    rows = np.arange(num_rows)
    for label, params in (
        ("temperature 1", {"temperature": 1.0}),
        ("greedy", {"temperature": 0.0}),
        ("top_p 0.9", {"temperature": 1.0, "top_p": 0.9}),
        ("top_k 50", {"temperature": 1.0, "top_k": 50}),
    ):
        sampler = _device_sampler(bench, tokens, np.full(num_rows, 40, np.int64), vocab_size)
        for row in range(num_rows):
            sampler.rows.set_row(row, DecodingParams(max_tokens=64, seed=row, **params), 0, 20)
        seconds = bench.time_s(lambda sampler=sampler: sampler.sample(logits, rows))
        name = f"sampling {num_rows} rows of {vocab_size}, {label}"
        bench.at_most(name, seconds * 1e3, SAMPLING_GOAL_S * 1e3, "ms", is_time=True)
