"""Takes the policy's states along chosen texts out of the learner's own forward pass: no second one."""

from collections.abc import Sequence

from paceline.drafting.examples import Example
from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Capture
from paceline.policy.states import TextCapture, TextPlace, TextStates


class StateTap:
    """Receives the learner's micro-batches (`Learner.capture_states`) and keeps the states of some texts.

    Of several passes over a text the first one counts: it is the one before the update. States stay on the
    learner's device.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.chosen: dict[tuple[int, ...], TrainingSequence] = {}
        self.found: dict[tuple[int, ...], TextStates] = {}

    def choose(self, sequences: Sequence[TrainingSequence]) -> None:
        """Sets the texts whose states are wanted from now on, in place of all others."""
        self.chosen = {sequence.tokens: sequence for sequence in sequences}
        self.found = {}

    def watch(self, sequences: Sequence[TrainingSequence]) -> Capture | None:
        """Returns the capture of a pass over these sequences, packed in this order, or None."""
        places: dict[tuple[int, ...], TextPlace] = {}
        start = 0
        for sequence in sequences:
            if sequence.tokens in self.chosen and sequence.tokens not in self.found:
                places[sequence.tokens] = TextPlace(sequence.tokens, start, sequence.prompt_length)
            start += len(sequence.tokens)
        return TextCapture(self.layers, [*places.values()], self.found) if places else None

    def take(self) -> list[Example]:
        """Returns the chosen texts that a pass left states for; none are wanted any more."""
        examples = [
            Example(text, self.found[tokens]) for tokens, text in self.chosen.items() if tokens in self.found
        ]
        self.choose([])
        return examples
