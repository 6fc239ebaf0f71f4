"""A tab of a real Chromium with the page of a server, and clients that load the server meanwhile.

Used by `browser.py`. Needs selenium and Pillow.
"""

import argparse
import asyncio
import io
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.server.crowd import Answer, request_bytes, stream_body
from benchmarks.server.serving import Server

SIZES = {"wide": (1440, 1000), "phone": (320, 700)}
WORDS = (
    "def",
    "return",
    "value",
    "list",
    "index",
    "string",
    "path",
    "join",
    "file",
    "open",
    "type",
)
HAS_MODELS = "document.querySelector('#set-model option') !== null"


class Load:
    """Clients in a thread. Each asks for one answer after the other."""

    def __init__(self, server: Server, num_clients: int, tokens: tuple[int, int]) -> None:
        self._server, self._num_clients, self._tokens = server, num_clients, tokens
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join(60)

    async def _run(self) -> None:
        await asyncio.gather(*[self._client(number) for number in range(self._num_clients)])

    async def _client(self, number: int) -> None:
        generator, loop = random.Random(number), asyncio.get_running_loop()
        shared = " ".join(random.Random(number % 6).choices(WORDS, k=90))
        while not self._ends.is_set():
            count = generator.randint(*self._tokens)
            prompt = shared[: generator.randrange(100, 500)] + " ".join(
                generator.choices(WORDS, k=generator.randrange(5, 40))
            )
            body = stream_body(number, count, prompt=prompt, n=generator.choice((1, 1, 2)))
            answer = Answer(request_bytes("/v1/completions", body), count)
            try:
                await loop.create_connection(
                    lambda answer=answer: answer, self._server.host, self._server.port
                )
                async with asyncio.timeout(60):
                    await answer.done
            except (OSError, TimeoutError):
                await asyncio.sleep(0.5)
            await asyncio.sleep(0.3 * generator.random())


class Page:
    """One tab of a browser."""

    def __init__(
        self, args: argparse.Namespace, url: str, size: str, *, needs_key: bool = False
    ) -> None:
        """args has the paths of `chromium` and `driver`. size: one of SIZES. needs_key: the server
        answers nothing before a key was entered."""
        options = webdriver.ChromeOptions()
        for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
            options.add_argument(f"--{flag}")
        options.add_argument("--hide-scrollbars")
        options.add_argument("--js-flags=--expose-gc")
        options.add_argument("--enable-precise-memory-info")
        options.binary_location = args.chromium
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(args.driver))
        self.driver.set_script_timeout(60)
        width, height = SIZES[size]
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"},
        )
        self.set_scheme("light")
        self.url = url
        self.driver.get(url)
        ready = "!document.querySelector('#banner').hidden" if needs_key else HAS_MODELS
        self.wait(f"return {ready}", 15)

    def _tell(self, command: str, parameters: dict[str, Any]) -> None:
        self.driver.execute_cdp_cmd(command, parameters)

    def set_scheme(self, scheme: str) -> None:
        """Make the system's colours "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._tell("Emulation.setEmulatedMedia", {"features": [feature]})

    def run(self, script: str, *arguments: object) -> Any:
        """The result of a script."""
        return self.driver.execute_script(script, *arguments)

    def run_async(self, script: str, *arguments: object) -> Any:
        """The result that a script passes to its last argument, a callback."""
        return self.driver.execute_async_script(script, *arguments)

    def wait(self, script: str, limit_s: float = 20.0) -> bool:
        """Whether a script returns something true within the time."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if self.run(script):
                return True
            time.sleep(0.1)
        return False

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def press(self, *keys: str) -> None:
        """Send keys to the element with the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def set(self, name: str, value: object) -> None:
        """Set a field of the parameters."""
        self.run(
            "const field = document.getElementById(arguments[0]);"
            "if (field.type === 'checkbox') field.checked = arguments[1];"
            "else field.value = arguments[1];"
            "field.dispatchEvent(new Event('change', {bubbles: true}))",
            f"set-{name}",
            value,
        )

    def view(self, name: str) -> None:
        """Show a view and wait for its first numbers."""
        self.click(f"#tab-{name}")
        if name != "playground":
            self.wait("return document.querySelector('#connection').dataset.state === 'open'")

    def ask(self, text: str) -> bool:
        """Send a message; whether its answer has ended."""
        field = self.driver.find_element(By.ID, "prompt")
        field.send_keys(text)
        field.send_keys(Keys.ENTER)
        time.sleep(0.3)
        return self.wait("return document.querySelector('.stop').hidden", 60)

    def shows(self, label: str, which: int = 0) -> None:
        """Choose how an answer is shown."""
        found = self.driver.find_elements(By.CSS_SELECTOR, ".views button")
        [button for button in found if button.text == label][which].click()
        time.sleep(0.3)

    def picture(self, path: Path) -> None:
        """Take a picture of what is seen, in 256 colours so that it is small."""
        seen = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        seen.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)

    def errors(self) -> list[str]:
        """Errors in the console since the last call."""
        found = self.driver.get_log("browser")
        return [each["message"] for each in found if each["level"] == "SEVERE"]


@contextmanager
def opened(
    args: argparse.Namespace, url: str, size: str, *, needs_key: bool = False
) -> Iterator[Page]:
    """A page, closed afterwards."""
    page = Page(args, url, size, needs_key=needs_key)
    try:
        yield page
    finally:
        page.driver.quit()
