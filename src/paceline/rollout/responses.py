"""What a policy wrote, for a drafter to learn from or to be measured on: generated now, or saved by `paceline
rollout --save`.
"""

from pathlib import Path

from paceline.rollout.samples import read_groups
from paceline.rollout.sources import SavedRollouts
from paceline.session import Session
from paceline.tasks.order import ProblemOrder
from paceline.types import Completion, Group, Purpose, SamplingParams


def training_responses(session: Session, count: int) -> list[Completion]:
    """`count` responses to the task's training problems, as a run would sample them."""
    rollout, order = session.config.rollout, ProblemOrder(session.task.train, session.config.run.seed)
    responses: list[Completion] = []
    step = 0
    while len(responses) < count:
        step += 1
        problems = order.take(
            min(rollout.prompts_per_step, -(-(count - len(responses)) // rollout.samples_per_prompt))
        )
        groups = session.sampler.sample(
            problems, Purpose.TRAIN, step, rollout.samples_per_prompt, session.train_sampling()
        )
        responses += _completions(groups)
    return responses[:count]


def held_out_responses(session: Session, problems: int, temperature: float) -> list[Completion]:
    """One response to each of the first held-out problems."""
    sampling = SamplingParams(temperature, session.config.eval.max_tokens)
    return _completions(
        session.sampler.sample(session.task.held_out[:problems], Purpose.EVAL, 0, 1, sampling)
    )


def saved_responses(folder: Path) -> list[Completion]:
    return [
        completion for file in SavedRollouts(folder).files for completion in _completions(read_groups(file))
    ]


def _completions(groups: list[Group]) -> list[Completion]:
    return [sample.completion for group in groups for sample in group.samples if sample.completion.tokens]
