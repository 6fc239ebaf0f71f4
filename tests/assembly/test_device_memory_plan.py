"""Sizing on a device that counts bytes: sums, limits, and what is said where it won't fit."""

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.assembly import rank_build
from quire.assembly.device_memory_plan import (
    DeviceNeeds,
    check_weights_fit,
    graph_reserve_bytes,
    plan_on_device,
)
from quire.assembly.host_memory_plan import MemoryPlan
from quire.assembly.vision_build import VisionMemory
from quire.attention.interface import AttentionSpec
from quire.attention.kv_format import KVFormat
from quire.attention.torch_paged import TorchPagedAttention
from quire.core.step import Runner, StepPlan, StepResult, TokenMasks
from quire.errors import ConfigurationError, InsufficientMemoryError
from quire.options.engine_options import EngineOptions
from quire.runtime.page_layout import plan_layout

MIB = 2**20
SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
# One block: 8 layers x (K, V) x 2 heads x 64 x 16 tokens x 4 bytes, 128 KiB.
LAYOUT = plan_layout((SPEC,) * 8, TorchPagedAttention, 16, KVFormat.plain(torch.float32))
PAGE = LAYOUT.bytes_per_block


class Device:
    """`CudaMemory` of 1,000 MiB: weights, what runners took, and what others hold."""

    def __init__(self, *, weights: int = 400 * MIB, others: int = 50 * MIB) -> None:
        self.total_bytes = 1000 * MIB
        self.weights, self.others = weights, others
        self.taken = 0
        self.peak = 0

    def take(self, num_bytes: int) -> None:
        if self.held_bytes() + num_bytes + self.others > self.total_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        self.taken += num_bytes
        self.peak = max(self.peak, self.held_bytes())

    def give(self, num_bytes: int) -> None:
        self.taken -= num_bytes

    def free_bytes(self) -> int:
        return self.total_bytes - self.others - self.held_bytes()

    def held_bytes(self) -> int:
        return self.weights + self.taken

    def peak_bytes(self) -> int:
        return self.peak

    def release_and_reset_peak(self) -> None:
        self.peak = self.held_bytes()


class FakeRunner(Runner):
    """Takes its pool and its rows as long as it lives, and while it steps so much for each token
    and each row; its first step also loads `library` bytes of code for good."""

    ROWS, TOKEN, LIBRARY = 10 * MIB, MIB // 4, 5 * MIB

    def __init__(self, device: Device, num_blocks: int) -> None:
        self._device = device
        own = num_blocks * PAGE + self.ROWS
        device.take(own)
        weakref.finalize(self, device.give, own)
        self.num_steps = 0

    def execute(self, plan: StepPlan) -> None:
        if not self.num_steps:
            self._device.others = max(self._device.others, 50 * MIB + self.LIBRARY)
        self.num_steps += 1
        working = (plan.num_tokens + plan.num_rows) * self.TOKEN
        self._device.take(working)
        self._device.give(working)

    def sample(self, masks: TokenMasks | None = None) -> None:
        assert masks is None

    def result(self) -> StepResult:
        return StepResult(0, (), ())

    def reset(self) -> None:
        self.num_steps += 0


def maker(device: Device) -> Callable[[MemoryPlan], FakeRunner]:
    return lambda sizes: FakeRunner(device, sizes.num_blocks)


def needs(model_len: int = 256, **changes: object) -> DeviceNeeds:
    """quantization and graph_bytes are of the needs, all others of the options."""
    own = {name: changes.pop(name) for name in ("graph_bytes", "quantization") if name in changes}
    values = {
        "max_model_len": None,
        "block_size": 16,
        "kv_cache_memory": None,
        "num_blocks": None,
        "gpu_memory_utilization": None,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 392,
    } | changes
    return DeviceNeeds(EngineOptions(**values), LAYOUT, model_len, 100, 5, **own)  # type: ignore[arg-type]


def refusal(wanted: DeviceNeeds, device: Device) -> str:
    with pytest.raises(InsufficientMemoryError) as caught:
        plan_on_device(wanted, device, maker(device))
    return str(caught.value)


# The largest step: rows' state, and 392 tokens and 8 rows of it.
WORST = 10 * MIB + 400 * MIB // 4


def test_the_pool_is_what_the_share_leaves() -> None:
    device = Device()
    wanted = needs(graph_bytes=20 * MIB)
    made: list[MemoryPlan] = []

    def make(sizes: MemoryPlan) -> FakeRunner:
        made.append(sizes)
        return FakeRunner(device, sizes.num_blocks)

    sized = plan_on_device(wanted, device, make)
    # 900 MiB - 400 of weights - 110 of the step - 20 for graphs - 55 of others and of code.
    assert sized.ledger.kv_cache_bytes == 315 * MIB == sized.memory_plan.num_blocks * PAGE
    assert sized.memory_plan.max_model_len == 256
    assert made[0].num_blocks < 20 and made[1:] == [sized.memory_plan]
    assert sized.ledger.weight_bytes == 400 * MIB
    assert sized.ledger.activation_bytes == WORST
    assert sized.ledger.other_bytes == 55 * MIB
    assert sized.ledger.unused_bytes == 100 * MIB
    assert sized.ledger.total_bytes == device.total_bytes
    assert sized.runner.num_steps == 4, "the final runner was not proven"
    assert device.held_bytes() == 400 * MIB + 315 * MIB + FakeRunner.ROWS


def test_images_have_a_part_of_the_memory() -> None:
    """The encoder's weights are among those that the device holds; it works between steps."""
    device = Device()
    vision = VisionMemory(weight_bytes=30 * MIB, cache_bytes=20 * MIB, slot_bytes=8 * MIB)
    for encoding_bytes, worst in ((WORST - 1, WORST), (WORST + 40 * MIB, WORST + 40 * MIB)):
        wanted = replace(needs(), vision=vision.of_rank(0, 2), encoding_bytes=encoding_bytes)
        ledger = plan_on_device(wanted, device, maker(device)).ledger
        assert ledger.activation_bytes == worst
        assert ledger.kv_cache_bytes == 900 * MIB - (400 + 24 + 55) * MIB - worst
        assert (ledger.weight_bytes, ledger.vision_weight_bytes) == (370 * MIB, 30 * MIB)
        assert ledger.encoder_cache_bytes == 24 * MIB and ledger.total_bytes == device.total_bytes
    assert vision.of_rank(1, 2) == VisionMemory(0, 0, 4 * MIB)


def test_a_step_with_an_image_is_measured() -> None:
    device = Device()
    ledger = plan_on_device(replace(needs(), num_extra_tokens=40), device, maker(device)).ledger
    assert ledger.activation_bytes == WORST + 40 * FakeRunner.TOKEN


def test_a_share_and_a_size_are_obeyed() -> None:
    for changes, expected in (
        ({"gpu_memory_utilization": 0.8}, 235 * MIB),
        ({"kv_cache_memory": 100 * MIB + 5}, 100 * MIB),
        ({"num_blocks": 77}, 77 * PAGE),
        ({"num_blocks": 435 * MIB // PAGE}, 435 * MIB),  # more than the default share
    ):
        device = Device()
        sized = plan_on_device(needs(**changes), device, maker(device))
        assert sized.ledger.kv_cache_bytes == expected


def test_several_ranks_take_what_the_least_of_them_has() -> None:
    device = Device()
    sized = plan_on_device(needs(), device, maker(device), agree=lambda own: own - 40)
    assert sized.ledger.kv_cache_bytes == 335 * MIB - 40 * PAGE
    assert sized.ledger.total_bytes == device.total_bytes


def test_graphs_that_come_later_are_reserved_for() -> None:
    assert graph_reserve_bytes(0, 0) == graph_reserve_bytes(1, 1) == 0
    assert graph_reserve_bytes(21, 0) == 20 * graph_reserve_bytes(2, 0) > 20 * MIB
    assert graph_reserve_bytes(0, 33) == 32 * graph_reserve_bytes(0, 2) >= 32 * MIB
    assert graph_reserve_bytes(21, 33) == graph_reserve_bytes(21, 0) + graph_reserve_bytes(0, 33)


def test_each_variant_of_a_mixed_step_is_reserved_for() -> None:
    backend: Any = SimpleNamespace(most_plan_variants=lambda specs: 1 + len(specs))
    model: Any = SimpleNamespace(attention_specs=("a", "b"))
    for mixed_sizes, num_mixed in (((4, 8, 16), 9), ((), 0)):
        reserved = rank_build._reserve_bytes(model, backend, (1, 2, 4, 8), mixed_sizes)
        assert reserved == graph_reserve_bytes(4, num_mixed)


def test_refusal_of_too_many_blocks_names_the_possible_number() -> None:
    text = refusal(needs(num_blocks=436 * MIB // PAGE), Device())
    assert text.startswith("num_blocks=3488 asks for 436.0 MiB of KV cache, but weights take 400.0")
    assert text.endswith(f"lower it to at most 3480 blocks ({435 * MIB} bytes)")


def test_a_model_longer_than_the_pool_is_shortened_unless_that_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device()
    with caplog.at_level("WARNING", "quire"):
        sized = plan_on_device(needs(50_000), device, maker(device))
    fitting = 335 * MIB // PAGE * 16
    assert sized.memory_plan.max_model_len == fitting == 42_880
    assert "max_model_len is set to that, not to 50000" in caplog.text
    text = refusal(needs(50_000, max_model_len=50_000), Device())
    assert "335.0 MiB for KV blocks hold 42880 tokens of one sequence, but max_model_len" in text
    assert "50000 tokens need 390.6 MiB, 55.6 MiB more: lower max_model_len to 42880," in text
    assert "or raise gpu_memory_utilization to 0.956" in text
    assert "or choose quantization='int8' (about 40% less)" in text


def test_each_remedy_that_is_named_is_enough() -> None:
    wanted = {"max_model_len": 50_000}
    text = refusal(needs(50_000, **wanted), Device())
    tokens = int(re.search(r"max_num_batched_tokens to about (\d+)", text)[1])  # type: ignore[index]
    share = float(re.search(r"gpu_memory_utilization to ([\d.]+)", text)[1])  # type: ignore[index]
    for change in (
        {"max_num_batched_tokens": tokens - 40},  # "about": the rows' part does not shrink
        {"gpu_memory_utilization": share},
        {"max_model_len": 42_880},
    ):
        device = Device()
        options = wanted | change
        model_len = int(options["max_model_len"])
        sized = plan_on_device(needs(model_len, **options), device, maker(device))
        assert sized.memory_plan.max_model_len == model_len


def test_remedies_that_would_not_do_are_not_named() -> None:
    text = refusal(needs(10**6, max_model_len=10**6, quantization="int8"), Device())
    assert "gpu_memory_utilization to" not in text and "max_num_batched_tokens to" not in text
    assert "quantization=" not in text and "tensor_parallel_size" in text
    text = refusal(needs(5000, max_model_len=5000, num_blocks=10), Device())
    assert "the KV cache that was asked for, 1.2 MiB for KV blocks hold 160 tokens" in text
    assert text.endswith(f"raise kv_cache_memory to {313 * PAGE} bytes (num_blocks to 313)")


def test_no_room_for_any_block() -> None:
    text = refusal(needs(gpu_memory_utilization=0.5), Device())
    assert "0 B for KV blocks hold 0 tokens" in text and "16 tokens need 128.0 KiB" in text
    assert "lower max_model_len to" not in text


def test_a_step_that_is_too_large_is_refused_with_one_that_fits() -> None:
    text = refusal(needs(1000, max_num_batched_tokens=4000), Device())
    assert "a step of max_num_batched_tokens=4000 tokens and max_num_seqs=8 sampled rows" in text
    assert "beside 400.0 MiB of weights; one of 2000 tokens and 8 rows does" in text
    text = refusal(needs(10_000, max_num_batched_tokens=1_000_000), Device())
    assert "lower max_model_len, choose a quantization" in text


def test_memory_lost_between_the_two_runners_is_reported() -> None:
    device = Device()

    def make(sizes: MemoryPlan) -> FakeRunner:
        if sizes.num_blocks > 100:
            device.others += 101 * MIB  # another program
        return FakeRunner(device, sizes.num_blocks)

    with pytest.raises(InsufficientMemoryError, match=r"does not fit any more.*\(to 0\.85\)"):
        plan_on_device(needs(), device, make)


def test_a_kernel_that_is_too_large_for_the_gpu_is_named_in_a_sentence() -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    def make(sizes: MemoryPlan) -> FakeRunner:
        raise errors.OutOfResources(135_168, 101_376, "shared memory")

    expected = "a kernel needs 135168 of shared memory, and the GPU has 101376; choose another GPU"
    with pytest.raises(ConfigurationError, match=expected):
        plan_on_device(needs(), Device(), make)


def test_errors_that_are_not_about_memory_come_through() -> None:
    def broken(sizes: MemoryPlan) -> FakeRunner:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        plan_on_device(needs(), Device(), broken)

    def broken_later(sizes: MemoryPlan) -> FakeRunner:
        return broken(sizes) if sizes.num_blocks > 100 else FakeRunner(device, sizes.num_blocks)

    device = Device()
    with pytest.raises(RuntimeError, match="illegal"):
        plan_on_device(needs(), device, broken_later)


@pytest.mark.parametrize(
    ("weights", "quantization", "said", "unsaid"),
    [
        (960, None, "int8", "int4"),
        (1900, None, "int4", "int8"),
        (960, "int8", "raise tensor_parallel_size", "quantization="),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    weights: int, quantization: str | None, said: str, unsaid: str
) -> None:
    device = Device(weights=0)
    options = EngineOptions(quantization=quantization)
    check_weights_fit(950 * MIB, device, options, has_experts=False)
    with pytest.raises(InsufficientMemoryError, match=r"950\.0 MiB free of 1000\.0 MiB") as caught:
        check_weights_fit(weights * MIB, device, options, has_experts=False)
    assert said in str(caught.value) and unsaid not in str(caught.value)
    assert "set cpu_layers='auto'" in str(caught.value)


def test_experts_that_do_not_fit_are_advised_to_be_left_to_the_cpu() -> None:
    device = Device(weights=0)
    with pytest.raises(InsufficientMemoryError, match="set cpu_experts='auto'"):
        check_weights_fit(1900 * MIB, device, EngineOptions(), has_experts=True)
    with pytest.raises(InsufficientMemoryError) as caught:
        check_weights_fit(1900 * MIB, device, EngineOptions(cpu_experts=2), has_experts=True)
    assert "cpu_experts" not in str(caught.value)
