"""Tries the page of a running server in a real Chromium, and takes the pictures of docs/page.md.

    pip install selenium; apt-get install chromium chromium-driver
    python -m benchmarks.page.browser --pictures docs

Each case prints a line: its name, whether it holds, and a figure. The last line counts those that
don't; then the exit code is 1. Needs selenium, and Debian's chromium and chromium-driver or others
by --chromium and --driver.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks.page.hostile import texts
from benchmarks.page.images import check_images
from benchmarks.page.report import Report
from benchmarks.page.scripts import (
    CONTRASTS,
    FOREIGN,
    FRAMES,
    INERT,
    LEFT_OPEN,
    PAINTED,
    REQUIRE_TOOLS,
    TOOLS,
)
from benchmarks.page.tab import SIZES, Load, Page, opened
from benchmarks.server.serving import served
from quire.hub.model_folder import EMBEDDED_MODEL

NUM_HOSTILE = 500
MIN_CONTRAST = 4.5

VIEWS = ("playground", "memory", "steps")


def check_playground(page: Page, report: Report, pictures: Path | None) -> None:
    """A chat, forks, several answers and beams."""
    ended = page.ask("What does os.path.join do?")
    numbers = page.text(".message.assistant footer")
    report.case("an answer streams in with its speed", ended and "tokens/s" in numbers, numbers)
    page.shows("Tokens")
    page.run("document.querySelectorAll('.token')[13].click()")
    report.case("a token has alternatives", page.count(".token-info button") >= 5)
    page.driver.find_elements(By.CSS_SELECTOR, ".token-info .quiet")[1].click()  # another token
    time.sleep(0.3)
    page.wait("return document.querySelector('.stop').hidden")
    numbers = page.text(".message.assistant footer")
    report.case("a fork takes the tokens before it from the cache", "cached" in numbers, numbers)
    page.shows("Tree")
    report.case("both branches are a tree", page.count(".tree .end") == 2, page.text(".tree .note"))
    page.set("n", 3)
    page.set("temperature", 1.2)
    page.ask("Write a function that reverses a list.")
    report.case("three answers stand side by side", page.count(".beside > article") == 3)
    if pictures is not None:
        page.shows("Tokens", -1)
        page.run("[...document.querySelectorAll('.tokens')].at(-1).children[6].click()")
        page.run("document.querySelector('.log').scrollTop = 0")
        page.picture(pictures / "page-playground.png")
    page.set("beams", True)
    page.set("temperature", "")
    page.set("max_tokens", 24)
    page.ask("What does os.path.join do?")
    beams = page.count("article:last-child .tree .end")
    report.case("beams are a tree", beams == 3, page.text("article:last-child .tree .note"))
    page.set("beams", False)
    page.set("n", 1)
    page.set("max_tokens", 512)
    page.driver.get(page.url)
    kept = page.wait("return document.querySelectorAll('.message').length > 2")
    stored = page.run("return JSON.stringify(localStorage)")
    report.case("conversations outlive a reload", kept)
    report.case("no key is stored", "Bearer" not in stored and "key" not in json.loads(stored))


def check_keyboard(page: Page, report: Report) -> None:
    """Tabs, tokens, blocks and the theme without a mouse."""
    page.run("document.querySelector('#tab-playground').focus()")
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ARROW_RIGHT)
    focused = page.run("return document.activeElement.id")
    report.case("arrow keys go through the views", focused == "tab-steps", focused)
    page.press(Keys.ARROW_LEFT)
    page.wait("return document.querySelector('#connection').dataset.state === 'open'")
    time.sleep(1.5)
    page.run("document.querySelector('#memory canvas').focus()")
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ARROW_DOWN)
    spoken = page.text("#memory .legend [role=status]")
    report.case("arrow keys go through the blocks", spoken.startswith("Block "), spoken)
    page.click("#tab-playground")
    page.shows("Tokens", -1)
    page.run("[...document.querySelectorAll('.token[tabindex=\"0\"]')].at(-1).focus()")
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ENTER)
    is_fork = "document.activeElement.textContent"
    report.case("Enter at a token offers a fork", page.run(f"return {is_fork}") == "Fork before it")
    page.run("document.querySelector('#key-button').focus()")
    page.press(Keys.ENTER)
    opened_dialog = page.run("return document.querySelector('#key-dialog').open")
    page.press(Keys.ESCAPE)
    closed = not page.run("return document.querySelector('#key-dialog').open")
    report.case("the key's dialog opens by Enter and closes by Escape", opened_dialog and closed)
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, select, textarea, canvas')].filter("
        "(e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.title)).length"
    )
    report.case("every control has a name", nameless == 0, nameless)


def check_looks(page: Page, report: Report, pictures: Path | None) -> None:
    """Contrast in both themes, by the system's setting and by the switch."""
    for scheme in ("light", "dark"):
        page.set_scheme(scheme)
        for view in VIEWS:
            page.view(view)
            time.sleep(0.8)
            ratio, where = page.run(CONTRASTS)
            name = f"texts of {view} are readable, {scheme}"
            report.case(name, ratio >= MIN_CONTRAST, f"{ratio:.1f} to 1 ({where})")
            if pictures is not None and (view, scheme) == ("memory", "dark"):
                page.picture(pictures / "page-dark.png")
    page.set_scheme("light")
    page.click("#theme")
    page.click("#theme")
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    report.case("the switch makes it dark", sum(map(int, background[4:-1].split(","))) < 150)
    page.click("#theme")


def check_memory(page: Page, report: Report) -> None:
    """Every panel of the view Memory, with data that change."""
    page.view("memory")
    time.sleep(4)
    held = "return document.querySelector('#memory .legend b').textContent"
    first = page.run(held)
    changes = page.wait(f"return ({held.replace('return ', '')}) !== {json.dumps(first)}")
    report.case("the block map lives", changes and page.run(PAINTED, "#memory canvas", 0) > 5)
    report.case("the ledger is a band", page.run(PAINTED, "#memory canvas", 1) > 3)
    report.case("the prefix tree has branches", page.count(".icicle .run") > 5, page.count(".run"))
    report.case("missed prefixes have reasons", page.count("#memory tbody tr") > 3)
    page.run("document.querySelectorAll('.owner')[0].click()")
    lit = page.wait("return document.querySelector('#memory .selected').textContent")
    report.case("a request's table lights up", lit, page.text("#memory .selected"))


def check_steps(page: Page, report: Report) -> None:
    """Every panel of the view Steps."""
    page.view("steps")
    time.sleep(5)
    report.case("steps are drawn", page.run(PAINTED, "#steps canvas", 0) > 5)
    report.case("requests are bars", page.run(PAINTED, "#steps canvas", 1) > 3)
    for at, name in ((2, "first tokens"), (3, "tokens")):
        report.case(f"there is a histogram of {name}", page.run(PAINTED, "#steps canvas", at) > 2)
    rate = page.text(".tile b")
    report.case("the tiles have numbers", not rate.startswith("0/"), rate)
    report.case("engines and tenants are listed", page.count("#steps tbody tr") >= 2)


def check_phone(page: Page, report: Report, pictures: Path | None) -> None:
    """Check that every view fits 320 pixels."""
    for view in VIEWS:
        page.view(view)
        time.sleep(1)
        width = page.run("return document.querySelector('main').scrollWidth")
        report.case(f"{view} fits 320 pixels", width <= SIZES["phone"][0], f"{width} px")
        if pictures is not None and view == "memory":
            page.picture(pictures / "page-phone.png")


def check_hostile(page: Page, report: Report) -> None:
    """Texts of a model that attack the page stay texts."""
    bad, (longest_ms, _), hacked = page.run_async(INERT, texts(NUM_HOSTILE, seed=1))
    report.case(f"{NUM_HOSTILE} hostile texts are inert", not bad and hacked is None, bad or "")
    report.case("none of them is slow to show", longest_ms < 200, f"at most {longest_ms:.0f} ms")
    report.case("nothing is asked of another host", page.run(FOREIGN) == 0)


def check_left_open(page: Page, report: Report) -> None:
    """Two hours of a loaded server, fed to the page at once."""
    sizes, num_kept = page.run_async(LEFT_OPEN, 2)
    growth = (sizes[-1] - sizes[0]) / 2**20
    figure = f"{sizes[-1] / 2**20:.0f} MiB, {growth:+.0f} MiB since the first quarter; {num_kept}"
    report.case("two hours open take no more memory", growth < 40, f"{figure} items kept")


def check_controls(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """The playground's controls: stop, answer again, edit, a schema, a completion."""
    options = ["--num-blocks", "512", "--max-num-seqs", "16", "--seed", "1"]
    with (
        served(options, folder / "controls.log") as server,
        opened(args, f"http://127.0.0.1:{server.port}/", "wide") as page,
    ):
        page.set("temperature", "2")
        page.set("max_tokens", "4000")
        page.set("n", "8")
        page.driver.find_element(By.ID, "prompt").send_keys("Write a long text.", Keys.ENTER)
        began = page.wait("return !document.querySelector('.stop').hidden")
        page.click(".stop")
        stopped = page.wait("return document.querySelector('.stop').hidden", 5)
        report.case("an answer is stopped", began and stopped)
        page.set("n", "1")
        page.set("max_tokens", "40")
        buttons = page.driver.find_elements(By.CSS_SELECTOR, ".message.user button")
        next(each for each in buttons if each.text == "Answer again").click()
        time.sleep(0.5)
        page.wait("return document.querySelector('.stop').hidden")
        shown = page.run("return document.querySelector('#playground').textContent")
        report.case("answered again, beside the answers before", "9 of 9" in shown)
        buttons = page.driver.find_elements(By.CSS_SELECTOR, ".message.user button")
        next(each for each in buttons if each.text == "Edit").click()
        field = page.driver.find_element(By.CSS_SELECTOR, "[aria-label='Edited message']")
        field.clear()
        field.send_keys("What does os.path.join do?")
        edited = page.driver.find_elements(By.CSS_SELECTOR, ".message.user button.primary")
        (edited or page.driver.find_elements(By.CSS_SELECTOR, ".message.user button"))[0].click()
        time.sleep(0.5)
        page.wait("return document.querySelector('.stop').hidden")
        shown = page.run("return document.querySelector('#playground').textContent")
        report.case("an edited message makes a branch", "2 of 2" in shown)
        page.set(
            "schema",
            '{"type": "object", "properties": {"a": {"type": "integer"}},'
            ' "required": ["a"], "additionalProperties": false}',
        )
        page.set("temperature", "0")
        page.click("#playground button.primary, button.new")
        page.ask("Give a number.")
        answer = page.text(".message.assistant")
        report.case("an answer follows the schema", '{"a"' in answer.replace(" ", ""), answer[:60])
        page.set("schema", "")
        page.set("tools", TOOLS)
        page.run(REQUIRE_TOOLS)
        page.ask("What is the weather in Paris?")
        called = page.count(".message.assistant figcaption") == 1
        fields = page.driver.find_elements(By.CSS_SELECTOR, "[aria-label='Result of get_weather']")
        report.case("a tool's call is shown, with a field for its result", called and fields)
        fields[0].send_keys("18 degrees and sunny")
        page.run("window.fetch = window.plainFetch")
        page.click(".message.tool button")
        time.sleep(0.5)
        page.wait("return document.querySelector('.stop').hidden")
        numbers = page.count(".message.assistant footer")
        report.case("the answer goes on from the result", numbers >= 2, f"{numbers} answers")
        page.set("tools", "{")
        page.ask("Again.")
        said = page.text(".settings .error")
        report.case("tools that are no JSON are refused in words", "no JSON" in said, said)
        page.set("tools", "")
        page.set("mode", "completion")
        page.set("schema", "")
        page.ask("def add(a, b):")
        numbers = page.text(".message.assistant footer")
        report.case("a completion streams in", "tokens/s" in numbers, numbers)
        report.case("no error in the console, controls", not (found := page.errors()), found[:2])


def check_restart(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """The server goes away under the page, and comes back at the same address."""
    with served(["--num-blocks", "256"], folder / "first.log") as server:
        port = server.port
        page = Page(args, f"http://127.0.0.1:{port}/#memory", "wide")
        page.wait("return document.querySelector('#connection').dataset.state === 'open'")
    try:
        lost = page.wait("return !document.querySelector('#banner').hidden", 20)
        report.case("the page says that the server is gone", lost, page.text("#banner"))
        with served(["--num-blocks", "256"], folder / "second.log", port=port):
            back = page.wait(
                "return document.querySelector('#connection').dataset.state === 'open'"
                " && document.querySelector('#banner').hidden",
                30,
            )
            report.case("the page goes on when it is back", back)
    finally:
        page.driver.quit()


def check_keys(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """A tenant sees the playground alone, the operator all views."""
    keys = folder / "keys"
    keys.write_text("alice:alice-key-1\noperator:operator-key-1\n")
    tabs = "return [...document.querySelectorAll('[role=tab]')].filter((e) => !e.hidden).length"
    arguments = ["--num-blocks", "256", "--api-key-file", str(keys)]
    with served(arguments, folder / "keys.log") as server:
        url = f"http://127.0.0.1:{server.port}/"
        with opened(args, url, "wide", needs_key=True) as page:
            report.case("without a key the page asks for one", "key" in page.text("#banner"))
            for key, expected in (("alice-key-1", 1), ("operator-key-1", 3)):
                page.click("#key-button")
                page.driver.find_element(By.ID, "key-input").send_keys(key, Keys.ENTER)
                page.wait("return document.querySelector('#set-model option') !== null")
                time.sleep(1)
                name = f"{key.partition('-')[0]} sees {expected} of 3 views"
                report.case(name, page.run(tabs) == expected, page.run(tabs))
            page.click("#key-button")
            page.press(Keys.ESCAPE)
            ended = page.ask("What does os.path.join do?")
            report.case("Escape keeps the key", page.text("#key-button") == "Key set")
            report.case("a key chats", ended and page.count(".message.assistant .body p") > 0)


def check_fleet(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Two replicas: each is shown by itself."""
    options = ["--replicas", "2", "--num-blocks", "96", "--max-num-seqs", "8"]
    options += ["--max-model-len", "1024"]
    with served(options, folder / "fleet.log") as server:
        url = f"http://127.0.0.1:{server.port}/"
        with opened(args, url, "wide") as page, Load(server, 24, (60, 200)):
            page.view("memory")
            time.sleep(12)
            names = page.run("return [...document.querySelector('#engine').options].length")
            report.case("both replicas can be chosen", names == 2, names)
            if args.pictures is not None:
                page.picture(args.pictures / "page-fleet.png")
            first = page.run("return document.querySelector('#memory .legend').textContent")
            page.run(
                "const e = document.querySelector('#engine'); e.selectedIndex = 1;"
                " e.dispatchEvent(new Event('change'))"
            )
            time.sleep(2)
            second = page.run("return document.querySelector('#memory .legend').textContent")
            report.case("the other replica has other blocks", first != second, second)
            page.view("steps")
            time.sleep(2)
            rows = page.run("return document.querySelectorAll('#steps .state.ready').length")
            report.case("both replicas are listed as ready", rows == 2, rows)
            report.case("no error in the console, fleet", not (found := page.errors()), found[:2])


def check_models(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Two models in room for one: choosing one does not load it, and a call does."""
    entries = "".join(f"- {{name: {name}, memory: 64MiB}}\n" for name in ("chat", "code"))
    (folder / "models.yaml").write_text(entries)
    options = ["--models", str(folder / "models.yaml"), "--models-memory", "96MiB"]
    with served(options, folder / "models.log") as server:
        url = f"http://127.0.0.1:{server.port}/"
        with opened(args, url, "wide") as page:
            ended = page.ask("What does os.path.join do?")
            states = "return [...document.querySelector('#set-model').options].map((o) => o.text)"
            page.wait(f"{states}.includes('chat (loaded)')")
            listed = page.run(states)
            shown = listed == ["chat (loaded)", "code (unloaded)"]
            report.case("the playground lists models with their states", ended and shown, listed)
            page.view("steps")
            loaded = page.wait("return document.querySelector('.models td .ready') !== null")
            report.case("the loaded model is listed", loaded, page.text("#steps .models"))
            counted = page.text("#steps .panel:nth-of-type(3) .note")
            report.case("its generation is counted", "1 values" in counted, counted)
            if args.pictures is not None:
                page.run("document.querySelector('.models').scrollIntoView(false)")
                page.picture(args.pictures / "page-models.png")
            page.run(
                "const e = document.querySelector('#shown'); e.value = 'code';"
                " e.dispatchEvent(new Event('change'))"
            )
            said = page.wait("return !document.querySelector('#not-loaded').hidden")
            report.case("a model that is not in memory is named", said, page.text("#not-loaded"))
            time.sleep(2)
            states = "document.querySelectorAll('#steps .models .state')"
            rows = page.run(f"return [...{states}].map((each) => each.textContent)")
            report.case("watching loads no model", rows == ["loaded", "unloaded"], rows)
            page.run(
                "fetch('/v1/completions', {method: 'POST', headers: {'Content-Type':"
                " 'application/json'}, body: JSON.stringify({model: 'code', prompt: 'def f',"
                " max_tokens: 200, ignore_eos: true})})"
            )
            page.view("memory")
            blocks = "[...document.querySelectorAll('#memory .legend b')]"
            used = f"return {blocks}.slice(0, 2).some((each) => each.textContent !== '0')"
            drawn = page.wait(f"{used} && document.querySelector('#not-loaded').hidden", 60)
            text = page.text("#memory .legend")
            report.case("a call loads it, and its blocks are drawn", drawn, text)
            report.case("no error in the console, models", not (found := page.errors()), found[:2])


def save_hybrid(folder: Path) -> Path:
    """A model with recurrent states and random weights, with the embedded model's tokenizer."""
    config = Qwen3_5TextConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in EMBEDDED_MODEL.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def check_states(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """A model whose blocks hold keys and values, or recurrent states, with a disk tier."""
    options = ["--model", str(save_hybrid(folder / "hybrid")), "--num-blocks", "512"]
    options += ["--cache-dir", str(folder / "cache"), "--max-model-len", "1024"]
    with served([*options, "--max-num-seqs", "16"], folder / "states.log") as server:
        url = f"http://127.0.0.1:{server.port}/"
        with opened(args, url, "wide") as page, Load(server, 12, (60, 200)):
            page.view("memory")
            time.sleep(8)
            held = page.text("#memory .legend b")
            report.case("blocks of a hybrid are drawn", held != "0", f"{held} held")
            page.run("document.querySelector('#memory canvas').focus()")
            kinds = set()
            for _ in range(40):
                page.press(Keys.ARROW_RIGHT)
                spoken = page.text("#memory .legend [role=status]")
                kinds |= {spoken.rpartition("kind ")[2]} if "kind " in spoken else set()
            report.case("blocks of states are named", kinds == {"full", "state"}, kinds)
            numbers = page.count("#memory .facts dd")
            report.case("the tiers have numbers", numbers > 3, f"{numbers} numbers")
            if args.pictures is not None:
                page.picture(args.pictures / "page-states.png")


def check_crowd(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """10,000 blocks and 300 requests: every frame in time, and the pictures for the documents."""
    options = ["--num-blocks", "10000", "--max-num-seqs", "300"]
    with served(options, folder / "crowd.log") as server:
        url = f"http://127.0.0.1:{server.port}/"
        with opened(args, url, "wide") as page, Load(server, 320, (60, 400)):
            for view in ("memory", "steps"):
                page.view(view)
                time.sleep(8)
                rate, most_ms, longest_ms = page.run_async(FRAMES, 5)
                figure = f"{rate:.0f} frames/s, 95% of them within {most_ms:.0f} ms, all"
                figure += f" within {longest_ms:.0f} ms"
                report.case(f"{view} with 300 requests and 10,000 blocks", rate > 5, figure)
                if args.pictures is not None:
                    page.picture(args.pictures / f"page-{view}-crowd.png")
            report.case("no error in the console, crowd", not (found := page.errors()), found[:2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; the exit code is 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--driver", default="/usr/bin/chromedriver")
    parser.add_argument("--pictures", type=Path, help="folder for pictures; none without it")
    parser.add_argument("--only", nargs="*", default=[], help="names of checks")
    args = parser.parse_args(arguments)
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks: dict[str, Callable[[], None]] = {
            "views": lambda: check_views(args, report, folder),
            "controls": lambda: check_controls(args, report, folder),
            "images": lambda: check_images(args, report, folder),
            "restart": lambda: check_restart(args, report, folder),
            "keys": lambda: check_keys(args, report, folder),
            "states": lambda: check_states(args, report, folder),
            "fleet": lambda: check_fleet(args, report, folder),
            "models": lambda: check_models(args, report, folder),
            "crowd": lambda: check_crowd(args, report, folder),
        }
        for each in args.only or checks:
            checks[each]()
    print(f"{report.num_failed} cases do not hold" if report.num_failed else "all cases hold")
    return int(report.num_failed > 0)


def check_views(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """All views of one server under a light load."""
    options = ["--num-blocks", "512", "--max-num-seqs", "16", "--seed", "1"]
    with served(options, folder / "views.log") as server:
        url = f"http://127.0.0.1:{server.port}/"
        with opened(args, url, "wide") as page:
            check_playground(page, report, args.pictures)
            check_hostile(page, report)
            check_left_open(page, report)
            with Load(server, 14, (30, 200)):
                check_memory(page, report)
                if args.pictures is not None:
                    page.run("document.querySelector('.owner[aria-pressed=true]')?.click()")
                    time.sleep(20)
                    page.picture(args.pictures / "page-memory.png")
                check_steps(page, report)
                if args.pictures is not None:
                    page.picture(args.pictures / "page-steps.png")
                check_keyboard(page, report)
                check_looks(page, report, args.pictures)
            report.case("no error in the console", not (found := page.errors()), found[:2])
        with opened(args, url, "phone") as page, Load(server, 8, (30, 100)):
            page.ask("What does os.path.join do?")
            check_phone(page, report, args.pictures)


if __name__ == "__main__":
    sys.exit(main())
