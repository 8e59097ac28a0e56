"""A policy's responses, to train or measure a drafter on: sampled now, or saved earlier."""

from paceline.config import Config, ConfigError
from paceline.rollout.sampler import GroupSampler
from paceline.rollout.saved import SavedSamples
from paceline.rollout.sources import training_params
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
    sampling = SamplingParams(temperature, config.eval.max_tokens)
    return _completions(sampler.sample(sampler.task.held_out[:problems], Purpose.EVAL, 0, 1, sampling))


def saved_responses(samples: SavedSamples) -> list[Completion]:
    completions = [c for file in samples.files for c in _completions(samples.read(file))]
    if not completions:
        raise ConfigError(
            f"{samples.option} {samples.folder}: it holds no response with a token to learn from; save "
            "others with `paceline rollout --save`"
        )
    return completions


def _completions(groups: list[Group]) -> list[Completion]:
    return [sample.completion for group in groups for sample in group.samples if sample.completion.tokens]
