"""A replica's eagle head, trained in the replica's idle time: implements `backend.SliceTrainer`.

    the engine's own steps ──states of accepted tokens──▶ examples ──▶ updates of a copy of the head
                                                                                    │ weights()
    the head that drafts ◀──publish── the run's process ◀──mean over replicas───────┘

The states are those that this replica's verification and prefill computed anyway. A *term* is one rollout of
the run: all replicas begin it from what was published last, each with its own optimiser's moments, and
learn from the texts that they finished in it, each once. Weights travel in the masters' type: what a term
teaches may be less than bf16 can hold.
"""

from collections.abc import Callable, Mapping

import torch

from paceline.config import Config
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.examples import Example
from paceline.drafting.head_learner import HeadLearner
from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Decoder
from paceline.policy.states import StateRecording, TextStates

# Bytes of the devices of all replicas together, to record states of running rows.
RECORD_BYTES = 64_000_000


class ReplicaTrainer:
    """Trains a copy of the head that drafts in this process; never that one itself."""

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: Config,
        recording: StateRecording,
        warn: Callable[[str], None],
    ) -> None:
        self.learner = HeadLearner(policy, head, config.rollout.speculation.online, config.run.seed, warn)
        self.temperature = config.rollout.temperature or 1.0  # as `training_sequence` has it
        self.recording = recording
        recording.record_states(record_bytes(config))
        self.tokens = 0.0  # learned from in this term
        self.updates = 0
        self.overlap = 0.0  # that updates saw, in all
        self._published: dict[str, torch.Tensor] = self.weights()
        self._term: int | None = None

    def take_head(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Keeps the published weights, which terms begin from."""
        self._published = dict(weights)

    def note_weights(self, version: int) -> None:
        """Called before a weight update: states of the old weights teach nothing any more."""
        self.recording.take_states()

    def begin(self, term: int) -> None:
        """Begins to train from what was published; resumes where the same term was stopped."""
        if term != self._term:
            self._term = term
            self.tokens, self.updates, self.overlap = 0.0, 0, 0.0
            self.learner.restart(self._published, moments=True)
        examples = [self._example(text, states) for text, states in self.recording.take_states().items()]
        self.learner.plan(f"{term}/{self.updates}", examples)

    def slice(self, should_stop: Callable[[], bool]) -> bool:
        """Trains until `should_stop`, asked every few launches; returns whether anything is left."""
        for report in self.learner.learn(should_stop):
            self.tokens += report.tokens
            self.updates += 1
            self.overlap += report.mean_overlap
        return bool(self.learner.work)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns copies of this term's weights so far, on the host."""
        masters = self.learner.trainer.optimiser.masters()
        return {name: master.detach().to("cpu", copy=True) for name, master in masters.items()}

    def _example(self, text: tuple[int, ...], states: TextStates) -> Example:
        response = len(states.hidden_RE)
        sequence = TrainingSequence(
            text,
            len(text) - response,
            (True,) * response,  # a turn's observations are another request's prompt
            (0.0,) * response,
            advantage=0.0,
            temperature=self.temperature,
        )
        return Example(sequence, states)


def record_bytes(config: Config) -> int:
    """Returns the bytes of a replica's device that recorded states may take."""
    return RECORD_BYTES // max(1, config.cluster.replicas)
