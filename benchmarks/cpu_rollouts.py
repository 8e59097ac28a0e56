"""CPU seconds of a recipe's rollouts under different settings of speculation, in turn on the same requests.

    python benchmarks/cpu_rollouts.py runs/RUN/checkpoints/best --rollouts 14 --warm 6

Every setting has a session of its own, and all of them sample the same problems with the same seeds, one
rollout after the other, so that whatever else the machine does meets all of them. The first rollouts let
pacers and histories learn and are not counted. Reported are the sum of CPU seconds, policy steps, and the
ratio of plain decoding's seconds to these: all rollouts, and the lowest and highest of one.
"""

import argparse
import time

from paceline.config import load_config
from paceline.session import open_session
from paceline.tasks.order import ProblemOrder
from paceline.types import Purpose

KEY = "rollout.speculation"
SETTINGS = {
    "plain": [f"{KEY}.drafters=[]"],
    "history:3, fixed": [f"{KEY}.drafters=[history]", f"{KEY}.pacing=fixed", f"{KEY}.tokens=3"],
    "history:7, fixed": [f"{KEY}.drafters=[history]", f"{KEY}.pacing=fixed", f"{KEY}.tokens=7"],
    "eagle:5, fixed": [f"{KEY}.drafters=[eagle]", f"{KEY}.pacing=fixed", f"{KEY}.tokens=5"],
    "adaptive": [],
    "adaptive, history": [f"{KEY}.drafters=[history]"],
}


class Setting:
    """One way to roll out, with what it took by rollout."""

    def __init__(self, recipe: str, policy: str, overrides: list[str]) -> None:
        config = load_config(recipe, [f"policy.path={policy}", "run.device=cpu", *overrides])
        self.session = open_session(config)
        self.order = ProblemOrder(self.session.task.train, config.run.seed)
        self.seconds: list[float] = []
        self.steps: list[int] = []

    def roll_out(self, step: int) -> list[list[int]]:
        """Samples the next step's responses and returns their tokens."""
        rollout = self.session.config.rollout
        problems = self.order.take(rollout.prompts_per_step)
        start = time.process_time()
        groups = self.session.sampler.sample(
            problems, Purpose.TRAIN, step, rollout.samples_per_prompt, self.session.train_sampling()
        )
        self.seconds.append(time.process_time() - start)
        self.steps.append(len(self.session.sampler.take_stats().running))
        return [sample.completion.tokens for group in groups for sample in group.samples]


def main() -> None:
    """Rolls out and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--rollouts", type=int, default=14)
    parser.add_argument("--warm", type=int, default=6)
    arguments = parser.parse_args()
    settings = {
        name: Setting(arguments.recipe, arguments.policy, overrides) for name, overrides in SETTINGS.items()
    }
    for step in range(1, arguments.rollouts + 1):
        tokens = [setting.roll_out(step) for setting in settings.values()]
        assert all(own == tokens[0] for own in tokens), f"rollout {step}: tokens differ"
    print("| setting | CPU s | steps | times as fast as plain | by rollout |")
    print("|---|---|---|---|---|")
    warm = arguments.warm
    plain = settings["plain"].seconds[warm:]
    for name, setting in settings.items():
        seconds = setting.seconds[warm:]
        ratios = [own / other for own, other in zip(plain, seconds, strict=True)]
        print(
            f"| {name} | {sum(seconds):.1f} | {sum(setting.steps[warm:])} | {sum(plain) / sum(seconds):.2f}x "
            f"| {min(ratios):.2f} to {max(ratios):.2f}x |"
        )
        setting.session.close()


if __name__ == "__main__":
    main()
