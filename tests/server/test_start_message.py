"""What is printed at start: from facts to lines."""

import json
import shlex

import pytest

from quire.engine_client.device_ledger import DeviceLedger
from quire.server.start_message import invitation, ledger
from quire.version import __version__

FACTS = {
    "architecture": "Qwen3ForCausalLM",
    "num_parameters": 596_049_920,
    "dtype": "bfloat16",
    "quantization": "int8",
    "kernels": "avx512_bf16",
    "num_threads": 2,
    "weight_bytes": 600 << 20,
    "kv_cache_bytes": 1 << 30,
    "num_blocks": 640,
    "block_size": 16,
    "num_request_blocks": 128,
    "max_num_seqs": 64,
    "max_model_len": 40960,
}


def test_the_ledger_says_what_was_loaded_and_where_the_memory_goes():
    assert ledger("mine", FACTS).splitlines() == [
        f"quire {__version__}: mine (Qwen3ForCausalLM, 596.0 M parameters), bfloat16, int8 weights,"
        " kernels avx512_bf16, 2 threads",
        "  weights      600.0 MiB",
        "  KV cache       1.0 GiB  640 blocks of 16 tokens: 5 concurrent requests of 2048 tokens",
    ]


def test_several_ranks_are_told():
    ranks = {"kernels": "avx2", "tensor_parallel_size": 2, "num_threads": 1}
    assert ledger("m", ranks) == f"quire {__version__}: m, kernels avx2, 2 ranks, 1 thread each"


def test_memory_nodes_are_told_where_there_are_several():
    one = {"num_threads": 4, "numa": "node 1"}
    assert ledger("m", one).endswith(": m, 4 threads, kept to node 1")
    assert ledger("m", one | {"tensor_parallel_size": 2}).endswith(
        "2 ranks, 4 threads each, kept to memory nodes"
    )
    assert ledger("m", one | {"num_replicas": 2}).endswith(
        "2 replicas, 4 threads each, kept to memory nodes"
    )


def test_on_a_gpu_the_ledger_has_all_parts_and_their_sum():
    device = DeviceLedger(
        weight_bytes=600 << 20,
        activation_bytes=300 << 20,
        graph_bytes=100 << 20,
        kv_cache_bytes=1 << 30,
        other_bytes=500 << 20,
        unused_bytes=36 << 20,
    )
    facts = FACTS | device.facts() | {"device_name": "NVIDIA H200"}
    assert ledger("mine", facts).splitlines()[1:] == [
        "  weights          600.0 MiB",
        "  largest step     300.0 MiB",
        "  CUDA graphs      100.0 MiB",
        "  KV cache           1.0 GiB  640 blocks of 16 tokens: 5 concurrent requests of 2048"
        " tokens",
        "  others           500.0 MiB  other programs, the driver, kernels' code",
        "  unused            36.0 MiB",
        "  total              2.5 GiB  NVIDIA H200",
    ]


def test_facts_that_the_engine_lacks_are_left_out():
    assert ledger("mine", {}) == f"quire {__version__}: mine"
    some = ledger("mine", {"kv_cache_bytes": 1 << 20, "num_threads": 1, "quantization": None})
    assert some.splitlines()[0] == f"quire {__version__}: mine, 1 thread"
    assert some.splitlines()[1] == "  KV cache       1.0 MiB"


def test_short_models_and_few_rows_bound_what_the_memory_means():
    assert ": 1 concurrent request of 2048 tokens" in ledger("m", FACTS | {"num_blocks": 128})
    short = ledger("m", FACTS | {"max_model_len": 100, "num_request_blocks": 7})
    assert "64 concurrent requests of 100 tokens (max_num_seqs; there is memory for 91)" in short


@pytest.mark.parametrize(
    ("num_blocks", "blocks_each", "expected"), [(640, 128, 5), (640, 256, 2), (639, 128, 4)]
)
def test_requests_at_once_have_all_their_blocks(num_blocks, blocks_each, expected):
    facts = FACTS | {"num_blocks": num_blocks, "num_request_blocks": blocks_each}
    assert f": {expected} concurrent requests of 2048 tokens" in ledger("m", facts)


PLAIN = {"has_chat": True, "needs_key": False, "is_exposed": False, "has_operator": True}


def test_a_server_without_an_operator_key_warns_about_metrics():
    kind = PLAIN | {"needs_key": True, "has_operator": False}
    first, second, *_ = invitation("m", "http://h:1", **kind).splitlines()
    assert first.startswith("No key is named operator, so /metrics and /memory are refused")
    assert second.startswith("quire serves m at http://h:1 ")


def test_a_server_that_anybody_may_use_says_so():
    text = invitation("m", "http://h:1", **PLAIN | {"is_exposed": True})
    assert text.splitlines()[0].startswith("Anyone who can reach this machine may use the server")
    assert text.splitlines()[1].startswith("quire serves m at http://h:1 ")


@pytest.mark.parametrize("needs_key", [True, False])
@pytest.mark.parametrize(
    ("has_chat", "path", "field"),
    [(True, "chat/completions", "messages"), (False, "completions", "prompt")],
)
def test_the_command_is_one_that_a_shell_understands(needs_key, has_chat, path, field):
    kind = PLAIN | {"has_chat": has_chat, "needs_key": needs_key}
    first, *rest = invitation("mine", "http://127.0.0.1:8000", **kind).splitlines()
    assert first.startswith("quire serves mine at http://127.0.0.1:8000 (Ctrl-C")
    command, url, *options = shlex.split("\n".join(rest))
    assert (command, url) == ("curl", f"http://127.0.0.1:8000/v1/{path}")
    assert ("Authorization: Bearer YOUR_KEY" in options) == needs_key
    body = json.loads(options[options.index("-d") + 1])
    assert body["model"] == "mine" and field in body
