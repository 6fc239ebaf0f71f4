"""The commands for models on this machine: pull, list, rm, ps.

They have the words of Ollama. There is no second store: `pull` fetches into the cache of Hugging
Face's client, where every other program finds the model, and `list` and `rm` read and clean it.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from quire.core.memory.memory_report import format_bytes
from quire.errors import EngineDeadError

TIMEOUT_S = 10.0
"""Maximum seconds to wait for a server's answer."""

Row = tuple[str, ...]


def pull(name: str, revision: str | None, examine: Callable[[str, str | None], int]) -> int:
    """Fetch a model, after a report on it. Returns the exit code.

    `examine` prints the report, and returns an exit code other than 0 if the model can't be served;
    then nothing is fetched. Raises CheckpointError.
    """
    from quire.hub.model_folder import resolve_model_folder  # brings the hub's client

    if status := examine(name, revision):
        return status
    path = resolve_model_folder(name, revision, needs_tokenizer=True)
    print(f"\n{name} is here: {path}")
    print(f"talk with it: quire run {name}; serve it: quire serve {name}")
    return 0


def list_models() -> int:
    """Print the models on this machine. Returns the exit code."""
    from quire.hub.local_models import local_models  # brings the hub's client

    rows = [
        (model.name, model.format, format_bytes(model.size_bytes), _ago(model.used_s))
        for model in local_models()
    ]
    if not rows:
        print("there are no models here; quire pull NAME fetches one, such as smollm2")
        return 0
    _print_table([("NAME", "FORMAT", "SIZE", "USED"), *rows])
    return 0


def remove(name: str) -> int:
    """Remove a model from this machine. Returns the exit code. Raises CheckpointError if it is not
    here."""
    from quire.hub.local_models import remove_model  # brings the hub's client

    print(f"removed {name}: {format_bytes(remove_model(name))}")
    return 0


def list_running(url: str, api_key: str | None) -> int:
    """Print the models that the server at `url` has in memory. Returns the exit code. Raises
    EngineDeadError if it does not answer."""
    request = Request(f"{url.rstrip('/')}/api/ps")
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            models: list[dict[str, Any]] = json.load(answer)["models"]
    except (URLError, OSError, ValueError, KeyError) as error:
        raise EngineDeadError(
            f"no server answers at {url}: {error}; start one with quire serve"
        ) from error
    rows = [
        (each["name"], format_bytes(each["size"]), f"{each['context_length']:,}") for each in models
    ]
    _print_table([("NAME", "SIZE", "CONTEXT"), *rows])
    return 0


def _ago(time_s: float) -> str:
    hours = max(0.0, time.time() - time_s) / 3600
    return "today" if hours < 24 else f"{hours / 24:.0f} days ago"


def _print_table(rows: list[Row]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("   ".join(cells).rstrip(), file=sys.stdout)
