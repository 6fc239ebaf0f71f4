"""Mistakes that newcomers make, and the words that the answer must have, or must not have.

All are refused before an engine starts: importing torch would fail in these tests.
"""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.hub.model_folder import EMBEDDED_MODEL

Answer = Callable[[str], str]

PYTHON = ("None", "kv_cache_memory", "max_num_seqs", "max_model_len", "device=", "('")
"""Words of Python that no error on the command line may have."""


def _folder(path: Path, *left_out: str) -> Path:
    """A folder with the embedded model's files, without some."""
    path.mkdir()
    for file in EMBEDDED_MODEL.iterdir():
        if file.name not in left_out:
            (path / file.name).symlink_to(file)
    return path


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """The folders that the commands below name."""
    (file,) = (each for each in EMBEDDED_MODEL.iterdir() if each.suffix == ".safetensors")
    pickled, cut = _folder(tmp_path / "bin", file.name), _folder(tmp_path / "cut", file.name)
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    (cut / file.name).write_bytes(file.read_bytes()[:100_000])
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "server.yaml").write_text("port: 0\nkv-cache-memory: 4 apples\n")
    (tmp_path / "device.yaml").write_text("port: 0\ndevice: cuda\n")
    return {path.name.replace(".", "_"): path for path in tmp_path.iterdir()}


@pytest.fixture
def answer(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Answer:
    """Runs a command, and returns what it prints to stderr."""
    monkeypatch.setitem(sys.modules, "quire.offline.llm", None)
    monkeypatch.setattr("quire.server.model_launch.start_engines", None)
    monkeypatch.setattr("quire.engine_client.early_checks.lacks_gpu", lambda: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(words: str) -> str:
        try:
            code = main(shlex.split(words.format(**folders)))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        assert code in (1, 2)
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Commands and flags that don't exist.
        ("sevre", "did you mean serve?"),
        ("stop llama3", "there is no command 'stop'; `quire serve MODEL` loads one model"),
        ("create x -f Modelfile", "quire reads no Modelfile"),
        ("ls", "`quire list` lists the models"),
        ("push x", "hf upload"),
        ("cp a b", "--served-model-name"),
        ("launch", "`quire serve MODEL` serves a model"),
        ("run-batch -i x", "`quire batch FILE`"),
        ("collect-env", "`quire doctor`"),
        ("bench latency", "`quire bench serve` the latencies of a running server"),
        ("bench sweep", "`quire plan MODEL --load LOAD` compares configurations"),
        ("bench serving", "`quire bench serve URL` loads a running server"),
        ("bench startup", "there is no command 'startup'"),
        ("serve --prot 80", "did you mean --port?"),
        ("serve -ngl 99", "--device says where the whole model computes"),
        ("serve --speculative-config {{}}", "--speculative-config names no method, but must"),
        ("serve --limit-mm-per-prompt image=1", "'image=1', but must be an object in JSON"),
        # Values of flags: the flag is named as it was typed, and its value, too.
        ("serve --port 70000", "error: --port is 70000, but must be from 0"),
        ("serve --max-num-seqs 0", "--max-num-seqs is 0, but must be at least 1"),
        ("serve -np 0", "-np is 0, but must be at least 1"),
        ("serve --max-model-len -5", "--max-model-len is -5, but must be at least 2"),
        ("serve --max-model-len x", "'x' is no number"),
        ("serve --kv-cache-memory 10", "--kv-cache-memory is 10, but must be at least 1024 bytes"),
        ("serve --kv-cache-memory 10", "did you mean 10GiB?"),
        ("serve --kv-cache-memory 4apples", "--kv-cache-memory is '4apples', but must be a number"),
        ("serve --quantization awq", "--quantization is 'awq', but must be one of int8, int4;"),
        ("run {empty} --quantization q4_k_m", "AWQ, GPTQ, FP8, MXFP4 or GGUF is served as it is"),
        ("chat -q fp8", "-q is 'fp8', but must be one of int8, int4;"),
        ("serve --kernels cuda", "--kernels is 'cuda', but must be one of auto, torch, triton,"),
        ("serve --device gpu", "--device is 'gpu', but must be"),
        ("chat --temperature 101", "--temperature is 101.0, but must be at least 0"),
        ("serve --replicas 2 --agents a:1", "--agents are named, each of which has one replica"),
        ("serve --lora-modules a=/a", "set --enable-lora, or leave it out"),
        ("bench serve --tokenizer x", "no option --tokenizer; no tokenizer is needed, since"),
        ("bench serve --endpoint /v1/completions", "--backend openai asks /v1/completions"),
        ("bench serve --hots x", "did you mean --host?"),
        ("bench serve --num-prompts 0", "--num-prompts is 0, but must be at least 1"),
        ("bench throughput --reps 0", "--reps is 0, but must be at least 1"),
        # Options that the files or the machine contradict are refused before an engine starts.
        ("serve --port 0 --device cuda", "--device is 'cuda', but torch"),
        ("chat --device cuda", "and --device cpu computes without one"),
        ("serve --port 0 --max-model-len 10000000", "--max-model-len is 10000000, but the model"),
        ("run {cut} --max-model-len 9", "is not a whole safetensors file"),
        ("chat --max-model-len 10m", "lower --max-model-len, or leave it out for"),
        ("serve {bin} --port 0", "has its weights only as pickles (pytorch_model.bin)"),
        ("chat {bin}", "has its weights only as pickles (pytorch_model.bin)"),
        ("serve {cut} --port 0", "is not a whole safetensors file"),
        ("serve {cut_gguf} --port 0", "is not a whole GGUF file"),
        ("run {cut_gguf}", "is not a whole GGUF file"),
        ("serve {empty} --port 0", "has no"),
        ("serve /no/such --port 0", "is not a folder here"),
        # The file and the environment.
        ("serve --config {server_yaml}", "server.yaml, line 2: kv-cache-memory is '4 apples'"),
        ("serve --config {device_yaml}", "device (device.yaml, line 2) is 'cuda'"),
    ],
)
def test_a_mistake_is_named_in_the_words_that_were_typed(
    words: str, expected: str, answer: Answer, tmp_path: Path
) -> None:
    printed = answer(words)
    assert expected in printed.replace(f"{tmp_path}/", "")
    assert printed.count("\n") == 1
    typed = words.split()
    assert not [word for word in PYTHON if word in printed and word not in typed]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("QUIRE_MAX_NUM_SEQS", "0", "error: QUIRE_MAX_NUM_SEQS is 0, but must be at least 1"),
        ("QUIRE_DEVICE", "cuda", "error: QUIRE_DEVICE is 'cuda', but torch"),
        ("QUIRE_KV_CACHE_MEMORY", "10", "QUIRE_KV_CACHE_MEMORY is 10, but must be at least"),
    ],
)
def test_a_variable_is_named_as_it_was_set(
    name: str, value: str, expected: str, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert expected in answer("serve --port 0")
