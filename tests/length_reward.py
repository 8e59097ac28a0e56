"""`python -m tests.length_reward ARGS...`: the command line with a reward that an untrained policy can
earn.

With TEST_HOLD=FILE a run waits, once it has written two lines of metrics, until there is such a file: what
happens to it then happens in the middle, however slow the watching test is.
"""

import os
import time
from pathlib import Path

from paceline.report.run_directory import RunDirectory
from paceline.tasks.running_sums import RunningSums
from paceline.types import Score


def pay_for_length(self, problem, response: str, truncated: bool) -> Score:
    return Score(
        len(response) / 24, correct=len(response) % 2 == 0, components={"length": len(response) / 24}
    )


def hold(file: Path) -> None:
    """Makes a run wait for a file after its second line of metrics."""
    append = RunDirectory.append_metrics
    lines = []

    def append_and_wait(self, record):
        append(self, record)
        lines.append(record)
        while len(lines) == 2 and not file.exists():
            time.sleep(0.01)

    RunDirectory.append_metrics = append_and_wait


if __name__ == "__main__":
    from paceline.cli.main import main

    RunningSums.score = pay_for_length
    if "TEST_HOLD" in os.environ:
        hold(Path(os.environ["TEST_HOLD"]))
    main()
