"""How the kernels that sample are launched."""

from typing import Any

from tests.kernels.triton.compiling import KernelSpec

from quire.kernels.triton.sampling import (
    edit_logits,
    gumbel_sample,
    penalties,
    scan_logits,
    token_logprobs,
)
from quire.kernels.triton.support import next_power_of_two

# Of arguments, which have one meaning in all of these kernels.
_FLOATS = (
    "logits tile_largest group_largest raw_largest out temperature log_min_p cutoff scores sums "
    "bias factors"
)
_INT32S = (
    "tile_token chosen k leaders token token_ids state line above num_top masks lines limits last "
    "before min_length table places"
)
_INT64S = "stream position masses row rows lengths spans"
TYPES = {
    **{f"{name}_ptr": "*fp32" for name in _FLOATS.split()},
    **{f"{name}_ptr": "*i32" for name in _INT32S.split()},
    **{f"{name}_ptr": "*i64" for name in _INT64S.split()},
    **{"top_p_ptr": "*fp64", "too_close": "fp32"},
    **{"stride": "i32:16", "ids_stride": "i32:16", "max_len": "i32:16"},
    **dict.fromkeys(("width", "num_pairs", "num_words", "longest"), "i32"),
}


def _specs(vocab_size: int, tile: int) -> list[KernelSpec]:
    num_tiles, num_groups = -(-vocab_size // tile), -(-vocab_size // scan_logits.GROUP)
    sizes = {
        **{"V": vocab_size, "TILE": tile, "GROUP": scan_logits.GROUP, "AT_ONCE": 64},
        **{"NUM_TILES": num_tiles, "BLOCK_TILES": next_power_of_two(num_tiles)},
        **{"NUM_GROUPS": num_groups, "BLOCK_GROUPS": next_power_of_two(num_groups)},
    }

    def spec(kernel: Any, num_warps: int, block: int = 1024, **changes: Any) -> KernelSpec:
        types = TYPES | changes.pop("types", {})
        names = kernel.arg_names
        return KernelSpec(
            kernel,
            f"V{vocab_size} tiles of {tile}",
            {name: types[name] for name in names if name in types},
            {name: ({"BLOCK": block} | sizes)[name] for name in names if name not in types},
            num_warps,
            options=changes,
        )

    return [
        spec(scan_logits.scan_logits_kernel, 4),
        spec(scan_logits.kth_largest_kernel, 8),
        spec(gumbel_sample.race_kernel, 8),
        spec(gumbel_sample.choose_kernel, 8),
        spec(gumbel_sample.weigh_kernel, 4),
        spec(gumbel_sample.finish_kernel, 16),
        spec(token_logprobs.sum_tiles_kernel, 4),
        spec(token_logprobs.pick_best_kernel, 8, types={"out_ptr": "*i32"}),
        spec(edit_logits.forbid_unset_kernel, 4),
        spec(edit_logits.forbid_before_kernel, 4, 128),
        spec(edit_logits.forbid_words_kernel, 4, 128),
        spec(edit_logits.add_bias_kernel, 4, 128),
        spec(penalties.count_tokens_kernel, 4),
        spec(penalties.penalize_kernel, 4, enable_fp_fusion=False),
    ]


# The real ones take long to compile: of these the tests compile the one that needs most registers
# for each of its tokens.
SPECS = _specs(20_000, 1024)
MORE = _specs(151_936, scan_logits.TILE)
SPECS += [spec for spec in MORE if spec.kernel is gumbel_sample.race_kernel]
