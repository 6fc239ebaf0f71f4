"""Recurrent states: the native kernels beside a read-and-write loop and beside chunked forms.

Decoding: every sequence of a batch takes one token. What the kernels must do at least is to read
and write all states once, so their peer is torch's fastest loop over the same memory, with as many
threads. Over as many layers as no cache holds; states lie in pages of no order.

Prompts: one sequence from its first token on. The peers are the chunked forms of the same
recurrences, which turn it into products of matrices and whose bits depend on where chunks begin:
the WY form of the gated delta rule (Yang et al., "Gated Delta Networks", 2024, section 3.3) and the
state space dual of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024, section 6), in torch. The
convolution's peer is torch's own. What is compared agrees within 2%, which is checked.

All sides take turns in one process; times are medians. Defaults: the layers of Qwen3-Next-80B-A3B,
of Falcon-H1-1.5B, and of a Mamba-2 of 8 groups and 128 heads.

    python -m benchmarks.cpu.states --threads 2 --batch 16 --prompts 512 2048
"""

import argparse
import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from quire.bench.machine import NoiseMeter
from quire.kernels.cpu.library import NativeKernels, load_library
from quire.kernels.cpu.memory import allocate
from quire.kernels.state_calls import GatedDeltaInputs, Mamba2Inputs, Mamba2Weights
from quire.recurrence.cpu_states import CpuStates
from quire.recurrence.state_backend import LayerStates, StateBatch
from quire.recurrence.state_specs import GatedDeltaSpec, Mamba2Spec, ShortConvSpec

UNCACHED_BYTES = 160 << 20
"""Of all layers together: several times the last cache of this class of machine."""

PAGE_BYTES = 1 << 20
CHUNK = 64
"""Tokens of a chunk in the chunked forms, as others have it."""

GROUP = 8
"""Chunks that the peers prepare at once; more, and what they prepare leaves the caches."""

LEAST_LOG = -80.0
"""Of a decay, in the peers: below it exp makes denormal numbers, which are slow."""

SETTLE_S = 0.05

DECODE_HEADER = "  decode                 states MiB    quire us  loop us   GB/s  of the loop"
PREFILL_HEADER = (
    "  prompt                     tokens    quire ms   chunked bf16   chunked fp32   of the faster"
)

Spec = GatedDeltaSpec | Mamba2Spec | ShortConvSpec
Tensors = tuple[torch.Tensor, ...]
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer, with weights where it has some."""

    name: str
    spec: Spec

    def inputs(self, num_tokens: int) -> Tensors:
        """As a model gives them: vectors in bf16, gates in fp32."""
        spec = self.spec
        if isinstance(spec, GatedDeltaSpec):
            keys, heads = (num_tokens, spec.num_k_heads), (num_tokens, spec.num_v_heads)
            q, k = (torch.randn(*keys, spec.key_dim).bfloat16() for _ in range(2))
            v = torch.randn(*heads, spec.value_dim).bfloat16()
            return q, k, v, -torch.rand(heads), torch.rand(heads)
        if isinstance(spec, Mamba2Spec):
            groups = num_tokens, spec.num_groups, spec.state_size
            x = torch.randn(num_tokens, spec.num_heads, spec.head_dim).bfloat16()
            b, c = (torch.randn(groups).bfloat16() for _ in range(2))
            return x, torch.randn(num_tokens, spec.num_heads), b, c
        return (torch.randn(num_tokens, spec.num_channels).bfloat16(),)

    def weights(self) -> Mamba2Weights | Tensors:
        """The weights of Mamba-2 or of a convolution; other kinds have none."""
        spec = self.spec
        if isinstance(spec, Mamba2Spec):
            a, d, bias = (torch.rand(spec.num_heads) for _ in range(3))
            return Mamba2Weights(-1 - 8 * a, d, bias)
        if isinstance(spec, ShortConvSpec):
            return torch.randn(spec.num_channels, spec.width), torch.randn(spec.num_channels)
        return ()

    def run(self, backend: CpuStates, layer: int, given: Tensors, weights: object) -> torch.Tensor:
        """quire's run of a layer."""
        if isinstance(self.spec, GatedDeltaSpec):
            return backend.gated_delta(layer, GatedDeltaInputs(*given))
        if isinstance(weights, Mamba2Weights):
            return backend.mamba2(layer, Mamba2Inputs(*given), weights)
        assert isinstance(weights, tuple)
        return backend.short_conv(layer, *given, *weights)

    def peer(self, dtype: torch.dtype, given: Tensors, weights: object) -> torch.Tensor:
        """torch's run of a prompt, its products in `dtype`."""
        if isinstance(self.spec, GatedDeltaSpec):
            return chunked_gated_delta(dtype, *given)
        if isinstance(weights, Mamba2Weights):
            return chunked_mamba2(dtype, *given, weights)
        assert isinstance(weights, tuple)
        return plain_conv(dtype, *given, *weights)


SHAPES = (
    Shape("gated delta 32x128x128", GatedDeltaSpec(16, 32, 128, 128)),
    Shape("convolution 8192x4", ShortConvSpec(8192, 4)),
    Shape("mamba2 48x64x256", Mamba2Spec(48, 64, 256)),
    Shape("mamba2 128x64x128", Mamba2Spec(128, 64, 128, num_groups=8)),
)


def in_groups(given: Tensors) -> list[Tensors]:
    """A prompt's tensors, a group of chunks at a time, each [chunks, CHUNK, ...]."""
    parts = (x.view(-1, CHUNK, *x.shape[1:]).split(GROUP) for x in given)
    return list(zip(*parts, strict=True))


def decays(logs: torch.Tensor) -> torch.Tensor:
    """Sums of logs of decays [..., CHUNK] -> from each token to each later one, [.., to, from]."""
    between = logs[..., :, None] - logs[..., None, :]
    return between.clamp_(LEAST_LOG, 0).exp_().tril_()


def inverse(strict: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 of strictly lower A [.., CHUNK, CHUNK]: of blocks of 16 on the diagonal, from
    which those of 32 and 64 are put together."""
    size = 16
    a = strict.reshape(-1, CHUNK, CHUNK)
    blocks = [a[:, i : i + size, i : i + size] for i in range(0, CHUNK, size)]
    eye = torch.eye(size).expand(len(a) * len(blocks), size, size)
    done = torch.linalg.solve_triangular(
        torch.stack(blocks, 1).flatten(0, 1), eye, upper=False, unitriangular=True
    )
    while size < CHUNK:
        upper, lower = done.view(-1, 2, size, size).unbind(1)
        starts = range(0, CHUNK, 2 * size)
        below = [a[:, i + size : i + 2 * size, i : i + size] for i in starts]
        joined = torch.zeros(len(upper), 2 * size, 2 * size)
        joined[:, :size, :size], joined[:, size:, size:] = upper, lower
        product = lower @ torch.stack(below, 1).flatten(0, 1) @ upper
        torch.neg(product, out=joined[:, size:, :size])
        done, size = joined, 2 * size
    return done.view(strict.shape)


def chunked_gated_delta(
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """q, k [T, Hk, dk] not normalized, v [T, Hv, dv], g, beta [T, Hv] -> [T, Hv, dv]."""
    (hk, dk), (hv, dv) = q.shape[1:], v.shape[1:]
    state = torch.zeros(hv, dk, dv)
    out = torch.empty(len(q) // CHUNK, CHUNK, hv, dv, dtype=dtype)
    queues = zip(in_groups((q, k, v, g, beta)), out.split(GROUP), strict=True)
    for (q_in, k_in, v_in, g_in, beta_in), results in queues:
        n = len(q_in)
        heads, per_key = (n, hk, hv // hk, CHUNK), (n, hk, 1, CHUNK)
        units = (F.normalize(x.float(), dim=-1).transpose(1, 2) for x in (q_in, k_in))
        queries, keys = (x.to(dtype).contiguous() for x in units)
        queries *= dk**-0.5
        values = v_in.to(dtype).transpose(1, 2)
        logs = g_in.cumsum(1).transpose(1, 2).contiguous()
        rate = beta_in.transpose(1, 2).reshape(*heads, 1)
        since = logs.exp().view(*heads, 1)
        until = (logs[..., -1:] - logs).exp().view(*heads, 1)
        decay = decays(logs).view(*heads, CHUNK)
        scores = decay * (keys @ keys.mT).view(*per_key, CHUNK)
        solved = inverse(scores.mul_(rate).tril_(-1)) * rate.mT
        shares = (decay * (queries @ keys.mT).view(*per_key, CHUNK)).to(dtype).flatten(1, 2)
        new = solved.to(dtype).flatten(1, 2) @ values
        seen = (solved * since.mT).to(dtype).view(n, hk, -1, CHUNK) @ keys
        asked = torch.empty(n, hv, 2 * CHUNK, dk, dtype=dtype)
        asked[:, :, :CHUNK] = seen.view(n, hv, CHUNK, dk)
        asked[:, :, CHUNK:] = (queries.view(*per_key, dk) * since.to(dtype)).flatten(1, 2)
        kept = (keys.view(*per_key, dk) * until.to(dtype)).flatten(1, 2).mT
        last = since[:, :, :, -1].reshape(n, hv, 1, 1)
        for i in range(n):
            found = asked[i] @ state.to(dtype)
            delta = new[i] - found[:, :CHUNK]
            results[i] = torch.baddbmm(found[:, CHUNK:], shares[i], delta).transpose(0, 1)
            state.mul_(last[i]).add_(kept[i] @ delta)
    return out.view(v.shape)


def chunked_mamba2(
    dtype: torch.dtype,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: Mamba2Weights,
) -> torch.Tensor:
    """x [T, H, P], dt [T, H] before bias and softplus, b, c [T, G, N] -> [T, H, P]."""
    assert weights.d is not None and weights.dt_bias is not None
    (num_heads, size), (num_groups, state_size) = x.shape[1:], b.shape[1:]
    steps = F.softplus(dt + weights.dt_bias)
    per_group = num_heads // num_groups
    state = torch.zeros(num_groups, state_size, per_group, size)
    out = torch.empty(len(x) // CHUNK, CHUNK, num_heads, size, dtype=dtype)
    given = in_groups((x.to(dtype), steps, b.to(dtype), c.to(dtype)))
    for (x_in, step, b_in, c_in), results in zip(given, out.split(GROUP), strict=True):
        n = len(x_in)
        logs = (step * weights.a).cumsum(1)
        heads = (n, num_groups, per_group, CHUNK)
        inputs = x_in * step.to(dtype)[..., None]
        keys, queries = (part.transpose(1, 2) for part in (b_in, c_in))
        scores = (queries @ keys.mT).view(n, num_groups, 1, CHUNK, CHUNK)
        decay = decays(logs.transpose(1, 2)).view(*heads, CHUNK)
        shares = (decay * scores).to(dtype).flatten(1, 2)
        within = shares @ inputs.transpose(1, 2)
        until = (logs[:, -1:] - logs).exp().to(dtype)
        kept = (inputs * until[..., None]).view(n, CHUNK, num_groups, -1).transpose(1, 2)
        last = logs[:, -1].exp().view(n, num_groups, 1, per_group, 1)
        added = (keys.mT @ kept).view(n, *state.shape)
        before = torch.empty(n, num_groups, state_size, per_group * size, dtype=dtype)
        for i in range(n):
            before[i] = state.flatten(2)
            state.mul_(last[i]).add_(added[i])
        found = (queries @ before).transpose(1, 2).reshape(inputs.shape)
        found.mul_(logs.exp().to(dtype)[..., None]).add_(within.transpose(1, 2))
        torch.addcmul(found, x_in, weights.d.to(dtype)[:, None], out=results)
    return out.view(x.shape)


def plain_conv(
    dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """x [T, C], weight [C, W], bias [C] -> [T, C]."""
    width, channels = weight.shape[1], len(weight)
    inputs = F.pad(x.to(dtype).T[None], (width - 1, 0))
    found = F.conv1d(inputs, weight[:, None].to(dtype), bias.to(dtype), groups=channels)
    return F.silu(found, inplace=True)[0].T.contiguous()


@dataclass(slots=True)
class Memory:
    """States of some layers, for `num_rows` sequences, in pages of no order."""

    spec: Spec
    num_layers: int
    num_rows: int

    def bind(self, kernels: NativeKernels) -> tuple[CpuStates, torch.Tensor, torch.Tensor]:
        """A backend over them, their pages, and the table of pages."""
        units = self.num_layers * self.spec.num_units
        per_page = min(units, PAGE_BYTES // self.spec.unit_bytes)
        per_row = -(-units // per_page)
        size = per_page * self.spec.unit_bytes
        pages = allocate(self.num_rows * per_row * size).view(-1, size)
        pages.zero_()
        table = torch.randperm(len(pages)).to(torch.int32).view(self.num_rows, per_row)
        layers = tuple(
            LayerStates(pages, 0, layer * self.spec.num_units, per_page)
            for layer in range(self.num_layers)
        )
        backend = CpuStates(kernels)
        backend.bind((self.spec,) * self.num_layers, layers)
        return backend, pages, table


def batch_of(table: torch.Tensor, num_tokens: int, context: int) -> StateBatch:
    """A step in which every row computes num_tokens tokens."""
    num_rows = len(table)
    return StateBatch(
        query_start=torch.arange(num_rows + 1, dtype=torch.int32) * num_tokens,
        context_lens=torch.full((num_rows,), context, dtype=torch.int32),
        rows=torch.arange(num_rows),
        query_lens_list=[num_tokens] * num_rows,
        context_lens_list=[context] * num_rows,
        rows_list=list(range(num_rows)),
        num_decodes=num_rows if num_tokens == 1 else 0,
        tables=(table,),
    )


def keep_freed_memory() -> None:
    """Have the C library reuse what was freed, so that no side pays for fresh pages from the
    system: peers allocate tens of MiB a call. Elsewhere than with glibc nothing happens."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            library.mallopt(option, 32 << 20)


def medians_s(rounds: int, sides: list[Callable[[], object]]) -> list[float]:
    """The median seconds of a call of each side. Sides take turns, and each waits until the threads
    of the others have stopped spinning."""
    found: list[list[float]] = [[] for _ in sides]
    for index in range(rounds + 1):
        turn = list(zip(found, sides, strict=True))
        for times, run in turn if index % 2 == 0 else turn[::-1]:
            time.sleep(SETTLE_S)
            run()
            started_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - started_s)
    return [statistics.median(times[1:]) for times in found]


def decode(kernels: NativeKernels, shape: Shape, num_rows: int, rounds: int) -> str:
    """The line of a table."""
    state_bytes = num_rows * shape.spec.num_units * shape.spec.unit_bytes
    num_layers = max(2, -(-UNCACHED_BYTES // state_bytes))
    backend, pages, table = Memory(shape.spec, num_layers, num_rows).bind(kernels)
    backend.plan(batch_of(table, 1, 2))
    given, weights = shape.inputs(num_rows), shape.weights()
    numbers = pages.view(torch.float32)

    def all_layers() -> None:
        for layer in range(num_layers):
            shape.run(backend, layer, given, weights)

    loops = [partial(numbers.mul_, 1.0), partial(numbers.add_, 0.0), numbers.neg_]
    ours_s, *loops_s = medians_s(rounds, [all_layers, *loops])
    used = num_layers * state_bytes / pages.numel()  # the last page of a row may not be full
    loop_s = min(loops_s) * used
    speed = 2 * num_layers * state_bytes / ours_s / 1e9
    return (
        f"  {shape.name:24s}{state_bytes / 2**20:9.1f}{ours_s / num_layers * 1e6:12.1f}"
        f"{loop_s / num_layers * 1e6:9.1f}{speed:7.1f}{loop_s / ours_s:13.3f}"
    )


def check(shape: Shape, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raises RuntimeError if the two don't compute the same."""
    error = float((ours.float() - theirs.float()).norm() / ours.float().norm())
    if not math.isfinite(error) or error > 0.02:
        raise RuntimeError(f"{shape.name}: the results differ by {error:.3%} of their norm")


def prefill(kernels: NativeKernels, shape: Shape, num_tokens: int, rounds: int) -> str:
    """The line of a table."""
    backend, _, table = Memory(shape.spec, 1, 1).bind(kernels)
    backend.plan(batch_of(table, num_tokens, num_tokens))
    given, weights = shape.inputs(num_tokens), shape.weights()
    run = partial(shape.run, backend, 0, given, weights)
    peers = [partial(shape.peer, x, given, weights) for x in (torch.bfloat16, torch.float32)]
    for peer in peers:
        check(shape, run(), peer())
    ours_s, *theirs_s = medians_s(rounds, [run, *peers])
    times = f"{theirs_s[0] * 1e3:15.3f}{theirs_s[1] * 1e3:15.3f}{ours_s / min(theirs_s):16.3f}"
    return f"  {shape.name:24s}{num_tokens:9d}{ours_s * 1e3:12.3f}{times}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--threads", type=int, default=2)
    add("--kernels", help="an instruction set of the native library; default: the best")
    add("--batch", type=int, default=16, help="sequences that decode")
    add("--prompts", type=int, nargs="*", default=[512, 2048], help="tokens, multiples of 64")
    add("--shapes", default="", help="only those with this text in their name")
    add("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    if any(num_tokens % CHUNK for num_tokens in args.prompts):
        parser.error(f"--prompts must be multiples of {CHUNK}, the peers' chunks")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    kernels = NativeKernels(load_library(), args.kernels, args.threads)
    shapes = [shape for shape in SHAPES if args.shapes in shape.name]
    keep_freed_memory()
    meter = NoiseMeter()
    print(f"{kernels.isa}, {args.threads} threads, {args.batch} sequences decode")
    with torch.inference_mode():
        print(DECODE_HEADER)
        for shape in shapes:
            print(decode(kernels, shape, args.batch, args.rounds), flush=True)
        print(PREFILL_HEADER)
        for shape in shapes:
            for num_tokens in args.prompts:
                print(prefill(kernels, shape, num_tokens, args.rounds), flush=True)
    noise = meter.stop()
    print(f"cores of others: {noise.other_cores}, stolen: {noise.steal_cores}")


if __name__ == "__main__":
    main()
