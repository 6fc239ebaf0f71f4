# Shared by the other scripts: finds Python, makes .venv, installs into it what is missing.
#
# A stamp in .venv holds a checksum of what was installed from, so that a second run starts at once.
# torch goes first and by an exact version: asked for by name alone, pip brings the CUDA build.

say() { printf 'quire: %s\n' "$*" >&2; }
die() { printf 'quire: error: %s\n' "$*" >&2; exit 1; }

now() { date +%s; }
# say_time WORDS SINCE: says how long a stage took that began at SINCE, as `now` has it.
say_time() { say "$1 in $(($(now) - $2)) s"; }

ROOT=$(cd "$(dirname "$0")/.." && pwd)
VENV=$ROOT/.venv

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Sets PYTHON: that of .venv, or else one of PATH.
find_python() {
    for candidate in "$VENV/bin/python" python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 && is_recent "$candidate"; then
            PYTHON=$candidate
            return
        fi
    done
    found=$(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null || true)
    [ -n "$found" ] || die "no python3 here; on Debian: apt-get install python3 python3-venv"
    die "Python 3.11 or newer is needed, but python3 is $found; put a newer one first on PATH" \
        "(Debian 12 brings 3.11)"
}

make_venv() {
    if [ -x "$VENV/bin/python" ] && is_recent "$VENV/bin/python"; then
        # A venv that another tool made may lack pip.
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >&2
        return
    fi
    find_python
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        die "this Python can't make a virtual environment; on Debian: apt-get install python3-venv"
    say "making .venv with $("$PYTHON" --version)"
    made_since=$(now)
    "$PYTHON" -m venv --clear "$VENV"
    say_time "made .venv" "$made_since"
}

# Options of pip that `ensure_installed` sets.
no_compile=

pip_install() {
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --root-user-action=ignore \
        $no_compile "$@"
}

pip_locked() {
    pip_install -c "$ROOT/constraints.txt" -c "$ROOT/requirements.lock" "$@"
}

has_gpu() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null 2>&1; }

# Whether the torch that pip would take is a CUDA build. Reads its metadata only: without a recent
# pip and fast-deps, a dry run downloads the whole wheel (half a GB).
offers_only_cuda() {
    pip_install --upgrade pip
    pip_install --dry-run --no-deps --use-feature=fast-deps --report - "torch==$1" |
        "$VENV/bin/python" -c '
import json, sys
report = sys.stdin.read() or sys.exit(1)
needs = json.loads(report)["install"][0]["metadata"].get("requires_dist", [])
sys.exit(not any(need.startswith(("nvidia-", "cuda-")) for need in needs))'
}

install_torch() {
    version=$(sed -n 's/^torch==//p' "$ROOT/constraints.txt")
    installed=$("$VENV/bin/python" -c '
from importlib import metadata
print(metadata.version("torch").partition("+")[0])' 2>/dev/null || true)
    [ "$installed" != "$version" ] || return 0
    say "installing torch $version"
    if [ "$(uname -s)" = Linux ] && ! has_gpu; then
        if pip_install "torch==$version+cpu" 2>/dev/null; then return; fi
        if offers_only_cuda "$version"; then
            say "note: pip finds only the CUDA build of torch $version here (several GB), and this" \
                "machine has no GPU; to take the small CPU build instead, stop this (Ctrl-C), let" \
                "pip find PyTorch's CPU wheels (PIP_EXTRA_INDEX_URL; pytorch.org/get-started has" \
                "the address), and run this again"
        fi
    fi
    pip_install "torch==$version"
}

checksum() {
    { printf '%s\n' "$ROOT" && cd "$ROOT" && cat pyproject.toml requirements.lock constraints.txt; } |
        cksum
}

NATIVE=$ROOT/src/quire/kernels/cpu

NATIVE_STAMP=$ROOT/build/native.sum

# The option of build.py that says which kernels are compiled: for this processor only. A script's
# `--all-isas` makes it empty, and its `--for-tests` replaces it. A library of either kind that is
# there, even of other sources, is built as that kind again.
isas=--own-isa
case $(cat "$NATIVE_STAMP" 2>/dev/null) in
*" tests") isas=--for-tests ;;
"" | *" "*) ;;
*) isas= ;;
esac

# The digest of the present sources. Behind it stands the instruction set if only this processor's is
# compiled, or "tests" for a library that is compiled for tests.
native_digest() { "$PYTHON" -I "$NATIVE/build.py" --digest $isas; }

# Needs only Python's standard library and a compiler. Object files are kept, so that only what
# changed is compiled anew.
compile_native() {
    "$PYTHON" -I "$NATIVE/build.py" --objects "$ROOT/build/native" $isas \
        ${CXX:+--compiler "$CXX"} "$@" >&2
}

# Whether the native kernels were built from the sources as they are now.
has_native() {
    find_python
    native_sum=$(native_digest)
    [ -e "$NATIVE/_native.so" ] && [ "$(cat "$NATIVE_STAMP" 2>/dev/null)" = "$native_sum" ]
}

# The native kernels, built from the sources as they are now. Returns 1 where that can't be done.
ensure_native() {
    if has_native; then return; fi
    say "building the native kernels"
    native_since=$(now)
    compile_native || return 1
    printf '%s\n' "$native_sum" >"$NATIVE_STAMP"
    say_time "built the native kernels" "$native_since"
}

# ensure runtime|dev: after it, .venv has quire and what it (or its development) needs. The kernels
# are compiled while packages are fetched and installed.
ensure() {
    if ! has_native; then
        ensure_native &
        building=$!
    fi
    ensure_installed "$1"
    await_native
}

# The build of the kernels that `ensure` has started and that goes on.
building=

await_native() {
    [ -n "$building" ] || return 0
    wait "$building" || say "note: without the native kernels torch computes, which is slower"
    building=
}

# install_dependencies EXTRAS: what quire needs, while the kernels are compiled.
install_dependencies() {
    wanted=$(mktemp)
    "$VENV/bin/python" - "$ROOT/pyproject.toml" "$1" >"$wanted" <<'END'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
more = project["optional-dependencies"]["dev"] if sys.argv[2] else []
print(*project["dependencies"], *more, sep="\n")
END
    pip_locked -r "$wanted"
    rm -f "$wanted"
}

ensure_installed() {
    sum=$(checksum)
    for kind in "$1" dev; do
        if [ -x "$VENV/bin/quire" ] && [ "$(cat "$VENV/.quire-$kind" 2>/dev/null)" = "$sum" ]; then
            return
        fi
    done
    make_venv
    # For development, a module is compiled when it is first imported: most of 18,000 never are, and
    # to compile all takes a minute.
    [ "$1" = runtime ] || no_compile=--no-compile
    torch_since=$(now)
    install_torch
    say_time "installed torch" "$torch_since"
    say "installing quire and what it needs ($1)"
    packages_since=$(now)
    extras=
    [ "$1" = runtime ] || extras="[dev]"
    pip_locked hatchling
    install_dependencies "$extras"
    say_time "installed what quire needs" "$packages_since"
    # The packaging hook would compile the same files at the same time.
    await_native
    quire_since=$(now)
    pip_locked --no-build-isolation -e "$ROOT$extras"
    say_time "installed quire" "$quire_since"
    printf '%s\n' "$sum" >"$VENV/.quire-$1"
}
