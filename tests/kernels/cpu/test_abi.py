"""Structures, enumerations and functions of Python's side against the compiler's and the headers.

The compiler is asked where fields lie; what functions take is read from `csrc/library/api.h`.
"""

import ctypes
import re
import subprocess
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from quire.kernels.cpu import abi, build, experts_abi, library, mixture
from quire.kernels.cpu.adapters import adapters_abi
from quire.kernels.cpu.states import state_abi
from quire.kernels.routing import Scoring

STRUCTURES = [
    value
    for value in (
        *vars(abi).values(),
        *vars(state_abi).values(),
        *vars(experts_abi).values(),
        *vars(adapters_abi).values(),
    )
    if isinstance(value, type) and issubclass(value, ctypes.Structure)
]
ENUMERATIONS = {
    "DType": "k",
    "WeightLayout": "k",
    "Epilogue": "k",
    "OpKind": "kOp",
    "ActivationKind": "kAct",
}
"""Name -> what its members' names begin with in C++."""

C_NAMES = {("Op", "input"): "in"}
"""Fields that Python can't name as C++ does."""

KINDS = {
    c_int32: "i4",
    c_int64: "i8",
    c_uint64: "u8",
    c_float: "f4",
    c_double: "f8",
    c_void_p: "p8",
}

HEADERS = ("abi", "program", "state_abi", "experts_abi", "adapters_abi")

PROGRAM = """
#include <cstddef>
#include <cstdio>
#include <type_traits>
#include "library/abi.h"
#include "library/adapters_abi.h"
#include "library/experts_abi.h"
#include "library/program.h"
#include "library/state_abi.h"
using namespace quire;
template <typename T> const char* kind() {
  return std::is_pointer_v<T> ? "p" : std::is_floating_point_v<T> ? "f"
       : std::is_signed_v<T> ? "i" : "u";
}
int main() {
%s
}
"""


def c_field(structure: type[ctypes.Structure], name: str) -> str:
    return C_NAMES.get((structure.__name__, name), name)


def members(enumeration: type[IntEnum], prefix: str) -> dict[str, int]:
    """C++ name, in small letters -> value."""
    return {
        f"{prefix}{name.replace('_', '')}".lower(): value.value
        for name, value in enumeration.__members__.items()
    }


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the compiler says, in the words of `python_layout`."""
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    lines = []
    for structure in STRUCTURES:
        name = structure.__name__
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in structure._fields_:
            c_name = c_field(structure, field)
            lines.append(
                f'printf("{name}.{field} %zu %s%zu\\n", offsetof({name}, {c_name}),'
                f" kind<decltype({name}::{c_name})>(), sizeof({name}::{c_name}));"
            )
    folder = tmp_path_factory.mktemp("abi")
    source, program = folder / "layout.cpp", folder / "layout"
    source.write_text(PROGRAM % "\n".join(lines))
    include = f"-I{build.SOURCES}"
    subprocess.run([compiler, "-std=c++20", include, source, "-o", program], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(line.split(" ", 1) for line in output.splitlines())


def python_layout(structure: type[ctypes.Structure]) -> dict[str, str]:
    """`Structure` -> size; `Structure.field` -> offset, kind and size."""
    name = structure.__name__
    found = {name: str(ctypes.sizeof(structure))}
    for field, kind in structure._fields_:
        found[f"{name}.{field}"] = f"{getattr(structure, field).offset} {KINDS[kind]}"
    return found


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.__name__)
def test_fields_lie_where_the_compiler_puts_them(
    structure: type[ctypes.Structure], layout: dict[str, str]
) -> None:
    expected = {
        name: place for name, place in layout.items() if name.split(".")[0] == structure.__name__
    }
    assert python_layout(structure) == expected


def header(*names: str) -> str:
    """The headers without their comments."""
    text = "\n".join((build.SOURCES / name).read_text() for name in names)
    return re.sub(r"//[^\n]*", "", text)


def test_no_field_of_the_headers_is_missing() -> None:
    found = {
        name: re.findall(r"\b(\w+);", body)
        for name, body in re.findall(
            r"struct (\w+) \{(.*?)\};", header(*(f"library/{name}.h" for name in HEADERS)), re.S
        )
    }
    assert found == {
        structure.__name__: [c_field(structure, field) for field, _ in structure._fields_]
        for structure in STRUCTURES
    }


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_enumerations_have_the_same_values(name: str) -> None:
    body = re.search(
        rf"enum {name} : int32_t \{{(.*?)\}}", header("library/abi.h", "library/program.h"), re.S
    )
    assert body is not None
    values = {key.lower(): int(value) for key, value in re.findall(r"(\w+) = (\d+)", body[1])}
    assert members(getattr(abi, name), ENUMERATIONS[name]) == values


def test_scorings_have_the_same_values() -> None:
    body = re.search(r"enum Scoring : int32_t \{(.*?)\}", header("library/experts_abi.h"), re.S)
    assert body is not None
    values = {key.lower(): int(value) for key, value in re.findall(r"(\w+) = (\d+)", body[1])}
    assert values == {
        f"k{scoring.name.replace('_', '')}".lower(): value
        for scoring, value in mixture._SCORINGS.items()
    }
    assert mixture._SCORINGS.keys() == set(Scoring)


def test_formats_of_kv_have_the_same_values() -> None:
    assert re.findall(r"k(\w+)KV = (\d+)", header("library/abi.h")) == [
        (form.name.capitalize(), str(form.value)) for form in abi.KVLayout
    ]


def c_kind(declaration: str) -> str:
    """`const float* x` -> "pointer", `int64_t ld` -> "int64_t"."""
    return "pointer" if "*" in declaration else declaration.split()[0]


def ctypes_kind(kind: Any) -> str:
    names = {c_int32: "int32_t", c_int64: "int64_t", c_float: "float", None: "void"}
    is_pointer = kind in (c_void_p, c_char_p) or (
        kind is not None and issubclass(kind, ctypes._Pointer)
    )
    return "pointer" if is_pointer else names[kind]


def test_functions_are_called_as_they_are_declared() -> None:
    declared = {
        name: (c_kind(result), [c_kind(part) for part in arguments.split(",") if part.strip()])
        for result, name, arguments in re.findall(
            r"^(\w[\w *]*?)\b(quire_\w+)\((.*?)\);", header("library/api.h"), re.S | re.M
        )
    }
    called = {
        name: (ctypes_kind(result), [ctypes_kind(kind) for kind in arguments])
        for name, (result, arguments) in library._SIGNATURES.items()
    }
    assert called == declared
    assert len(declared) > 15


def test_the_version_is_the_headers() -> None:
    found = re.search(
        r"#define QUIRE_ABI_VERSION (\d+)", (build.SOURCES / "library/api.h").read_text()
    )
    assert found is not None
    assert int(found[1]) == abi.ABI_VERSION


def test_tables_and_prototypes_of_the_kernels_agree() -> None:
    """A kernel that `kernels.h` lists, and no other, is declared for each instruction set."""
    listed = re.findall(r"void \(\*(\w+)\)\(", header("library/kernels.h"))
    declared = re.findall(r"^void (\w+)\(", header("kernels_isa.h"), re.M)
    table = re.findall(r"QUIRE_ISA::(\w+),", Path(build.SOURCES / "table.cpp").read_text())
    assert listed == declared == table
