"""Launches of a real engine, each compiled exactly as it is launched, where there is no GPU.

`compiling.py` compiles kernels as their specs say that they are launched. Here an engine runs its
whole device path on the CPU: every launch goes through Triton's own binding of arguments, with a
driver that has no GPU behind it, is compiled for one, and is then interpreted. So what a launch
can't say, or says otherwise than its spec, is found, and the tokens are an engine's. By hand:

    python -m tests.kernels.triton.launching [--target 80] [--model qwen3] [--dtype bfloat16]
        [--options '{"quantization": "int8"}'] [--sampling '{"temperature": 0.7, "top_k": 5}']
"""

import argparse
import importlib
import json
import pkgutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.kernels.triton.compiling import Compiled, line, measure

LIMITS = {80: (108, 164, 163, False), 86: (84, 100, 99, False), 90: (132, 228, 227, True)}
"""Of an A100, an RTX 3090 and an H200: processors, KiB of shared memory of a processor and of a
program, whether matrix instructions read it."""

MAX_GRID = (2**31 - 1, 65535, 65535)

PROMPTS = ([2 + 7 * i % 120 for i in range(20)], [3, 5, 7, 9, 11, 13, 2, 4], [9, 4, 2])

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


class Launches:
    """All variants that were launched, in order."""

    def __init__(self, target: int, is_quiet: bool) -> None:
        self.target = target
        self.results: list[Compiled] = []
        self._is_quiet = is_quiet
        self._seen: dict[int, Any] = {}

    def add(self, name: str, kernel: Any, grid: tuple[int, ...]) -> None:
        """Measure a variant when it is first launched, and check every grid."""
        too_large = [size for size, most in zip(grid, MAX_GRID, strict=False) if size > most]
        if id(kernel) in self._seen and not too_large:
            return
        self._seen[id(kernel)] = kernel
        result = Compiled(name, f"grid {grid}", self.target)
        measure(kernel, result)
        if too_large:
            result.complaint = f"its grid {grid} is above {MAX_GRID}"
        elif result.stack_bytes:
            result.complaint = f"spills: {result.stack_bytes} bytes of stack"
        elif result.shared_bytes > LIMITS[self.target][2] << 10:
            result.complaint = f"shared memory is above {LIMITS[self.target][2]} KiB"
        self.results.append(result)
        if not self._is_quiet:
            print(line(result), flush=True)


def set_driver(target: int) -> None:
    """Let Triton compile for `target`, without a GPU to ask."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class NoGpu(DriverBase):  # type: ignore[misc]
        def is_active(self) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", target, 32)

        def get_active_torch_device(self) -> None:
            raise NotImplementedError

        def get_benchmarker(self) -> None:
            raise NotImplementedError

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(NoGpu())


def compile_then_interpret(launches: Launches) -> None:
    """Replace what a launch does. Kernels must not have been imported yet."""
    from triton import knobs, language
    from triton.runtime import interpreter, jit

    import quire.kernels.triton
    from quire.kernels.triton import widening

    assert not knobs.runtime.interpret, "run this without TRITON_INTERPRET"
    set_driver(launches.target)
    bind = jit.JITFunction.run
    interpreted: dict[Any, Any] = {}

    def interpret(function: Any) -> Any:
        return interpreted.setdefault(function.fn, interpreter.InterpretedFunction(function.fn))

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = bind(self, *arguments, grid=None, warmup=True, **options)
        launches.add(self.fn.__name__, kernel, grid)
        widening.IS_INTERPRETED = language.constexpr(True)
        interpret(self).run(*arguments, grid=grid, warmup=False, **options)
        widening.IS_INTERPRETED = language.constexpr(False)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return interpret(self)(*arguments, **options)

    jit.JITFunction.run, jit.JITFunction.__call__ = run, call
    for module in pkgutil.walk_packages(quire.kernels.triton.__path__, "quire.kernels.triton."):
        importlib.import_module(module.name)
    # From here on the engine believes that it interprets, as the end of each launch does.
    knobs.runtime.interpret = True
    quire.kernels.triton.compute_as_gpus_do()


def pretend_to_be(target: int) -> None:
    """Let what chooses tiles by the device's limits see those of the target."""
    from quire.attention.triton_plan import DeviceLimits

    processors, shared, program_shared, is_wide = LIMITS[target]
    limits = DeviceLimits(processors, shared << 10, program_shared << 10, is_wide=is_wide)
    DeviceLimits.of = staticmethod(lambda device: limits)  # type: ignore[method-assign]


def generate(folder: Path, kernels: str, options: argparse.Namespace) -> list[list[int]]:
    """The tokens of PROMPTS on these kernels."""
    from quire import LLM, SamplingParams

    llm = LLM(
        str(folder), kernels=kernels, dtype=options.dtype, device="cpu", skip_tokenizer_init=True,
        num_blocks=40, max_num_seqs=4, max_model_len=64, **json.loads(options.options),
    )  # fmt: skip
    sampling = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "seed": 1}
    params = SamplingParams(**(sampling | json.loads(options.sampling)))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=int, default=90, choices=sorted(LIMITS))
    parser.add_argument("--model", default="llama", help="of tests/engine/checkpoints.py")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--options", default="{}", help="of the engine, as JSON")
    parser.add_argument("--sampling", default="{}", help="parameters, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON when all is done")
    options = parser.parse_args()
    launches = Launches(options.target, options.json)
    compile_then_interpret(launches)
    pretend_to_be(options.target)
    # Brings transformers, and must not come before the kernels.
    from tests.engine.checkpoints import save_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_checkpoint(options.model, Path(folder), **SMALL)
        tokens = generate(checkpoint, "triton", options)
    if options.json:
        json.dump([asdict(result) for result in launches.results], sys.stdout)
        return 0
    print(f"{len(launches.results)} variants; tokens {tokens}")
    return 1 if any(result.complaint for result in launches.results) else 0


if __name__ == "__main__":
    sys.exit(main())
