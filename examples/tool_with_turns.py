"""A tool that answers in the middle of a response: it fills in running sums.

    paceline train examples/tool_with_turns.yaml

The built-in policy answers `a9b8=` with `a9:9;b8:17;#17`. Here its turn ends at every colon, and the tool
says the sum so far:

    prompt         a9b8=
    response       a9:              the policy, until the stop string
    observation        9;           the tool: tokens outside the loss
    response             b8:
    observation             17;
    response                   #17  no colon: the last turn, which is what the reward sees
"""

import re
from collections.abc import Sequence

from paceline.tasks.base import Done, Observation, Problem, Turn

_ASKED = re.compile(r"[a-zA-Z](\d):\Z")


def running_sum(problem: Problem, conversation: Sequence[Turn]) -> Observation | Done:
    """Adds up the terms that the policy has named so far; anything else it says ends the conversation."""
    if not _ASKED.search(conversation[-1].text):
        return Done()
    asked = [_ASKED.search(turn.text) for turn in conversation if turn.sampled]
    return Observation(f"{sum(int(found.group(1)) for found in asked if found)};")
