"""How processes of quire's own start: what they import, and what the collector does meanwhile."""

import subprocess
import sys

IMPORTING = """
import gc
from quire.quick_start import quick_imports

with quick_imports():
    assert not gc.isenabled()
    import email.message
assert gc.isenabled() and gc.get_freeze_count() > 1000
gc.disable()
with quick_imports():
    pass
assert not gc.isenabled()
"""

GENERATING = """
import sys
from quire.cli.start import main

sys.argv = ["quire", "generate", "import os", "--max-tokens", "1"]
assert main() == 0
print("\\n" + " ".join(name for name in sys.modules))
"""

HEAVY = {
    *("torch._dynamo", "torch._inductor", "sympy", "triton"),
    *("transformers", "pandas", "scipy", "PIL", "pydantic", "starlette", "uvicorn", "httptools"),
    *(
        "jinja2",
        "llguidance",
        "rich",
        "huggingface_hub",
        "ray",
        "quire.server.launch",
        "quire.simulation",
    ),
}
"""Modules that take long to import and that a text is generated without."""


def run(code: str, *words: str) -> str:
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quick_imports_leave_the_collector_as_it_was() -> None:
    run(IMPORTING)


def test_generating_a_text_imports_no_heavy_module_that_it_does_not_need() -> None:
    *_, imported = run(GENERATING).strip().splitlines()
    assert "torch" in imported.split()
    assert HEAVY.isdisjoint(imported.split())
    families = "quire.models.families."
    assert {name for name in imported.split() if name.startswith(families)} == {
        *(families + name for name in ("llama", "qwen2", "qwen3")),
    }
