"""A tenant whose key says so neither leaves answers for drafts nor takes drafts from them."""

import sys
import time

import httpx
import pytest
from tests.server.launching import launched

from quire.server.tenants.keys import RELOAD_INTERVAL_S, WITHOUT_HISTORY

KEY = "alice:alice-key-1"
CALL = {"prompt": "class A:", "temperature": 0, "max_tokens": 150, "ignore_eos": True}

EAGER = """
import sys
from quire.assembly import build
from quire.core.scheduling.pacing import ConstantPacer
from quire.engine_process import engine_main
build.LearningPacer = ConstantPacer
sys.exit(engine_main.main())
"""
"""An engine's process that drafts whatever it costs: on a busy machine it may seem not to pay."""


@pytest.mark.usefixtures("native_engine")
def test_a_tenant_without_history_neither_reads_nor_leaves_answers(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"operator:operator-key-1\n{KEY} {WITHOUT_HISTORY}\n")
    options = {"speculation": "history", "enable_prefix_caching": False}
    command = [sys.executable, "-c", EAGER]
    with launched(options, command=command, api_key_file=str(file)) as running:
        running.operator = {"Authorization": "Bearer operator-key-1"}

        def num_drafts(num_calls: int) -> int:
            """Drafts of alice's next calls, whose answers are all the same."""
            before = running.stats()["num_drafts"]
            headers = {"Authorization": "Bearer alice-key-1"}
            for _ in range(num_calls):
                found = running.http.post("/v1/completions", json=CALL, headers=headers)
                assert found.status_code == httpx.codes.OK
                texts.add(found.json()["choices"][0]["text"])
            return running.stats()["num_drafts"] - before

        def rewrite(line: str) -> None:
            file.write_text(f"operator:operator-key-1\n{line}\n")
            time.sleep(RELOAD_INTERVAL_S + 0.05)

        texts: set[str] = set()
        assert num_drafts(3) == 0
        rewrite(KEY)
        assert num_drafts(1) == 0  # nothing was left
        assert num_drafts(3) > 0
        rewrite(f"{KEY} {WITHOUT_HISTORY}")
        assert num_drafts(2) == 0  # nothing is read
        assert len(texts) == 1
