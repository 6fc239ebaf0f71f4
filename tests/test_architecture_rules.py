"""Each rule of `test_architecture` on small trees that break it, and on one that keeps them all."""

from collections.abc import Callable

import pytest
from tests.source_tree import Tree
from tests.test_architecture import (
    RULES,
    asyncio_outside,
    classes_of_one_name,
    cycles,
    environment_readers,
    frequent_basenames,
    full_folders,
    impure_core,
    mutual_imports,
    option_readers,
    silent_function_imports,
    torch_where_none_may_be,
    unknown_areas,
    upward_imports,
)

BROKEN = [
    (unknown_areas, {"newfloor/x.py": ""}, "newfloor/x.py:1: 'newfloor' has no floor"),
    (
        upward_imports,
        {"models/families/llama.py": "import math\nimport quire.runtime\n"},
        "models/families/llama.py:2: quire.models.families.llama may not import quire.runtime",
    ),
    (
        upward_imports,
        {"core/x.py": "from quire.observability.log import get_logger"},
        "core/x.py:1",
    ),
    (
        upward_imports,
        {"core/x.py": "from ..offline import llm", "offline/llm.py": ""},
        "core/x.py:1",
    ),
    (upward_imports, {"server/app.py": "from quire.bench.load import run"}, "server/app.py:1"),
    (upward_imports, {"engine/x.py": "from quire import LLM", "__init__.py": ""}, "engine/x.py:1"),
    (
        upward_imports,
        {"models/x.py": "from quire.core.scheduling.scheduler import Scheduler"},
        "models/x.py:1",
    ),
    (upward_imports, {"text/x.py": "import quire.models.families.llama"}, "text/x.py:1"),
    (
        upward_imports,
        {"core/x.py": "if TYPE_CHECKING:\n    from quire.offline.llm import LLM\n"},
        "core/x.py:2: quire.core.x may not import quire.offline.llm (for types either)",
    ),
    (
        upward_imports,
        {"core/x.py": "try:\n    pass\nexcept E:\n    import quire.offline.llm"},
        "core/x.py:4",
    ),
    (option_readers, {"engine/x.py": "from quire.options.x import X"}, "engine/x.py:1"),
    (
        option_readers,
        {"runtime/x.py": "from quire.options import x", "options/x.py": ""},
        "runtime/x.py:1",
    ),
    (
        cycles,
        {"core/a.py": "import quire.core.b", "core/b.py": "from quire.core import a"},
        "quire.core.a -> quire.core.b -> quire.core.a",
    ),
    (
        cycles,
        {"core/a.py": "from .b import f", "core/b.py": "def f():\n    from .a import g"},
        "quire.core.a -> quire.core.b -> quire.core.a",
    ),
    (silent_function_imports, {"text/x.py": "def f():\n    import json\n"}, "text/x.py:2: json"),
    (
        silent_function_imports,
        {"text/x.py": "def f():\n    # why\n    x = 1\n    import json\n"},
        "text/x.py:4",
    ),
    (impure_core, {"core/x.py": "import torch"}, "core/x.py:1: core may not import torch"),
    (impure_core, {"core/x.py": "from time import monotonic"}, "core/x.py:1"),
    (impure_core, {"core/x.py": "import os.path"}, "core/x.py:1"),
    (impure_core, {"core/x.py": "def f():\n    import threading"}, "core/x.py:2"),
    (
        torch_where_none_may_be,
        {"server/x.py": "def f():\n    import torch"},
        "server/x.py:2: torch",
    ),
    (
        torch_where_none_may_be,
        {"engine_client/inputs.py": "import torch.nn"},
        "engine_client/inputs.py:1",
    ),
    (torch_where_none_may_be, {"text/x.py": "from safetensors import torch"}, "text/x.py:1"),
    (
        torch_where_none_may_be,
        {
            "server/x.py": "from quire.core import y",
            "core/y.py": "from quire.core.z import f",
            "core/z.py": "import transformers.models",
        },
        "core/z.py:1: transformers.models reaches quire.server.x",
    ),
    (
        torch_where_none_may_be,
        {"text/x.py": "", "text/__init__.py": "import torch"},
        "text/__init__.py:1: torch reaches quire.text.x",
    ),
    (torch_where_none_may_be, {"cli/x.py": "import torch"}, "cli/x.py:1: torch"),
    (asyncio_outside, {"engine/engine.py": "from asyncio import Queue"}, "engine/engine.py:1"),
    (
        mutual_imports,
        {
            "core/a/x.py": "import quire.core.b.y",
            "core/a/z.py": "",
            "core/b/y.py": "",
            "core/b/w.py": "from quire.core.a import z",
        },
        "core/a/x.py:1: core/a imports from core/b, which imports from it at src/quire/core/b/w.py",
    ),
    (full_folders, {f"text/x{number}.py": "" for number in range(26)}, "src/quire/text: 26 files"),
    (
        frequent_basenames,
        {f"{name}/x.py": "" for name in ("text", "core", "hub")},
        "x.py occurs 3 times: text/x.py, core/x.py, hub/x.py",
    ),
    (
        classes_of_one_name,
        {"text/x.py": "class A: ...", "core/y.py": "\nclass A: ..."},
        "core/y.py:2: another class A is at src/quire/text/x.py:1",
    ),
    (environment_readers, {"runtime/x.py": "import os\nos.environ['A'] = '1'"}, "runtime/x.py:2"),
    (environment_readers, {"runtime/x.py": "from os import getenv"}, "runtime/x.py:1"),
    (environment_readers, {"cli/chat.py": "import os\nos.getenv('A')"}, "cli/chat.py:2"),
]


@pytest.mark.parametrize(("rule", "sources", "expected"), BROKEN)
def test_a_rule_catches_what_breaks_it(
    rule: Callable[[Tree], list[str]], sources: dict[str, str], expected: str
) -> None:
    found = "\n".join(rule(Tree(sources)))
    assert expected in found


FINE = {
    "__init__.py": "from quire.version import __version__\n"
    "if TYPE_CHECKING:\n    from quire.offline.llm import LLM\n",
    "version.py": "",
    "options/x.py": "from quire.core.scheduling.scheduler import Scheduler",
    "core/memory/cache_options.py": "from quire.option_fields import option",
    "errors.py": "",
    "cli/main.py": "import os\nos.environ\nfrom quire.options.x import X\n"
    "def f():\n    # heavy\n    import torch\n    import json\n    import time  # too",
    "cli/chat.py": "from quire.errors import QuireError",
    "core/step.py": "from quire.errors import QuireError\nimport hashlib",
    "core/scheduling/scheduler.py": "from quire.core.step import StepPlan",
    "models/__init__.py": "",
    "models/families/llama.py": "import torch\nfrom quire.kernels.norm import norm\n"
    "from quire.core.step import StepPlan",
    "kernels/norm.py": "import torch\nfrom quire.observability.log import get_logger",
    "observability/log.py": "import logging",
    "runtime/batch.py": "from quire.models import llama\nfrom quire.core.x import S",
    "offline/llm.py": "from quire.runtime.batch import StepBatch\nfrom quire.options.x import X",
    "engine_client/request_book.py": "import asyncio\ndef f():\n    # it\n    import quire.text.x",
    "server/app.py": "import asyncio\nfrom quire.engine_client.request_book import RequestBook",
    "server/launch.py": "from quire.options.x import X",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_lets_a_sound_tree_pass(rule: Callable[[Tree], list[str]]) -> None:
    assert rule(Tree(FINE)) == []
