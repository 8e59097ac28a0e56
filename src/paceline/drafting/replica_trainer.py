"""A replica's eagle head, trained in the replica's idle time: implements `backend.SliceTrainer`.

    the engine's own steps ──states of accepted tokens──▶ buffer ──▶ slices ──▶ a copy of the head
                                                                                    │ weights()
    the head that drafts ◀──publish── the run's process ◀──mean over replicas───────┘

The states are those that this replica's verification and prefill computed anyway; a text without them is not
learned from, since a pass of the policy takes more than milliseconds. A *term* is one rollout of the run: all
replicas begin it from the mean of the last one's weights, whether that drafts or not yet, each with its
own optimiser's moments. Weights travel in the masters' type: what a term teaches may be less than bf16 can
hold.
"""

from collections.abc import Callable, Mapping

import torch

from paceline.config import Config
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.examples import Example
from paceline.drafting.judging import COMPARED_PASSAGES
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.publishing import snapshot
from paceline.drafting.run_drafter import Recording, record_bytes
from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates

# Updates over which the learning rate rises: a term may have no more of them.
WARMUP_UPDATES = 4


class ReplicaTrainer:
    """Trains a copy of the head that drafts in this process; never that one itself."""

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: Config,
        recording: Recording,
        warn: Callable[[str], None],
    ) -> None:
        """Makes `recording`, the engine's speculation, record states; call before anything is generated."""
        own = config.rollout.speculation.online
        # The run's process decides when; in the time that it is given, a replica learns.
        own = own.model_copy(update={"when": "always", "buffer_gb": own.buffer_gb / config.cluster.replicas})
        self.online = OnlineDrafter(policy, head, own, config.run.seed, warn, warmup=WARMUP_UPDATES)
        self.online.learning.gives_up = True
        self.temperature = config.rollout.temperature or 1.0  # as `training_sequence` has it
        self.recording = recording
        recording.record_states(record_bytes(config))
        self.tokens = 0.0  # learned from in this term
        self.updates = 0
        self._compared = -(-COMPARED_PASSAGES // config.cluster.replicas)  # its share
        self._published: Mapping[str, torch.Tensor] = snapshot(head)
        self._term: int | None = None
        self._version = 0  # of the policy's weights
        self._planned = False

    def take_head(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Keeps the published weights, which terms begin from unless they are given others."""
        self._published = dict(weights)

    def note_weights(self, version: int) -> None:
        """Called before a weight update: stores what was recorded, as states of the old weights."""
        self._take_in()
        self._version = version

    def begin(self, term: int, start: Mapping[str, torch.Tensor] | None = None) -> None:
        """Begins to train from `start`, or what was published; resumes where the same term was stopped."""
        if term != self._term:
            self._term = term
            self.tokens, self.updates = 0.0, 0
            self.online.learning.abandon()
            self.online.trainer.optimiser.load_masters(self._published if start is None else start)
            self.online.take_metrics()
        self._planned = bool(self.online.learning.work)

    def slice(self, should_stop: Callable[[], bool]) -> bool:
        """Trains until `should_stop`, asked every few launches; returns whether anything is left."""
        if not self._planned:
            self._plan()
        for report in self.online.slices(should_stop, idle=True):
            if report is not None:
                self.tokens += report.tokens
                self.updates += 1
        return bool(self.online.learning.work)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns copies of this term's weights so far, on the host."""
        masters = self.online.trainer.optimiser.masters()
        return {name: master.detach().to("cpu", copy=True) for name, master in masters.items()}

    def quality(self, weights: Mapping[str, torch.Tensor]) -> float | None:
        """Returns how well a head of these weights drafts along this replica's texts; None: it has none.

        Texts of the policy as it is now: a head that is judged may have learned from older ones.
        """
        self._take_in()
        if not any(example.step == self._version for example in self.online.buffer):
            return None
        return self.online.judge.quality_of(self.online.head, weights, self._compared)

    def _plan(self) -> None:
        """Plans the term's work: of a resumed term, only what has come since."""
        fresh = self._take_in()
        tokens = self.online.config.tokens - int(self.tokens)
        kept = {id(example) for example in self.online.buffer}
        examples = [e for e in fresh if id(e) in kept] if self.updates else self.online.buffer.longest(tokens)
        self.online.plan(f"{self._term}/{self.updates}", examples, tokens)
        self._planned = True

    def _take_in(self) -> list[Example]:
        """Moves what the engine has recorded into the buffer; returns it as examples."""
        fresh = [self._example(text, states) for text, states in self.recording.take_states().items()]
        buffer = self.online.buffer
        buffer.add(self._version, [*(e for e in buffer if e.step == self._version), *fresh])
        buffer.drop_without_states()
        return fresh

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
        return Example(sequence, self._version, self._version, states)
