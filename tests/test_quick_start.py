"""How processes of quire's own start: what they import, and what the collector does meanwhile."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quire.deferred_imports import DEFERRED, TESTED, USERS, DeferredImports, defer_imports

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
    *("torch._dynamo", "torch._inductor", "torch._refs", "sympy", "triton"),
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


DEFERRING = """
import sys
from quire.deferred_imports import DEFERRED, defer_imports

defer_imports()
import torch

assert "torch._refs" not in sys.modules
assert not hasattr(torch.export, "__wrapped__") and "torch._refs" not in sys.modules
torch.rand(3, generator=torch.Generator().manual_seed(1))
on_meta = torch.ones(3, device="meta")
"""
"""Imports torch without the deferred modules. These import torch._refs, which nothing else does."""


def test_deferred_modules_run_when_an_attribute_is_read() -> None:
    run(
        DEFERRING
        + """
assert torch.export.Dim("length").__name__ == "length"
assert not hasattr(torch.export, "no_such_name")
assert "torch._refs" in sys.modules
assert torch.where(on_meta > 0, on_meta, on_meta).is_meta
assert all("__getattr__" not in vars(sys.modules[name]) for name in DEFERRED)
"""
    )


@pytest.mark.parametrize("user", [*USERS, "torch.export.dynamic_shapes"])
def test_deferred_modules_are_imported_before_their_users(
    user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports, imported = DeferredImports(), list[str]()
    for name in DEFERRED:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        imports.stand_in(sys.modules[name])
    monkeypatch.setattr("importlib.import_module", imported.append)
    monkeypatch.delitem(sys.modules, user, raising=False)
    assert imports.find_spec("torch.nn", None) is None and not imported
    assert imports.find_spec(user, None) is None and imported == list(DEFERRED)
    assert not sys.modules.keys() & set(DEFERRED)
    assert imports.find_spec(DEFERRED[0], None) is None  # no longer deferred


def test_a_module_that_a_deferred_one_imports_runs_once() -> None:
    run(
        DEFERRING
        + """
import torch.export.dynamic_shapes
assert torch.export.dynamic_shapes.Dim is torch.export.Dim
assert torch.export.dynamic_shapes is sys.modules["torch.export.dynamic_shapes"]
assert torch.export.dynamic_shapes.__spec__.loader is torch.export.dynamic_shapes.__loader__
import torch._export.utils
assert torch._export.wrappers is sys.modules["torch._export.wrappers"]
"""
    )


def test_plugins_find_nothing_deferred() -> None:
    run(
        DEFERRING
        + """
from quire.plugins import load_plugins
load_plugins(["email.charset"])
assert torch.where(on_meta > 0, on_meta, on_meta).is_meta
"""
    )


def test_other_versions_of_torch_defer_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "export.py").touch()
    torch = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    for version, is_deferred in ((TESTED[0] + "0+cpu", True), ("2.999.0", False)):
        monkeypatch.setattr(torch, "__version__", version, raising=False)
        found = DeferredImports().find_spec("torch.export", [str(tmp_path)])
        assert (found is not None) == is_deferred


def test_nothing_is_deferred_once_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = [each for each in sys.meta_path if not isinstance(each, DeferredImports)]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    defer_imports()
    assert sys.meta_path == finders
    monkeypatch.delitem(sys.modules, "torch")
    defer_imports()
    defer_imports()
    assert [type(each) for each in sys.meta_path[:2]].count(DeferredImports) == 1


def test_generating_a_text_imports_no_heavy_module_that_it_does_not_need() -> None:
    *_, imported = run(GENERATING).strip().splitlines()
    assert "torch" in imported.split()
    assert HEAVY.isdisjoint(imported.split())
    families = "quire.models.families."
    assert {name for name in imported.split() if name.startswith(families)} == {
        *(families + name for name in ("llama", "qwen2", "qwen3")),
    }
