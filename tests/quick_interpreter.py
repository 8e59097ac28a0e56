"""Makes Triton's interpreter quicker, with the same results.

Whenever one jitted function calls another, the interpreter goes through all names of the language to replace
the functions that need a builder, and for every value it writes down a table of types: together a third of
the time of interpreted kernels. Here each is done once.
"""

import functools
import inspect


def quicken() -> None:
    """Does what does not change once; where an interpreter is made otherwise, nothing."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not all(hasattr(interpreter, name) for name in ("_patch_attr", "_patch_builtin", "_get_np_dtype")):
        return
    is_builtin = interpreter.tl.core.is_builtin
    slow_type = interpreter._get_np_dtype
    types: dict = {}

    @functools.cache
    def builtins(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: object, *others: object) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if is_builtin(member):  # not replaced yet
                interpreter._patch_attr(package, name, member, *others)

    def numpy_type(dtype: object) -> object:
        name = dtype.scalar.name  # type: ignore[attr-defined]
        if name not in types:
            types[name] = slow_type(dtype)
        return types[name]

    language = interpreter.tl
    for package in (language, language.core, language.tensor, language.math):
        builtins(package)  # while nothing is replaced
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = numpy_type
