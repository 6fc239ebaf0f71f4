"""Kernels compiled for GPUs where there is none: registers, spills, shared memory, instructions.

The interpreter runs what the compiler refuses, and knows nothing of registers. So each area says in
`specs/<area>.py` as what its kernels are launched, and this file, run as a script without
TRITON_INTERPRET, compiles them all. `SPECS` are those of every test run; `MORE` are compiled by
hand, which prints a table:

    python -m tests.kernels.triton.compiling [--all] [--match decode] [--instructions]
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

SPEC_FILES = Path(__file__).parent / "specs"

SHARED_BYTES_OF_ALL = 99 * 1024
"""Shared memory that a program may have on every GPU since sm_80."""


@dataclass(frozen=True)
class KernelSpec:
    """One way in which a kernel is launched.

    arguments: each argument's type as Triton writes it, "*bf16", "i32", "fp32". A pointer is
        aligned to 16 bytes unless it ends in ":1"; an integer is a multiple of 16 only if it ends
        in ":16". That is what a launch finds out by itself, and what loads are widened by.
    constants: all other arguments without a default: constexpr ones, and those that a launch makes
        constant, which are None and integers equal to 1.
    targets: compute capabilities for which the tests compile it.
    is_bound: what is launched was chosen for these targets, and is for no others.
    options: of the launch; enable_fp_fusion is True unless it is given.
    """

    kernel: Any
    label: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[int, ...] = (90,)
    is_bound: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    max_shared_bytes: int = SHARED_BYTES_OF_ALL
    max_stack_bytes: int = 0


@dataclass
class Compiled:
    """What became of a spec on one target. complaint: what is wrong with it. products: the kinds
    of the tensor core's instructions in it, with their shapes, as PTX writes them."""

    kernel: str
    label: str
    target: int
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    seconds: float = 0.0
    complaint: str = ""
    instructions: dict[str, int] = field(default_factory=dict)
    products: list[str] = field(default_factory=list)


def early(spec: KernelSpec) -> KernelSpec:
    """As launched where it may begin before the kernel ahead has ended: on sm_90."""
    return replace(
        spec,
        label=f"{spec.label} early",
        constants={**spec.constants, "IS_EARLY": True},
        options={**spec.options, "launch_pdl": True},
        targets=(90,),
        is_bound=True,
    )


def load_specs(with_more: bool) -> list[KernelSpec]:
    """Of all areas, in the order of their files."""
    found: list[KernelSpec] = []
    for path in sorted(SPEC_FILES.glob("*.py")):
        module = importlib.import_module(f"tests.kernels.triton.specs.{path.stem}")
        found += module.SPECS
        if with_more:
            found += getattr(module, "MORE", [])
    return found


def kernel_name(spec: KernelSpec) -> str:
    name: str = spec.kernel.fn.__name__
    return name


def _source(spec: KernelSpec) -> Any:
    # Only where kernels are compiled: slow to load.
    from triton.compiler import ASTSource

    names = spec.kernel.arg_names
    given = {
        each.name: each.default
        for each in spec.kernel.params
        if each.has_default and each.name not in spec.arguments
    } | dict(spec.constants)
    unknown = {*spec.arguments, *given} ^ set(names)
    assert not unknown, f"not an argument, or said nothing about: {sorted(unknown)}"
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        kind, _, divisor = spec.arguments.get(name, "constexpr").partition(":")
        signature[name] = kind
        if divisor == "16" or (kind.startswith("*") and not divisor):
            attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {(names.index(name),): value for name, value in given.items()}
    return ASTSource(spec.kernel, signature, constants, attributes)


def compile_spec(spec: KernelSpec, target: int, with_instructions: bool = False) -> Compiled:
    from triton import compile as compile_kernel  # as in _source
    from triton.backends.compiler import GPUTarget

    result = Compiled(kernel_name(spec), spec.label, target)
    start = perf_counter()
    options = {
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        "enable_fp_fusion": True,
        **spec.options,
    }
    try:
        kernel = compile_kernel(
            _source(spec), target=GPUTarget("cuda", target, 32), options=options
        )
    except Exception as error:  # of the compiler there are all kinds, and each is the finding
        result.complaint = f"does not compile: {_message(error)}"
        return result
    result.seconds = perf_counter() - start
    measure(kernel, result, with_instructions)
    result.complaint = complaint(spec, result)
    return result


def measure(kernel: Any, result: Compiled, with_instructions: bool = False) -> None:
    """Write what a compiled kernel takes into `result`."""
    result.shared_bytes = kernel.metadata.shared
    result.products = matrix_products(kernel.asm["ptx"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run_tool("cuobjdump", "-res-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
        assert found is not None, usage
        result.registers = int(found[1])
        result.stack_bytes = int(found[2]) + int(found[3])
        if with_instructions:
            result.instructions = count_instructions(_run_tool("cuobjdump", "-sass", file.name))


def complaint(spec: KernelSpec, result: Compiled) -> str:
    """What a spec does not allow, as a sentence; "" if nothing."""
    if result.stack_bytes > spec.max_stack_bytes:
        return f"spills: {result.stack_bytes} bytes of stack, above {spec.max_stack_bytes}"
    if result.shared_bytes > spec.max_shared_bytes:
        return f"{result.shared_bytes} bytes of shared memory, above {spec.max_shared_bytes}"
    return ""


def _message(error: BaseException) -> str:
    """With its causes: Triton says the place first and what is wrong below."""
    causes = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(f"{type(cause).__name__}: {str(cause)[-2000:]}")
        cause = cause.__cause__
    return " <- ".join(causes)


def _run_tool(name: str, *arguments: str) -> str:
    import triton  # as in _source

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    done = subprocess.run([tool, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


INSTRUCTIONS = (
    "HGMMA", "HMMA", "IMMA", "LDGSTS.E.128", "LDGSTS", "LDG.E.128", "LDG", "STG.E.128", "STG",
    "LDSM", "LDS", "BAR", "FFMA", "MUFU", "LDL", "STL",
)  # fmt: skip


def count_instructions(sass: str) -> dict[str, int]:
    """How often each of INSTRUCTIONS stands in a disassembly; one with modifiers counts as without
    as well."""
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", sass, re.M)

    def count(wanted: str) -> int:
        first, *modifiers = wanted.split(".")
        parts = [name.split(".") for name in names]
        return sum(p[0] == first and set(modifiers) <= set(p) for p in parts)

    counts = {wanted: count(wanted) for wanted in INSTRUCTIONS}
    return {wanted: n for wanted, n in counts.items() if n}


def matrix_products(ptx: str) -> list[str]:
    """The kinds of matrix instructions in a kernel, each once."""
    return sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\.[\w.]+", ptx)))


def _compile_job(job: tuple[int, int, bool, bool]) -> Compiled:
    """In a forked process: kernels don't pickle, their places in the list do."""
    index, target, with_more, with_instructions = job
    return compile_spec(load_specs(with_more)[index], target, with_instructions)


def compile_all(options: argparse.Namespace) -> Iterator[Compiled]:
    """All specs that were asked for, two at a time."""
    specs = load_specs(options.all)
    jobs = [
        (index, target, options.all, options.instructions)
        for index, spec in enumerate(specs)
        if options.match in f"{kernel_name(spec)} {spec.label}"
        for target in ((80, 90) if options.all and not spec.is_bound else spec.targets)
    ]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        yield from pool.map(_compile_job, jobs)


def line(result: Compiled) -> str:
    """A result in the table."""
    text = (
        f"sm_{result.target} {result.kernel + ' ' + result.label:58} {result.registers:4} regs "
        f"{result.stack_bytes:5} stack {result.shared_bytes:7} shared {result.seconds:5.1f} s"
    )
    counts = " ".join(f"{name}:{count}" for name, count in result.instructions.items())
    return "\n    ".join(part for part in (text, counts, result.complaint) if part)


def run_in_process(script: str, *arguments: str, timeout_s: float) -> list[Compiled]:
    """The results of `compiling` or `launching`, from a process that doesn't interpret kernels."""
    root = Path(__file__).parents[3]
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(root / "src"), str(root), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.triton.{script}", "--json", *arguments],
        cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Compiled(**entry) for entry in json.loads(done.stdout)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="more specs, for sm_80 and sm_90 each")
    parser.add_argument("--match", default="", help="only kernels and labels with this in them")
    parser.add_argument("--instructions", action="store_true", help="count those that matter")
    parser.add_argument("--json", action="store_true", help="print JSON when all are done")
    options = parser.parse_args()
    results = []
    for result in compile_all(options):
        results.append(result)
        if not options.json:
            print(line(result), flush=True)
    if options.json:
        json.dump([asdict(result) for result in results], sys.stdout)
        return 0
    return 1 if any(result.complaint for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
