"""Makes Triton's interpreter quicker, with the same results.

Whenever one jitted function calls another, the interpreter replaces the language's functions anew, though
they are replaced from the launch on, and for every value it writes down a table of types: here each is done
once. A reduction by a function of our own it makes element by element; here, as a GPU does, in a tree of
neighbours, which for a function that is associative, as it must be, gives the same.
"""

import numpy as np


def quicken() -> None:
    """Does so; where an interpreter is made otherwise, nothing."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype", "ReduceOps")):
        return
    _replace_language_once(interpreter)
    _look_types_up(interpreter)
    _reduce_in_a_tree(interpreter)


def _replace_language_once(interpreter) -> None:
    replace = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    seen: dict[object, frozenset] = {}  # by function, which of the languages its module names
    replaced: set = set()  # since the launch; empty between launches

    def patch_lang(function):
        if function not in seen:
            values = function.__globals__.values()
            seen[function] = frozenset(i for i, module in enumerate(languages) if _holds(values, module))
        if replaced and seen[function] <= replaced:
            return None
        launched = not replaced
        scope = replace(function)
        replaced.update(seen[function])
        if launched:
            restore = scope.restore

            def end_launch() -> None:
                replaced.clear()
                restore()

            scope.restore = end_launch
        return scope

    interpreter._patch_lang = patch_lang


def _holds(values, module) -> bool:
    return any(value is module for value in values)


def _look_types_up(interpreter) -> None:
    slow_type = interpreter._get_np_dtype
    types: dict[str, np.dtype] = {}

    def numpy_type(dtype):
        name = dtype.scalar.name
        if name not in types:
            types[name] = slow_type(dtype)
        return types[name]

    interpreter._get_np_dtype = numpy_type


def _reduce_in_a_tree(interpreter) -> None:
    one_by_one = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self, values):
        size = values[0].handle.data.shape[self.axis] if self.axis is not None else 0
        if size < 2 or size & (size - 1):
            return one_by_one(self, values)
        arrays = [value.handle.data for value in values]
        while size > 1:
            halves = [
                self.to_tensor(np.take(array, range(first, size, 2), self.axis), value.dtype)
                for first in (0, 1)
                for array, value in zip(arrays, values, strict=True)
            ]
            combined = self.combine_fn.fn(*halves)
            combined = combined if isinstance(combined, tuple) else (combined,)
            arrays = [tensor.handle.data for tensor in combined]
            size //= 2
        if not self.keep_dims:
            arrays = [array.squeeze(self.axis) for array in arrays]
        return [self.to_tensor(array, value.dtype) for array, value in zip(arrays, values, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce
