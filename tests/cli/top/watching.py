"""Events as GET /stats/events sends them, for the tests of `quire top`."""

import base64
import struct
from typing import Any

RECORD_BYTES = 7
BOUNDS = (0.01, 0.1, 1.0)
FREE, CACHED = bytes(RECORD_BYTES), bytes([1, 0, 1, 255, 0, 0, 1])


def held(slot: int) -> bytes:
    """The record of a full block of the request in this slot."""
    return bytes([2, 1, 0, 255, slot & 255, slot >> 8, 1])


def blocks(records: list[bytes], owners: dict[int, str]) -> dict[str, Any]:
    """The part `blocks` with all records."""
    found = base64.b64encode(b"".join(records)).decode()
    return _blocks(len(records), owners) | {"records": found}


def changed_blocks(
    num_blocks: int, changed: dict[int, bytes], owners: dict[int, str]
) -> dict[str, Any]:
    """The part `blocks` with the records that have changed."""
    parts = [struct.pack("<I", block) + record for block, record in changed.items()]
    return _blocks(num_blocks, owners) | {"changed": base64.b64encode(b"".join(parts)).decode()}


def _blocks(num_blocks: int, owners: dict[int, str]) -> dict[str, Any]:
    return {"num_blocks": num_blocks, "owners": {str(slot): owners[slot] for slot in owners}}


def step(ended_s: float, num_prompt: int = 0, num_decode: int = 0, **others: int) -> dict[str, Any]:
    """The event of a step that took 10 ms, of which the machine needs 4 ms."""
    numbers = {"num_drafts": 0, "num_accepted_drafts": 0, "num_preemptions": 0}
    times = {"ended_s": ended_s, "elapsed_s": 0.01, "floor_s": 0.004}
    tokens = {"num_prompt_tokens": num_prompt, "num_decode_tokens": num_decode}
    return {"event": "step"} | times | tokens | numbers | others


def request(name: str, state: str = "decoding", **others: Any) -> dict[str, Any]:
    """A live request that arrived 100 s after the engine's beginning."""
    return {
        "request_id": name,
        "branch": 0,
        "tenant": "",
        "state": state,
        "num_prompt_tokens": 40,
        "num_cached_tokens": 16,
        "num_output_tokens": 3,
        "num_blocks": 3,
        "arrival_s": 100.0,
        "first_token_s": 100.25,
        "slot": 1,
    } | others


def memory(**others: Any) -> dict[str, Any]:
    """A ledger of 4 MiB, of which the named parts are used; the others are 0 or free."""
    names = ("useful", "unfilled", "unused", "reserved", "in_flight", "moving", "cached", "saved")
    found: dict[str, Any] = {f"{name}_bytes": 0 for name in names} | {"tiers": {}}
    found |= {"total_bytes": 4 << 20, "free_bytes": 4 << 20} | others
    return found


def engine(now_s: float = 110.0, name: str = "", **parts: Any) -> dict[str, Any]:
    """The part of an event about one engine."""
    return {"name": name, "state": "ready", "answers": True, "now_s": now_s} | parts


def event(
    *engines: dict[str, Any], first_token: tuple[int, ...] = (0, 0, 0, 0), **others: Any
) -> dict[str, Any]:
    """An event of the whole server. first_token: counts by bucket of BOUNDS."""
    return {
        "version": "9.9",
        "model": "small",
        "state": "ready",
        "is_draining": False,
        "finished": {},
        "time_to_first_token_s": {"bounds": BOUNDS, "counts": first_token},
        "inter_token_s": {"bounds": BOUNDS, "counts": (0, 0, 0, 0)},
        "engines": list(engines),
    } | others
