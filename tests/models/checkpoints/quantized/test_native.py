"""Models whose weights stay codes, multiplied by the native kernels."""

import pytest
import torch
from tests.models.checkpoints.quantized.test_awq import awq
from tests.models.checkpoints.quantized.test_awq import settings as awq_settings
from tests.models.checkpoints.quantized.test_compressed_tensors import TOKENS, bytes_of, packed
from tests.models.checkpoints.quantized.test_compressed_tensors import settings as ct_settings
from tests.models.checkpoints.quantized.test_gptq import gptq
from tests.models.checkpoints.quantized.test_gptq import settings as gptq_settings
from tests.models.checkpoints.quantized.writers import mixed_up, rewrite
from transformers import LlamaConfig as HFLlamaConfig

from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods
from quire.formats.dense import DenseMethod
from quire.formats.packed import PackedMethod
from quire.kernels.cpu.library import NativeKernels
from quire.layers.linear import Linear
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import Reading, load_model
from quire.models.registry import load_config

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
CASES = {
    "AWQ": (awq(128), awq_settings(group_size=128)),
    "GPTQ": (gptq(size=64), gptq_settings(group_size=64)),
    "GPTQ, act-order": (gptq(order=mixed_up, symmetric=False), gptq_settings(sym=False)),
    "GPTQ, 8 bits": (gptq(8), gptq_settings(bits=8)),
    "W4A16": (packed(4, 128, symmetric=False), ct_settings("pack-quantized", {})),
    "W8A8": (bytes_of(0, dtype=torch.bfloat16), ct_settings("int-quantized", {}, TOKENS)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_torchs_of_the_same_codes(
    name, save_checkpoint, run, kernels: NativeKernels
) -> None:
    folder, model = save_checkpoint(HFLlamaConfig, **SIZES)
    writer, settings = CASES[name]
    rewrite(folder, model, {"": writer}, settings)
    ids = torch.arange(3, 40)
    logits = []
    for method, quantized in (
        (PackedMethod(kernels), BlockQuantizedMethods(kernels)),
        (DenseMethod(), BlockQuantizedMethods()),
    ):
        loaded = load_model(
            folder,
            load_config(folder),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=64,
            methods=LinearMethods(method, block_quantized=quantized),
            reading=Reading(num_threads=2),
        )
        kept = [each for each in loaded.modules() if isinstance(each, Linear)]
        assert sum(each.method.takes_quantized(0) for each in kept) == 2 * 4
        logits.append(run(loaded, ids, [20, 17]))
        # Attention is torch's here, whose sums depend on the sizes of the chunks.
        torch.testing.assert_close(logits[-1], run(loaded, ids, [1, 36]), atol=0.2, rtol=0.05)
    native, reference = logits
    assert (native - reference).norm() / reference.norm() < 3e-2
