"""The layers of hybrids that people run: the shapes of their memory, after their configs.

What begins with "like" has the proportions of a family, not the numbers of one checkpoint.
Attention is (how many layers, KV heads, head size, window), latent (how many, size of the vector),
states (how many layers, units of a layer, bytes of a unit). What a layer caches is in bfloat16,
states of linear attention and of Mamba-2 in float32 units of 16 columns (rows), convolutions in
float32 units of 64 channels.
"""

from dataclasses import dataclass

from quire.core.kv_groups import KVGroup, KVKind
from quire.runtime.page_layout import PageNeeds, plan_groups

ITEM_BYTES = 2
UNIT_COLUMNS = 16
CONV_CHANNELS = 64


@dataclass(frozen=True)
class Shape:
    """max_len: of the model; pages are planned for sequences of half of it."""

    max_len: int
    attention: tuple[tuple[int, int, int, int | None], ...] = ()
    latent: tuple[tuple[int, int], ...] = ()
    states: tuple[tuple[int, int, int], ...] = ()

    def needs(self, block_size: int) -> PageNeeds:
        layers: dict[tuple[KVKind, int | None], dict[int, int]] = {}
        parts = [
            (KVKind.FULL if window is None else KVKind.WINDOW, window, count, 2 * heads * size)
            for count, heads, size, window in self.attention
        ]
        parts += [(KVKind.LATENT, None, count, size) for count, size in self.latent]
        first = 0
        for kind, window, count, num_elements in parts:
            group = layers.setdefault((kind, window), {})
            for layer in range(first, first + count):
                group[layer] = block_size * num_elements * ITEM_BYTES
            first += count
        states: dict[int, dict[int, int]] = {}
        first = 0
        for count, num_units, unit_bytes in self.states:
            for layer in range(first, first + count):
                states.setdefault(unit_bytes, {})[layer] = num_units
            first += count
        return PageNeeds(layers, states)

    def groups(self, block_size: int) -> tuple[KVGroup, ...]:
        return plan_groups(self.needs(block_size), block_size, self.max_len // 2)


def delta(count: int, heads: int, key_dim: int = 128, value_dim: int = 128) -> tuple[int, int, int]:
    """Layers of gated delta rules (Gated DeltaNet, Kimi's delta attention): [dk, dv] a head."""
    return count, heads * value_dim // UNIT_COLUMNS, key_dim * UNIT_COLUMNS * 4


def mamba2(count: int, heads: int, head_dim: int, state_dim: int) -> tuple[int, int, int]:
    """Layers of Mamba-2: [P, N] a head."""
    return count, heads * head_dim // UNIT_COLUMNS, state_dim * UNIT_COLUMNS * 4


def conv(count: int, channels: int, width: int) -> tuple[int, int, int]:
    """Short convolutions over so many inputs: the last width - 1 of each channel."""
    return count, -(-channels // CONV_CHANNELS), CONV_CHANNELS * (width - 1) * 4


SHAPES = {
    # Five layers with a window to one without.
    "Gemma-3-4B": Shape(131_072, ((5, 4, 256, None), (29, 4, 256, 1024))),
    "Gemma-3-27B": Shape(131_072, ((10, 16, 128, None), (52, 16, 128, 1024))),
    # Full layers with fewer and larger heads than those with windows.
    "like Gemma 4, large": Shape(262_144, ((10, 4, 512, None), (50, 16, 256, 1024))),
    "like Gemma 4, small": Shape(131_072, ((7, 1, 512, None), (28, 2, 256, 512))),
    "gpt-oss-20b": Shape(131_072, ((12, 8, 64, None), (12, 8, 64, 128))),
    # Three layers of Gated DeltaNet, with their convolutions, to one of attention.
    "Qwen3-Next-80B-A3B": Shape(
        262_144, ((12, 2, 256, None),), states=(delta(36, 32), conv(36, 8192, 4))
    ),
    "like Qwen3.5, 0.8B": Shape(
        262_144, ((6, 2, 256, None),), states=(delta(18, 16), conv(18, 6144, 4))
    ),
    # Attention and Mamba-2 beside each other in all layers.
    "Falcon-H1-0.5B": Shape(
        16_384, ((36, 2, 64, None),), states=(mamba2(36, 24, 64, 128), conv(36, 1792, 4))
    ),
    "Falcon-H1-34B": Shape(
        262_144, ((72, 4, 128, None),), states=(mamba2(72, 32, 128, 256), conv(72, 5120, 4))
    ),
    # Few layers of attention among many of Mamba-2.
    "Nemotron-H-8B": Shape(
        8192, ((4, 8, 128, None),), states=(mamba2(24, 128, 64, 128), conv(24, 10_240, 4))
    ),
    "like Jamba": Shape(
        262_144, ((4, 8, 128, None),), states=(mamba2(28, 128, 64, 16), conv(28, 8192, 4))
    ),
    "DeepSeek-V2-Lite": Shape(163_840, latent=((27, 576),)),
    "Kimi-Linear-48B": Shape(
        1_048_576, latent=((7, 576),), states=(delta(20, 32), conv(20, 3 * 4096, 4))
    ),
    "LFM2-1.2B": Shape(128_000, ((6, 8, 64, None),), states=(conv(10, 2048, 3),)),
    # No attention at all; and layers that all differ a little (OpenELM's KV heads).
    "Mamba-2 2.7B": Shape(4096, states=(mamba2(64, 80, 64, 128), conv(64, 5376, 4))),
    "OpenELM-1.1B": Shape(2048, ((4, 4, 64, None), (10, 3, 64, None), (14, 5, 64, None))),
}
