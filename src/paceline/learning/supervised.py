"""Supervised fine-tuning on prompt and response pairs, with the learner's own packing and optimiser."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.config import LearningConfig
from paceline.learning.batch import TrainingSequence, micro_batches
from paceline.learning.logprobs import token_logprobs
from paceline.learning.optimiser import MasterAdamW
from paceline.policy.decoder import Decoder


@dataclass(frozen=True)
class Example:
    """A prompt and the response to imitate, as tokens."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]  # ends with the end token

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)


def train_supervised(
    policy: Decoder,
    batches: Iterable[list[Example]],
    total_steps: int,
    config: LearningConfig,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Trains the policy in place; the loss is the mean over a batch's response tokens.

    `batches` yields one optimiser step's examples at a time. They are packed into micro-batches by tokens, so
    that the longest example, not the batch, decides how much memory is needed. Weights below float32 are
    optimised through float32 masters, and `policy.recompute` is kept as it is.
    """
    optimiser = MasterAdamW(policy.named_parameters(), config, total_steps)
    for step, examples in enumerate(batches, start=1):
        sequences = [_sequence(example) for example in examples]
        total_tokens = sum(s.loss_tokens for s in sequences)
        step_loss = 0.0
        for batch in micro_batches(sequences, config.micro_batch_tokens, policy.device):
            logprobs_R, _ = token_logprobs(policy, batch)
            loss = -(logprobs_R * batch.mask_R).sum() / total_tokens
            loss.backward()
            step_loss += loss.item()
        optimiser.step()
        progress(step, step_loss)


def _sequence(example: Example) -> TrainingSequence:
    count = len(example.response)
    return TrainingSequence(
        tokens=example.prompt + example.response,
        prompt_length=len(example.prompt),
        loss_mask=(True,) * count,
        rollout_logprobs=(0.0,) * count,
        advantage=1.0,
        temperature=1.0,
    )
