"""Runs by its path with vLLM's own Python: makes Paceline, and nothing else of its environment, importable.

    python bootstrap.py SOCKET WEIGHTS MODULE:FUNCTION

A search path would not do: where Paceline is installed beside its own torch and transformers, they would
replace vLLM's. Processes that vLLM spawns run this file again as their main module, up to the last lines.
"""

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def make_importable() -> None:
    """Registers the package that this file lies in, whatever the search path holds."""
    # Python puts this file's own folder first, whose module names are too common to be found by others.
    own = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != own]
    spec = importlib.util.spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE.name] = package
    spec.loader.exec_module(package)


make_importable()

if __name__ == "__main__":
    from paceline.worker.__main__ import main

    main()
