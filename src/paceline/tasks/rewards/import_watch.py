"""Notices when a reward imports modules in the middle of a call, so that its time limit can wait.

Packages that import lazily do so in the first call of every new worker; counted against the limit, it would
kill one worker after the other.
"""

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any


class ImportWatch:
    """Calls `changed(True)` when this process's main thread begins to import, `changed(False)` when it ends.

    Every import of a module that is not loaded yet goes through `importlib._bootstrap._find_and_load`, both
    from the interpreter's import statement and from `importlib.import_module`.
    """

    def __init__(self, changed: Callable[[bool], None]) -> None:
        self.changed = changed
        self.pid = os.getpid()
        self.depth = 0

    def install(self) -> None:
        """Starts watching; a no-op where this Python imports in another way."""
        bootstrap = getattr(importlib, "_bootstrap", None)
        find_and_load = getattr(bootstrap, "_find_and_load", None)
        if bootstrap is None or find_and_load is None:
            return

        def watched(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread() or os.getpid() != self.pid:
                return find_and_load(*arguments)
            self.depth += 1
            try:
                if self.depth == 1:
                    self.changed(True)
                return find_and_load(*arguments)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.changed(False)

        bootstrap._find_and_load = watched
