"""The table of classes: its verdicts."""

import benchmarks.fallback.equal_tokens as script
import pytest


@pytest.mark.parametrize(
    ("model_type", "verdict", "reason"),
    [
        ("llama", "equal", ""),
        ("minimax", "refused", "linear_attention"),
        ("llama4", "not made", "pad_token_id"),
    ],
)
def test_verdicts(model_type, verdict, reason):
    found, why = script.compare(model_type, 2)
    assert found == verdict
    assert reason in why


def test_other_tokens_are_counted(monkeypatch):
    monkeypatch.setattr(script, "quire_tokens", lambda folder, num_tokens: [[0, 0]] * 3)
    verdict, why = script.compare("llama", 2)
    assert verdict == "DIFFERS"
    assert why.endswith("of 2 are the same")
