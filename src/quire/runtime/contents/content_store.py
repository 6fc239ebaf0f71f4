"""Encodes the contents of prompts, such as images, and keeps their embeddings.

    inputs        of the contents of requests that have not ended
    waiting       contents to encode, in the order in which the scheduler asked for them
    encoding      at most one content; its tower's work advances in slices, between steps
    embeddings    a cache of bounded size, from which plans load contents into the runner's slots

The engine's thread encodes while no step runs, so kernels and threads are not shared. In the same
way it loads the tower, before the first content is encoded. If the
embeddings of a content are forgotten while a request still needs them, they are encoded again from
its inputs, to the same bits.

A slot refers to embeddings, without a copy. So the cache may forget embeddings whose
bytes a slot still holds; `max_slots` bounds these bytes.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from quire.core.content_spans import Content
from quire.core.step import ItemLoad
from quire.errors import InvalidRequestError
from quire.kernels.transfers import DeviceLink, current
from quire.models.interface import InputEmbeds
from quire.models.vision.vision_tower import Slices, VisionTower, finish
from quire.observability.log import get_logger
from quire.runtime.batch import ContentPiece
from quire.runtime.contents.content_slots import ContentSlots
from quire.runtime.contents.embedding_cache import EmbeddingCache

WAIT_S = 0.01
"""Maximum seconds of encoding, beyond one slice, while the engine is idle, since messages may
arrive."""

CPU = torch.device("cpu")

MOST_LOADS = 3
"""Times that the tower's loading is tried. Each load delays steps, even if it fails."""

MOST_SLOTS = 64
"""More contents than one step usually reads."""

logger = get_logger(__name__)


def max_slots(max_bytes: int, content_bytes: int) -> int:
    """Number of slots for contents of at most content_bytes bytes, which may hold a half of
    max_bytes. At least 2, so that one content is encoded while another is read."""
    return max(2, min(MOST_SLOTS, max_bytes // 2 // max(1, content_bytes)))


@dataclass(slots=True)
class _Encoding:
    """A content that is being encoded."""

    digest: str
    slices: Slices[torch.Tensor]
    #: Seconds of the slices that have run.
    encode_s: float = 0.0


class ContentStore:
    """The contents of one engine. Called from the engine's thread.

    Invariant: a content for which the last `begin` returned False is in `_waiting`, is being
    encoded, or is in `_failed`. If it returned True, the content is in `_ready` until it is loaded
    or released.
    """

    def __init__(
        self,
        tower: VisionTower,
        num_slots: int,
        max_cache_bytes: int,
        load: Callable[[], Slices[VisionTower]] | None = None,
        *,
        in_one_step: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """`load` loads the tower when the first content is encoded, and `tower` is its outline;
        None if `tower` is loaded. `max_cache_bytes` bounds the bytes of embeddings beside those of
        slots. `in_one_step` says whether one step computes all positions of a content. `device`
        is the tower's."""
        self.in_one_step = in_one_step
        #: Number of contents that were encoded since the start.
        self.num_encoded = 0
        #: Number of contents that were found in the cache when they were asked for.
        self.num_hits = 0
        #: Seconds of encoding since the start, with the loading of the tower.
        self.encode_s = 0.0
        self.num_slots = num_slots
        self._tower = tower
        #: None once the tower is loaded.
        self._load = load
        #: Inputs by digest, and the number of uses that `open` began.
        self._inputs: dict[str, tuple[Content, int]] = {}
        self._num_failed_loads = 0
        self._waiting: deque[str] = deque()
        self._encoding: _Encoding | None = None
        self._ready: dict[str, torch.Tensor] = {}
        self._failed: dict[str, str] = {}
        self._cache = EmbeddingCache(max_cache_bytes)
        self._slots = ContentSlots(num_slots)
        self._link = DeviceLink(device)

    @property
    def max_content_tokens(self) -> int:
        """Maximum number of embeddings of one content."""
        return self._tower.max_content_tokens

    @torch.inference_mode()
    def encode_largest(self, max_tokens: int) -> None:
        """Encode about the largest content of a prompt of `max_tokens`, and forget its embeddings,
        so that the memory which this takes can be measured. The tower is loaded."""
        shape, grid = self._tower.largest_content(max_tokens)
        finish(self._tower.encode(torch.zeros(shape, device=self._link.device), grid))

    # ---- requests ---------------------------------------------------------------------------

    def check(self, content: Content) -> int:
        """See `engine.content_work.StoredContents`."""
        known = self._inputs.get(content.digest)
        if known is not None and known[0] != content:
            raise InvalidRequestError(
                f"two different contents have the digest {content.digest}", "prompt"
            )
        return self._tower.num_tokens(content.shape, content.grid)

    def span_grid(self, content: Content) -> tuple[int, int, int] | None:
        """See `engine.content_work.StoredContents`."""
        return self._tower.span_grid(content.grid)

    def open(self, contents: Collection[Content]) -> None:
        """See `engine.content_work.StoredContents`."""
        for content in contents:
            _, num_uses = self._inputs.get(content.digest, (content, 0))
            self._inputs[content.digest] = (content, num_uses + 1)
            # The last request with this content may have ended just before.
            self._failed.pop(content.digest, None)

    def close(self, digests: Collection[str]) -> None:
        """See `engine.content_work.StoredContents`."""
        for digest in digests:
            content, num_uses = self._inputs.pop(digest)
            if num_uses > 1:
                self._inputs[digest] = (content, num_uses - 1)

    # ---- the scheduler's reads --------------------------------------------------------------

    def begin(self, digest: str) -> bool:
        """See `core.scheduling.residency.ItemSource`."""
        if digest in self._ready:
            return True
        cached = self._cache.find(digest)
        if cached is not None:
            self._ready[digest] = cached
            self.num_hits += 1
            return True
        is_encoding = self._encoding is not None and self._encoding.digest == digest
        if not (is_encoding or digest in self._waiting or digest in self._failed):
            self._waiting.append(digest)
        return False

    def release(self, digest: str) -> None:
        """See `core.scheduling.residency.ItemSource`."""
        self._ready.pop(digest, None)

    def pop_failed(self) -> dict[str, str]:
        """See `engine.item_work.ReadItems`."""
        failed, self._failed = self._failed, {}
        return failed

    def wait(self) -> None:
        """See `engine.item_work.ReadItems`. Encodes, instead of waiting."""
        self.advance(WAIT_S)

    @torch.inference_mode()
    def advance(self, limit_s: float) -> None:
        """See `engine.content_work.StoredContents`. Stops after the slice in which limit_s ends, or
        when a content is ready."""
        begin_s = time.perf_counter()
        with current(self._link.device):
            while self._run_slice() and time.perf_counter() < begin_s + limit_s:
                pass
        self.encode_s += time.perf_counter() - begin_s

    def counts(self) -> dict[str, float]:
        """See `engine.content_work.StoredContents`."""
        return {
            "num_encoded": self.num_encoded,
            "encode_s": self.encode_s,
            "num_hits": self.num_hits,
            "cache_bytes": self._cache.num_bytes,
        }

    def _run_slice(self) -> bool:
        """Run one slice. Returns whether another slice of the same content follows."""
        running = self._start()
        if running is None:
            return False
        begin_s = time.perf_counter()
        try:
            next(running.slices)
            self._link.synchronize()  # a slice ends when the device has computed it
        except StopIteration as end:
            self._encoding = None
            running.encode_s += time.perf_counter() - begin_s
            self.num_encoded += 1
            # The content was asked for, so it is loaded even if the cache has no room for it.
            self._ready[running.digest] = end.value
            self._cache.keep(running.digest, end.value, running.encode_s)
            return False
        except (RuntimeError, ValueError, MemoryError, OSError) as error:
            logger.exception("a content can't be encoded")
            self._encoding = None
            is_loaded = self._load is None  # errors of loading name files of the server
            self._num_failed_loads += not is_loaded
            reason = error if is_loaded else "its encoder can't be loaded, as the server's log says"
            self._failed[running.digest] = f"an image or video can't be encoded: {reason}"
            return False
        running.encode_s += time.perf_counter() - begin_s
        return True

    def _start(self) -> _Encoding | None:
        """The content that is being encoded, which may begin now; None if none is asked for."""
        while self._encoding is None and self._waiting:
            digest = self._waiting.popleft()
            known = self._inputs.get(digest)
            if known is None:  # all requests with it have ended
                self._failed[digest] = "no request has this content any more"
                continue
            if self._num_failed_loads == MOST_LOADS:
                self._failed[digest] = (
                    "images are refused until the server is restarted: loading their encoder has"
                    f" failed {MOST_LOADS} times, as the server's log says"
                )
                continue
            content, _ = known
            self._encoding = _Encoding(digest, self._encode(content))
        return self._encoding

    def _encode(self, content: Content) -> Slices[torch.Tensor]:
        """Load the tower if it is not loaded, and encode the content."""
        if self._load is not None:
            begin_s = time.perf_counter()
            self._tower = yield from self._load()
            self._load = None
            taken_s = time.perf_counter() - begin_s
            logger.info("the encoder of images was loaded between steps, in %.1f s", taken_s)
            assert self._encoding is not None
            self._encoding.encode_s = 0.0  # encoding this content again needs no load
        values = torch.frombuffer(bytearray(content.values), dtype=torch.float32)
        values = values.view(content.shape).to(self._link.device)
        return (yield from self._tower.encode(values, content.grid))

    # ---- the runner's slots -----------------------------------------------------------------

    def take(self, loads: Sequence[ItemLoad]) -> list[torch.Tensor]:
        """The embeddings of the contents that a plan loads, which are no longer kept ready."""
        return [self._ready.pop(digest) for _, digest in loads]

    def load(self, loads: Sequence[ItemLoad]) -> None:
        """See `content_slots.StepContents`."""
        self._slots.fill(loads, self.take(loads))

    def input_embeds(self, pieces: Sequence[ContentPiece]) -> InputEmbeds:
        """See `ContentSlots.input_embeds`."""
        return self._slots.input_embeds(pieces)

    def reset(self) -> None:
        """See `content_slots.StepContents`."""
        self._ready.clear()
        self._slots.clear()
