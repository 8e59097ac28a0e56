"""One step under torch's profiler: every operator and kernel, in a file that Perfetto opens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class StepProfiler:
    """Watches one step of a run, and none of the others; step 0 is none."""

    def __init__(
        self, step: int = 0, folder: Path | None = None, tell: Callable[[str], None] | None = None
    ) -> None:
        self.step = step
        self.folder = folder
        self.tell = tell

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Profiles what runs inside if it is the step to watch, and writes `step_N.json.gz`."""
        if not self.step or step != self.step or self.folder is None:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            yield
        self.folder.mkdir(exist_ok=True)
        out = self.folder / f"step_{step:06d}.json.gz"
        profile.export_chrome_trace(str(out))
        if self.tell is not None:
            self.tell(f"profile of step {step} written to {out}; open it in https://ui.perfetto.dev")
