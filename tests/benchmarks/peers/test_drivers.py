"""The peers' drivers without the peers: what they ask of them, by stand-ins with the same names."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LoadScript = Callable[[str], ModuleType]
PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"
LENGTHS = [(9, 3), (20, 1), (5, 6)]


@pytest.fixture
def driver(load_script: LoadScript, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Short parts; this process keeps its cores."""
    module = load_script("driver")
    monkeypatch.setattr(module, "hold_threads", lambda num_threads: None)
    monkeypatch.setattr(module, "DECODE_TOKENS", 8)
    monkeypatch.setattr(module, "PREFILL_TOKENS", (16,))
    yield module


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The arguments that all drivers take."""
    requests = [{"id": i, "prompt_len": p, "output_len": o} for i, (p, o) in enumerate(LENGTHS)]
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"requests": requests}))
    return ["--model", "m", "--workload", str(path), "--out", str(tmp_path / "out.json")]


def result(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(words[-1]).read_text())
    assert found["decode1"]["decode_tok_s"]["min"] > 0
    assert found["prefill16"]["prefill_tok_s"]["min"] > 0
    assert found["workload"]["rows"][0]["output_tokens"] == sum(output for _, output in LENGTHS)
    assert found["peak_rss_mib"] > 1 and found["load_s"] >= 0
    return found


# ---- vLLM -----------------------------------------------------------------------------------


class FakeVLLM:
    """One token a step for each request."""

    def __init__(self, **options: Any) -> None:
        assert options["enable_prefix_caching"] is False and options["max_num_seqs"] == 48
        self.llm_engine = self
        self.open: dict[str, list[int]] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: dict[str, Any]) -> None:
        assert params["ignore_eos"] and params["min_tokens"] == params["max_tokens"]
        self.open[name] = [0, params["max_tokens"]]

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> list[Any]:
        for counts in self.open.values():
            counts[0] += 1
        outputs = [_vllm_output(counts[0]) for counts in self.open.values()]
        self.open = {name: counts for name, counts in self.open.items() if counts[0] < counts[1]}
        return outputs

    def generate(self, prompts: list[Any], params: list[dict[str, Any]], use_tqdm: bool) -> Any:
        assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [p for p, _ in LENGTHS]
        return [_vllm_output(each["max_tokens"]) for each in params]


def _vllm_output(num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * num_tokens)])


def test_vllm(
    load_script: LoadScript,
    driver: ModuleType,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = SimpleNamespace(__version__="9", LLM=FakeVLLM, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    script = load_script("vllm_offline")
    for name in (*script.ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "set")
    script.main(words)
    assert (result(words)["peer"], result(words)["version"]) == ("vLLM", "9")


# ---- OpenVINO GenAI -------------------------------------------------------------------------


class FakePipeline:
    """Two tokens a step for each request; what is left comes with the last read."""

    def __init__(self, folder: str, scheduler: Any, device: str, properties: Any) -> None:
        assert scheduler.max_num_seqs == 48 and not scheduler.enable_prefix_caching
        assert properties["INFERENCE_PRECISION_HINT"] == "bf16"
        self.handles: list[FakeHandle] = []

    def add_request(self, number: int, ids: Any, config: Any) -> "FakeHandle":
        assert config.min_new_tokens == config.max_new_tokens and config.ignore_eos
        self.handles.append(FakeHandle(config.max_new_tokens))
        return self.handles[-1]

    def has_non_finished_requests(self) -> bool:
        return any(handle.left for handle in self.handles)

    def step(self) -> None:
        for handle in self.handles:
            handle.step()


class FakeHandle:
    def __init__(self, left: int) -> None:
        self.left = left
        self.ready: list[int] = []

    def step(self) -> None:
        made = min(2, self.left)
        self.left -= made
        self.ready += [made] if made else []

    def can_read(self) -> bool:
        return bool(self.ready)

    def read(self) -> dict[int, Any]:
        return {0: SimpleNamespace(generated_ids=[7] * self.ready.pop(0))}


def test_openvino(
    load_script: LoadScript,
    driver: ModuleType,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    genai = SimpleNamespace(
        __version__="9",
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=FakePipeline,
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=list))
    load_script("openvino_offline").main(words)
    assert result(words)["kv_dtype"] == "default"


# ---- ONNX Runtime GenAI ---------------------------------------------------------------------


class FakeGenerator:
    """As many tokens as its parameters say."""

    def __init__(self, model: Any, params: Any) -> None:
        self.params = params

    def append_tokens(self, rows: Any) -> None:
        num_rows, width = rows.shape
        assert num_rows == self.params.options["batch_size"]
        self.left = self.params.options["max_length"] - width

    def generate_next_token(self) -> None:
        self.left -= 1

    def is_done(self) -> bool:
        return self.left == 0


class FakeGeneratorParams:
    def __init__(self, model: Any) -> None:
        self.options: dict[str, Any] = {}

    def set_search_options(self, **options: Any) -> None:
        self.options = options


def test_onnxruntime(
    load_script: LoadScript,
    driver: ModuleType,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overlays: list[Any] = []
    fake = SimpleNamespace(
        __version__="9",
        Config=lambda folder: SimpleNamespace(overlay=lambda text: overlays.append(text)),
        Model=lambda config: None,
        GeneratorParams=FakeGeneratorParams,
        Generator=FakeGenerator,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", fake)
    load_script("onnxruntime_offline").main([*words, "--static-batch", "2", "--threads", "1"])
    assert result(words)["static_batch"] == 2
    assert json.loads(overlays[0])["model"]["decoder"]["session_options"] == {
        "intra_op_num_threads": 1
    }


# ---- llama.cpp ------------------------------------------------------------------------------

FAKE_LLAMA_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if sys.argv[1:] == ["--version"]:
    print("version: 9 (abc)")
    raise SystemExit

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if asked["ignore_eos"] and not asked["cache_prompt"] else 400)
        self.end_headers()
        end = {{"stop": True, "tokens_predicted": asked["n_predict"]}}
        if asked["stream"]:
            self.wfile.write(b'data: {{"stop": false}}\\n\\n')
            self.wfile.write(b"data: " + json.dumps(end).encode() + b"\\n\\n")
        else:
            self.wfile.write(json.dumps(end).encode())

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def llama_server(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(FAKE_LLAMA_SERVER.format(python=sys.executable))
    path.chmod(0o755)
    return path


def test_llama_cpp(
    load_script: LoadScript, driver: ModuleType, words: list[str], llama_server: Path
) -> None:
    load_script("llama_server").main(["--server", str(llama_server), *words])
    found = result(words)
    assert (found["version"], found["kv"]) == ("version: 9 (abc)", "split")


def test_a_llama_server_that_ends_is_reported(
    load_script: LoadScript, driver: ModuleType, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        load_script("llama_server").main(["--server", "/bin/false", *words])


def test_the_slots_of_llama_server_have_their_own_cache(load_script: LoadScript) -> None:
    script = load_script("llama_server")
    needed = ["--model", "m.gguf", "--workload", "w", "--out", "o", "--server", "s"]
    split = script.server_command(script.make_parser().parse_args(needed), 1)
    unified = script.server_command(script.make_parser().parse_args([*needed, "--kv-unified"]), 1)
    assert split[split.index("-c") + 1] == str(48 * 2304) and "--kv-unified" not in split
    assert unified[unified.index("-c") + 1] == str(48 * 1600) and unified[-1] == "--kv-unified"


# ---- setting up -----------------------------------------------------------------------------

DRIVERS = ["vllm_offline", "openvino_offline", "onnxruntime_offline", "llama_server"]


@pytest.mark.parametrize("name", [*DRIVERS, "make_models", "convert_gguf"])
def test_help_needs_no_peer(
    load_script: LoadScript, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_script(name).main(["--help"])
    assert ended.value.code == 0
    assert "--model" in capsys.readouterr().out or name == "make_models"


def test_the_sample_is_a_set_up_whose_drivers_are_here(
    load_script: LoadScript, tmp_path: Path
) -> None:
    text = (PEERS / "peers.toml").read_text().replace("DRIVERS", str(PEERS))
    path = tmp_path / "peers.toml"
    path.write_text(text.replace("PEERS", str(tmp_path)).replace("SRC", "src"))
    setup = load_script("benchmarks.cpu.peer_setup").read_setup(path)
    peers = [engine for engine in setup.engines if engine.name != "quire"]
    assert {engine.name for engine in peers} == {"vLLM", "OpenVINO", "llama.cpp", "ONNX Runtime"}
    for engine in peers:
        scripts = [*engine.command[1:2], *engine.long_context[1:2]]
        assert all(Path(script).is_file() for script in scripts)
        assert engine.environment["PYTHONPATH"] == "src"
        assert set(engine.models) == {"llama-160m"}


@pytest.mark.parametrize(("words", "message"), [([], "usage: "), (["F", "x"], "no peer 'x'")])
def test_the_set_up_refuses_what_it_does_not_know(
    words: list[str], message: str, tmp_path: Path
) -> None:
    command = ["sh", str(PEERS / "setup.sh"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


def test_the_shape_of_the_readmes_model_has_its_number_of_parameters(
    load_script: LoadScript,
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = load_script("make_models").make_config("llama-160m")
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(each.numel() for each in model.parameters())
    assert f"{count / 1e6:.1f}" == "124.7"
    assert "124.7 million" in load_script("make_models").__doc__


def test_the_converter_names_a_wrong_folder(
    load_script: LoadScript, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_script("convert_gguf").main(
            ["--llama-cpp", str(tmp_path), "--model", "m", "--out", "o"]
        )
    assert "there is no convert_hf_to_gguf.py in it" in capsys.readouterr().err
