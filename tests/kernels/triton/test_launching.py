"""What an engine launches compiles as it is launched; see `launching.py`."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.compiling import line, run_in_process


@pytest.mark.timeout(300)
@pytest.mark.long
def test_every_launch_of_an_engine_compiles():
    options = ("--model", "qwen3", "--sampling", '{"max_tokens": 2}')
    results = run_in_process("launching", *options, timeout_s=290)
    found = [line(result) for result in results if result.complaint]
    assert not found, "\n" + "\n".join(found)
    names = {result.kernel for result in results}
    assert {"rotary_kv_write_kernel", "paged_attention_kernel", "rms_norm_kernel"} <= names
