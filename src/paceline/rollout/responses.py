"""What a policy wrote, for a drafter to learn from or to be measured on: sampled now, or saved earlier."""

from pathlib import Path

from paceline.config import Config
from paceline.rollout.sampler import GroupSampler
from paceline.rollout.samples import read_groups
from paceline.rollout.sources import SavedRollouts, training_params
from paceline.tasks.order import ProblemOrder
from paceline.types import Completion, Group, Purpose, SamplingParams


def training_responses(sampler: GroupSampler, config: Config, count: int) -> list[Completion]:
    """Samples `count` responses to the task's training problems, as a run would."""
    rollout = config.rollout
    order = ProblemOrder(sampler.task.train, config.run.seed)
    responses: list[Completion] = []
    step = 0
    while len(responses) < count:
        step += 1
        missing = -(-(count - len(responses)) // rollout.samples_per_prompt)
        problems = order.take(min(rollout.prompts_per_step, missing))
        groups = sampler.sample(
            problems, Purpose.TRAIN, step, rollout.samples_per_prompt, training_params(rollout)
        )
        responses += _completions(groups)
    return responses[:count]


def held_out_responses(
    sampler: GroupSampler, config: Config, problems: int, temperature: float
) -> list[Completion]:
    """Samples one response to each of the first held-out problems."""
    sampling = SamplingParams(temperature, config.eval.max_tokens)
    return _completions(sampler.sample(sampler.task.held_out[:problems], Purpose.EVAL, 0, 1, sampling))


def saved_responses(folder: Path) -> list[Completion]:
    """Returns the responses that `paceline rollout --save` wrote to a folder."""
    completions = [
        completion for file in SavedRollouts(folder).files for completion in _completions(read_groups(file))
    ]
    if not completions:
        raise ValueError(f"{folder} holds no response with a token to learn from")
    return completions


def _completions(groups: list[Group]) -> list[Completion]:
    return [sample.completion for group in groups for sample in group.samples if sample.completion.tokens]
