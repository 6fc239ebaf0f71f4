"""Makes Triton's interpreter several times faster, with the same results.

Most of the interpreter's time goes into Python objects: it patches the language anew for every
launch, and each operation creates types and shapes that earlier operations have created. Here the
patches are kept, and each shape is created once. All changes apply only during interpreted
launches, so the compiler is unaffected.
"""

import builtins
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

core = tl.core

#: An object, the name of an attribute, its own value, and the value during launches.
Patch = tuple[Any, str, Any, Any]

#: Types of values that can't contain a constexpr, and so need no unwrapping.
_PLAIN = frozenset({bool, int, float, str, type(None), core.tensor, core.dtype, core.block_type})


class LaunchPatches:
    """The patches of Triton's language for interpreted launches."""

    def __init__(self, patch_language: Callable[[Any], Any], language: Any) -> None:
        """`patch_language` is the interpreter's function that patches the modules that `language`
        names."""
        scope = patch_language(language)
        try:
            #: All patches, in the order in which they are applied.
            self._patches: list[Patch] = [
                (target, name, own, getattr(target, name)) for target, name, own in scope._changes
            ]
        finally:
            scope.restore()
        self._patches += _cheaper_objects()
        #: Number of launches that are running, each inside the previous one.
        self._num_launches = 0

    def __enter__(self) -> None:
        self._num_launches += 1
        if self._num_launches == 1:
            for target, name, _, value in self._patches:
                setattr(target, name, value)

    def __exit__(self, *_: object) -> None:
        self._num_launches -= 1
        if self._num_launches == 0:
            for target, name, own, _ in reversed(self._patches):
                if own is interpreter._MISSING:
                    delattr(target, name)
                else:
                    setattr(target, name, own)

    def restore(self) -> None:
        """Do nothing: the interpreter calls this where it would undo its own patches."""


def patch_builtin(target: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """Replaces the interpreter's `_patch_attr`: calls the function inside a builtin directly."""
    function = getattr(member, "__wrapped__", member)  # without the check of its arguments
    semantic = interpreter.interpreter_semantic

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*arguments, **options)

    scope.set_attr(target, name, call)


def numpy_types() -> Callable[[Any], Any]:
    """Replaces `_get_np_dtype`, which makes a table of all types at each call."""
    find, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        if isinstance(dtype, core.pointer_type):
            return find(dtype)
        element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        if isinstance(element, core.pointer_type):
            return find(element)
        if element.name not in found:
            found[element.name] = find(element)
        return found[element.name]

    return get_np_dtype


def _cheaper_objects() -> Iterator[Patch]:
    """Patches that create each shape, and the values computed from it, only once."""
    # First, keep the language's own functions, and prepare caches of their results.
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    equal_tuples, init_block = core.tuple.__eq__, core.block_type.__init__
    blocks: dict[builtins.tuple[int, ...], builtins.tuple[Any, int, str]] = {}
    shapes: dict[builtins.tuple[int, ...], builtins.tuple[Any, Any]] = {}
    no_shape, one, true = core.tuple([]), core.constexpr(1), core.constexpr(True)

    # Then define the replacements: first comparisons and constants, then types and tensors.
    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in _PLAIN else unwrap(value)

    def is_same_type(self: Any, other: Any) -> Any:
        return self is other or equal(self, other)

    def are_same(self: Any, other: Any) -> Any:
        return true if self is other else equal_tuples(self, other)

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([unwrap_if_constexpr(size) for size in shape])
        known = blocks.get(sizes)
        if known is None:
            init_block(self, element_ty, shape)
            blocks[sizes] = (self.shape, self.numel, str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        if not kind.is_block():
            self.shape, self.numel = no_shape, one
            return
        sizes = tuple(kind.shape.values)
        if sizes not in shapes:
            wrapped = core.tuple([core.constexpr(size) for size in sizes])
            shapes[sizes] = (wrapped, core.constexpr(kind.numel))
        self.shape, self.numel = shapes[sizes]

    # Last, list the attribute that each function replaces.
    for target, name, value in (
        (core, "_unwrap_if_constexpr", unwrap_if_constexpr),
        (core.dtype, "__eq__", is_same_type),
        (core.tuple, "__eq__", are_same),
        (core.block_type, "__init__", make_block_type),
        (core.tensor, "__init__", make_tensor),
    ):
        yield target, name, getattr(target, name), value
