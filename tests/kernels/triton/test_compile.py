"""Every kernel compiles for the GPUs it is meant for, without spills, into the memory there is.

All are compiled by one process, since this one interprets kernels; see `compiling.py`.
"""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.compiling import (
    SHARED_BYTES_OF_ALL,
    Compiled,
    KernelSpec,
    complaint,
    count_instructions,
    kernel_name,
    line,
    load_specs,
    run_in_process,
)

import quire.kernels.triton

KERNEL_FILES = sorted(Path(quire.kernels.triton.__file__).parent.rglob("*.py"))


def test_every_kernel_has_a_spec():
    written = {
        name
        for path in KERNEL_FILES
        for name in re.findall(r"def (\w+_kernel)\(", path.read_text())
    }
    assert written, f"no kernels in {KERNEL_FILES}"
    assert written == {kernel_name(spec) for spec in load_specs(with_more=False)}


def test_every_kernel_is_in_the_documentation():
    page = (Path(__file__).parents[3] / "docs/gpu.md").read_text()
    found = [path.stem for path in KERNEL_FILES if re.search(r"def \w+_kernel\(", path.read_text())]
    assert [name for name in found if f"`{name}`" not in page] == []


def test_every_launch_says_whether_products_and_sums_are_fused():
    """Bits depend on it, and Triton 3.10 changes what holds where nothing is said."""
    launches = [
        (path.stem, call)
        for path in KERNEL_FILES
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        if ast.unparse(call.func.value).endswith("kernel")
    ]
    silent = [
        (name, call.lineno)
        for name, call in launches
        if not any(keyword.arg == "enable_fp_fusion" for keyword in call.keywords)
    ]
    assert [name for name, _ in silent] == ["grouped_matmul"], silent  # its callers say it
    assert len(launches) > 40


BATCH_INVARIANT = {
    80: ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"],
    90: ["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"],
}
"""The only instruction of a batch-invariant product, for all batches, by the target."""


@pytest.mark.timeout(300)
@pytest.mark.long
def test_all_kernels_compile_as_they_should():
    """One test, so that they are compiled once: in several processes each would compile all."""
    results = run_in_process("compiling", timeout_s=290)
    assert len(results) == sum(len(spec.targets) for spec in load_specs(with_more=False))
    found = [line(result) for result in results if result.complaint]
    assert not found, "spills, or needs memory that there is not:\n" + "\n".join(found)
    assert all(result.registers > 0 for result in results)
    for target, products in BATCH_INVARIANT.items():
        check_products(results, target, products)
    check_vector_loads(results)


def check_products(results, target, products):
    """Codes with scales of groups are left out, since they have one tile for all batches."""
    found = [
        result.products
        for result in results
        if result.kernel == "matmul_kernel" and result.target == target
        if "groups" not in result.label
    ]
    assert len(found) >= 2 and all(each == products for each in found)


def check_vector_loads(results):
    """Where alignment is lost a program holds a pointer for each number, 168 registers and more."""
    found = {
        result.label: result.registers
        for result in results
        if re.fullmatch(r"grouped_\w*matmul_kernel", result.kernel) and result.target == 90
    }
    assert len(found) >= 3 and max(found.values()) <= 128, found


def _spec(**limits):
    return KernelSpec(None, "", {}, {}, **limits)


@pytest.mark.parametrize(
    ("limits", "usage", "expected"),
    [
        ({}, {}, ""),
        ({}, {"stack_bytes": 8}, "spills: 8 bytes of stack, above 0"),
        ({"max_stack_bytes": 8}, {"stack_bytes": 8}, ""),
        ({}, {"shared_bytes": SHARED_BYTES_OF_ALL}, ""),
        ({}, {"shared_bytes": SHARED_BYTES_OF_ALL + 1}, "101377 bytes of shared memory, above"),
        ({"max_shared_bytes": 227 * 1024}, {"shared_bytes": 200 * 1024}, ""),
    ],
)
def test_use_beyond_a_specs_limits_is_reported(limits, usage, expected):
    found = complaint(_spec(**limits), Compiled("", "", 90, **usage))
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_instructions_are_counted_with_and_without_modifiers():
    sass = """
        /*0010*/                   LDG.E.128.CONSTANT R4, [R2.64] ;     /* 0x0000 */
        /*0020*/              @!P0 LDG.E R8, [R2.64] ;
        /*0030*/             @!UP0 HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0040*/                   STL [R1], R4 ;
        /*0050*/                   IADD3 R4, R4, R5, RZ ;
    """
    assert count_instructions(sass) == {"LDG.E.128": 1, "LDG": 2, "HMMA": 1, "STL": 1}
