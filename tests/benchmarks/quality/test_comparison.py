"""The command that compares quality and speed, with drivers that only write results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LoadScript = Callable[[str], ModuleType]

# A driver that knows nothing of the tokens: the name of its model is how much each loss rises.
FAKE_DRIVER = """
import json, sys
from pathlib import Path

words = [word for word in sys.argv[1:] if word != "--write-exact"]
options = dict(zip(words[::2], words[1::2]))
windows = json.loads(Path(options["--windows"]).read_text())
is_reference = "--write-exact" in sys.argv
if is_reference:
    Path(options["--exact"]).write_text("exact")
else:
    assert Path(options["--exact"]).read_text() == "exact"
if options["--model"] == "broken":
    sys.exit("cannot load")
shift = 0.0 if is_reference else float(options["--model"])
count = sum(len(window) - len(window) // 2 for window in windows)
result = {
    "peer": "fake", "version": "9", "label": options["--label"], "weight_bytes": 400,
    "losses": [2.0 + index % 3 + shift for index in range(count)],
    "divergences": [] if is_reference else [shift] * count,
    "agreements": [] if is_reference else [1] * count,
}
Path(options["--out"]).write_text(json.dumps(result))
"""

SETUP = """
[[model]]
name = "small"
folder = "{folder}"

[[engine]]
name = "Peer"
precision = "int8"
command = ["false"]
quality = ["{python}", "{driver}"]
[engine.models.small]
path = "0.01"

[[engine]]
name = "Broken"
precision = "int8"
command = ["false"]
quality = ["{python}", "{driver}"]
[engine.models.small]
path = "broken"

[[engine]]
name = "Unread"
precision = "int8"
command = ["false"]
[engine.models.small]
path = "no quality driver"
"""


@pytest.fixture
def comparison(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.quality.comparison")


@pytest.fixture
def words(tmp_path: Path, comparison: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command's arguments: a model of one-word tokens, three engines, two texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"a": 0, "b": 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in "ab":
        (tmp_path / name).write_text(" ".join(name * 9))
    driver = tmp_path / "transformers_logits.py"
    driver.write_text(FAKE_DRIVER)
    monkeypatch.setattr(comparison, "HERE", tmp_path)  # the reference's driver lies there
    path = tmp_path / "setup.toml"
    path.write_text(SETUP.format(folder=tmp_path, python=sys.executable, driver=driver))
    return [
        *("--setup", str(path), "--model", "small", "--out", str(tmp_path / "out.json")),
        *("--text", str(tmp_path / "a"), str(tmp_path / "b"), "--parts", "quality"),
        *("--windows-per-text", "2", "--window-tokens", "4", "--engines", "Peer,Broken,Unread"),
    ]


def test_all_engines_read_the_same_tokens(
    comparison: ModuleType, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison.main([*words, "--markdown", str(tmp_path / "out.md")])
    windows = json.loads((tmp_path / "out.raw" / "windows.json").read_text())
    assert windows == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    facts = json.loads((tmp_path / "out.json").read_text())
    assert list(facts["engines"]) == [comparison.REFERENCE, "Peer int8"]
    assert (facts["num_predicted"], facts["texts"]) == (8, ["a", "b"])
    assert not (tmp_path / "out.raw" / "exact.npy").exists()
    report = (tmp_path / "out.md").read_text()
    assert "| Peer int8 | 32.00 |" in report and "+1.01% ± 0.00 | 0.01000 | 100.00%" in report
    assert "FAILED: Broken int8: ended with 1; see" in report
    assert report in capsys.readouterr().out
    assert "cannot load" in (tmp_path / "out.raw" / "Broken-int8.log").read_text()


def test_without_a_text_held_out_ones_are_read(
    comparison: ModuleType, words: list[str], tmp_path: Path
) -> None:
    first = words.index("--text")
    comparison.main([*words[:first], *words[first + 3 :]])
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["texts"] == ["val_code", "val_chat_fn", "val_chat_file"]
    assert (facts["num_windows"], facts["num_predicted"]) == (6, 12)


def test_append_keeps_what_was_measured(
    comparison: ModuleType, words: list[str], tmp_path: Path
) -> None:
    comparison.main(words)
    out = tmp_path / "out.json"
    facts = json.loads(out.read_text())
    facts["engines"]["Old int8"] = facts["engines"]["Peer int8"]
    out.write_text(json.dumps(facts))
    comparison.main([*words, "--append"])
    kept: dict[str, Any] = json.loads(out.read_text())
    assert set(kept["engines"]) == {comparison.REFERENCE, "Peer int8", "Old int8"}
    assert len(kept["failures"]) == 1
    with pytest.raises(SystemExit, match="another model or text; leave out --append"):
        comparison.main([*words, "--append", "--window-tokens", "6", "--windows-per-text", "1"])
    (tmp_path / "a").write_text(" ".join("b" * 9))  # another text by the same name
    with pytest.raises(SystemExit, match="another model or text; leave out --append"):
        comparison.main([*words, "--append"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--windows-per-text", "3"], "text 0 has 9 tokens, but 3 windows of 4"),
        (["--model", "other"], "none of the set-up's is left"),
        (["--text", "/no/such/text"], "/no/such/text"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(
    comparison: ModuleType, words: list[str], more: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        comparison.main([*words, *more])


@pytest.mark.parametrize(
    "more", [["--parts", "beauty"], ["--threads", "0"], ["--window-tokens", "3"]]
)
def test_bad_options_are_named(
    comparison: ModuleType, words: list[str], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        comparison.main([*words, *more])
    assert more[0] in capsys.readouterr().err
