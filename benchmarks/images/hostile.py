"""Whether hostile images harm a server: 200 files and 50 URLs, read as a server reads them.

    python -m benchmarks.images.hostile [--at-once 8]

Each goes as an image of a chat through the server's own functions, with a tiny model's processor.
Meanwhile a coroutine measures how late the event loop wakes it. Ends with 1 if an answer is neither
an image nor one sentence, if the loop stalled for STALL_S, if the process grew by more than
MEMORY_MIB, or if all took more than LIMIT_S.
"""

import argparse
import asyncio
import base64
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.images.tiny_folders import write_smolvlm

from benchmarks.images.hostile_files import hostile_files
from benchmarks.images.hostile_urls import HostileHosts, hostile_urls
from quire.core.sampling_params import ModelLimits
from quire.errors import QuireError
from quire.images.https_fetch import HttpsFetcher
from quire.images.image_options import ImageOptions
from quire.images.processors.find import find_processor
from quire.images.reader import MAX_HELD_BYTES, ImageReader
from quire.images.sources import ImageSources
from quire.server.generation.chat_call import ChatCall
from quire.server.generation.chat_prompt import chat_prompt
from quire.server.service import Service
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

STALL_S = 0.050
MEMORY_MIB = 1500
LIMIT_S = 300.0
FETCH_S = 1.0
"""Seconds after which a fetch ends, shorter than a server's so that the run is short."""

LIMITS = ModelLimits(vocab_size=1000, max_model_len=8192, max_content_tokens=4096)


class Heartbeat:
    """Measures how late the event loop wakes a coroutine, and how large the process is."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.most_bytes = 0

    async def beat(self) -> None:
        """Sleep again and again, until cancelled."""
        while True:
            begin_s = time.perf_counter()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, time.perf_counter() - begin_s - 0.001)
            self.most_bytes = max(self.most_bytes, resident_bytes())


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def make_service(folder: Path, hosts: HostileHosts) -> Service:
    """A service without an engine, whose images may come from all sources."""
    model = write_smolvlm(folder / "model")
    tokenizer = Tokenizer.from_folder(model)
    options = ImageOptions(
        allowed_media_domains=hosts.domains, allowed_local_media_path=str(hosts.folder)
    )
    fetcher = HttpsFetcher(
        hosts.domains, resolve=hosts.resolve, connect=hosts.connect, timeout_s=FETCH_S
    )
    processor = find_processor(model)
    assert processor is not None, "the folder has one"
    reader = ImageReader(
        processor,
        options,
        tokenizer.token_ids.get,
        sources=ImageSources(options, fetcher),
        max_held_bytes=MAX_HELD_BYTES,
    )
    engine: Any = SimpleNamespace(limits=LIMITS)
    template = ChatTemplate.from_folder(model)
    return Service(engine, tokenizer, template, "tiny", images=reader)


async def ask(service: Service, url: str) -> str:
    """ "image", or the sentence of the refusal."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    try:
        prompt = await chat_prompt(service, ChatCall(messages=[{"role": "user", "content": parts}]))
        assert len(prompt.images[0].spans) >= 1
        return "image"
    except QuireError as error:
        assert error.http_status < 500 or error.http_status == 503, repr(error)
        return str(error)


def is_sentence(text: str) -> bool:
    """Whether an error is one line of a sensible length that names the image."""
    is_named = text.startswith("the image messages[0].content[0] ")
    return is_named and len(text) < 300 and "\n" not in text


async def run(
    service: Service, urls: dict[str, str], at_once: int
) -> tuple[dict[str, str], Heartbeat]:
    """The answer to each, and the measurements."""
    heartbeat, slots = Heartbeat(), asyncio.Semaphore(at_once)
    await ask(service, next(iter(urls.values())))  # imports and probes, as a server's first call

    async def one(name: str, url: str) -> tuple[str, str]:
        async with slots:
            return name, await ask(service, url)

    beating = asyncio.ensure_future(heartbeat.beat())
    answers = dict(await asyncio.gather(*(one(name, url) for name, url in urls.items())))
    beating.cancel()
    return answers, heartbeat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    urls = {
        f"file: {name}": f"data:image/png;base64,{base64.b64encode(data).decode()}"
        for name, data in hostile_files()
    }
    with tempfile.TemporaryDirectory() as folder, HostileHosts(Path(folder)) as hosts:
        urls |= {f"url: {name}": url for name, url in hostile_urls(hosts)}
        service = make_service(Path(folder), hosts)
        before = resident_bytes()
        begin_s = time.perf_counter()
        answers, heartbeat = asyncio.run(run(service, urls, args.at_once))
        took_s = time.perf_counter() - begin_s
        grown, worst_s = (heartbeat.most_bytes - before) >> 20, heartbeat.worst_s
    bad = [name for name, each in answers.items() if each != "image" and not is_sentence(each)]
    for name, found in answers.items():
        if args.verbose or name in bad:
            print(f"{name:60} {found}")
    num_images = sum(each == "image" for each in answers.values())
    print(
        f"{len(answers)} images: {num_images} read, {len(answers) - num_images} refused, {len(bad)}"
        f" of these badly; longest stall {worst_s * 1e3:.1f} ms; grown by {grown} MiB;"
        f" {took_s:.1f} s"
    )
    return int(bool(bad) or worst_s > STALL_S or grown > MEMORY_MIB or took_s > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
