"""Follows a server's GET /stats/events in a thread, and connects again after a restart."""

import json
import queue
import threading
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any, Self
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from quire.errors import EngineDeadError, InvalidRequestError

PARTS = "stats,events,requests,memory,blocks"

CONNECT_S = 10.0
"""Maximum seconds until the server accepts a connection, and by which an event may be late."""

PAUSE_S = 1.0
"""Seconds between two attempts to connect."""

_KEY = "the server shows its state to the operator's key only; give it with --api-key"
REFUSALS = {401: _KEY, 403: _KEY, 404: "the server has no /stats/events: is it an older quire?"}
"""Messages for HTTP statuses that another attempt does not change."""

Change = dict[str, Any]


class Feed:
    """The events of one server, in the order in which they arrived.

    A context manager. A thread follows the server until the end of the `with` block.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None, interval_s: float) -> None:
        """model: one of several models; None means the first."""
        self._url = f"{url.rstrip('/')}/stats/events?parts={PARTS}&interval={interval_s:g}"
        if model is not None:
            self._url += f"&model={quote(model, safe='')}"
        self._api_key = api_key
        self._timeout_s = CONNECT_S + interval_s
        self._changes: queue.SimpleQueue[Change | Exception] = queue.SimpleQueue()
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._follow, name="top-feed", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def take(self, timeout_s: float) -> Iterator[Change | Exception]:
        """Yield the events that have arrived; wait at most timeout_s for the first of them.

        An exception says why the connection was lost: EngineDeadError if nothing answers, which
        may pass, and InvalidRequestError if the server refuses to be watched, which stays.
        """
        try:
            yield self._changes.get(timeout=timeout_s)
            while True:
                yield self._changes.get_nowait()
        except queue.Empty:
            return

    def _follow(self) -> None:
        while not self._is_over.is_set():
            try:
                self._read()
            except InvalidRequestError as error:
                self._changes.put(error)
                return
            except (OSError, HTTPException, ValueError) as error:
                self._changes.put(EngineDeadError(f"no server answers at {self._url}: {error}"))
            self._is_over.wait(PAUSE_S)

    def _read(self) -> None:
        """Read events until the server ends the stream. Raises InvalidRequestError."""
        request = Request(self._url)
        if self._api_key is not None:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        try:
            with urlopen(request, timeout=self._timeout_s) as answer:
                for line in answer:
                    if self._is_over.is_set():
                        return
                    if line.startswith(b"data: "):
                        self._changes.put(json.loads(line[6:]))
        except HTTPError as error:
            why = _unknown_model(error) or REFUSALS.get(error.code)
            error.close()
            if why:
                raise InvalidRequestError(why) from error
            raise


def _unknown_model(error: HTTPError) -> str | None:
    """The server's sentence about a model that it does not have; None for other errors."""
    if error.code != 404:
        return None
    try:
        found = json.loads(error.read())["error"]
        return str(found["message"]) if found["param"] == "model" else None
    except (KeyError, TypeError, ValueError):  # another server's 404
        return None
