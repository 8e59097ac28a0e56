"""`python -m tests.length_reward ARGS...`: the command line with a reward that an untrained policy can
earn.
"""

from paceline.tasks.running_sums import RunningSums
from paceline.types import Score


def pay_for_length(self, problem, response: str, truncated: bool) -> Score:
    return Score(
        len(response) / 24, correct=len(response) % 2 == 0, components={"length": len(response) / 24}
    )


if __name__ == "__main__":
    from paceline.cli.main import main

    RunningSums.score = pay_for_length
    main()
