"""Tries pictures in the playground: chosen, dropped, removed, sent and read by the model.

Called by `browser.py`. Needs selenium.
"""

import argparse
import base64
import json
import urllib.request
from pathlib import Path

from selenium.webdriver.common.by import By
from tests.images.pictures import file_of, random_picture
from tests.images.tiny_model import NUM_TOKENS, save_tiny

from benchmarks.page.report import Report
from benchmarks.page.tab import Page, opened
from benchmarks.server.serving import Server, served

DROP = """
const [name, type, text] = arguments;
const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
const dataTransfer = new DataTransfer();
dataTransfer.items.add(new File([bytes], name, { type }));
const drop = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
document.querySelector(".composer").dispatchEvent(drop);
return drop.defaultPrevented;
"""
WAITING = ".composer .pictures figure"
SENT = ".message.user .pictures img"


def check_images(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Pictures of a message to a tiny random SmolVLM."""
    options = ["--model", str(save_tiny(folder / "tiny").folder), "--max-model-len", "256"]
    with (
        served(options, folder / "images.log") as server,
        opened(args, f"http://127.0.0.1:{server.port}/", "wide") as page,
    ):
        _check_adding(page, report, folder)
        page.set("max_tokens", NUM_TOKENS)
        page.set("temperature", 0)
        ended = page.ask("What is it?")
        shown = page.count(SENT) == 2 and not page.count(WAITING)
        report.case("a message shows its pictures", ended and shown, page.count(SENT))
        numbers = page.text(".message.assistant footer")
        report.case("the model has read them", _num_encoded(server) >= 2, numbers)
        page.wait("return JSON.stringify(localStorage).includes('data:image')")
        page.driver.get(page.url)
        kept = page.wait(f"return document.querySelectorAll('{SENT}').length === 2")
        report.case("pictures outlive a reload", kept)
        report.case("no error in the console, images", not (found := page.errors()), found[:2])


def _check_adding(page: Page, report: Report, folder: Path) -> None:
    """Choose a picture, drop two, and remove one."""
    # First, choose one as a file.
    chosen = folder / "chosen.png"
    chosen.write_bytes(file_of(random_picture(90, 50)))
    chooser = page.driver.find_element(By.CSS_SELECTOR, ".composer input[type=file]")
    chooser.send_keys(str(chosen))
    report.case("a chosen picture is shown", _has_waiting(page, 1), page.count(WAITING))
    # Then drop two pictures and a text.
    for seed in (1, 2):
        text = base64.b64encode(file_of(random_picture(60, 60, seed))).decode()
        taken = page.run(DROP, f"{seed}.png", "image/png", text)
        report.case(f"dropped picture {seed} is shown", taken and _has_waiting(page, 1 + seed))
    page.run(DROP, "notes.txt", "text/plain", base64.b64encode(b"a text").decode())
    said = "return document.querySelector('.composer .status').textContent.includes('no picture')"
    refused = page.wait(said) and page.count(WAITING) == 3
    report.case("a text is refused in words", refused, page.text(".composer .status"))
    # Last, remove one.
    page.click(f"{WAITING}:nth-child(2) .remove")
    report.case("a picture is removed", _has_waiting(page, 2), page.count(WAITING))


def _has_waiting(page: Page, count: int) -> bool:
    return page.wait(f"return document.querySelectorAll('{WAITING}').length === {count}")


def _num_encoded(server: Server) -> int:
    """Number of contents that the server has encoded."""
    url = f"http://{server.host}:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("quire_contents_encoded_total")]
    return int(float(json.loads(counts[0].rpartition(" ")[2])))
