"""Which known name is offered for an unknown one, and how a value is shown."""

import numpy as np
import pytest

from quire.errors import did_you_mean, shown

FLAGS = (
    *("--help", "--max-tokens", "--port", "--model", "--max-model-len", "--num-threads"),
    *("--num-blocks", "--kernels", "--revision", "--enforce-eager", "--allow-special-tokens"),
    *("--allowed-origins", "--log-level", "--disable-log-stats", "--attention-backend"),
    *("--tensor-parallel-size", "-tp"),
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--prot", "--port"),
        ("--pott", "--port"),
        ("--max-modle-len", "--max-model-len"),
        ("--max_model_len", "--max-model-len"),
        ("--max-len", "--max-model-len"),
        ("--threads", "--num-threads"),
        ("--max-tok", "--max-tokens"),
        ("--log-requests-level", "--log-level"),
    ],
)
def test_a_name_that_is_misspelt_or_shortened(name: str, expected: str) -> None:
    assert did_you_mean(name, FLAGS) == f"; did you mean {expected}?"


@pytest.mark.parametrize(
    "name",
    [
        *("--convert", "--distributed-executor-backend", "--mlock", "--worker-cls", "--model-impl"),
        *("--ignore-patterns", "--long-prefill-token-threshold", "--disable-sliding-window", "-hf"),
        *("--hf-repo", "--headless", "--enable-expert-parallel", "--allowed-methods", "-p", "--"),
        *("--code-revision", "--xyzzy", "--port" * 40_000),
    ],
)
def test_a_name_of_something_else_gets_no_suggestion(name: str) -> None:
    assert did_you_mean(name, FLAGS) == ""


def test_a_shown_value_has_one_line() -> None:
    assert "\n" not in shown(np.arange(10_000)) and len(shown(np.arange(10_000))) < 100
