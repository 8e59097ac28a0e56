"""The texts of a step that a head may learn from, and the policy's states along them.

    responses ──the longest──▶ chosen ──▶ states out of the learner's own pass ──┐
                                          states that the engine recorded ───────┴──▶ examples ──▶ buffer

The learner's come first. A text that neither left states for is an example without.
"""

from collections.abc import Callable, Mapping, Sequence

from paceline.config import OnlineDrafterConfig
from paceline.drafting.examples import STEPS_KEPT, TOKEN_BYTES, Example, ExampleBuffer, longest_texts
from paceline.drafting.state_tap import StateTap
from paceline.learning.batch import TrainingSequence
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from paceline.types import Group

# Texts whose states are kept have so many times the tokens that are learned from, where the buffer holds
# them: passages of few texts are much alike.
SPREAD = 2
# The learner passes over texts, where these are more than so large a share of those that were chosen.
PASSED_OVER = 0.25


class StepTexts:
    """Chooses texts of a step, and returns them with the states that its passes left."""

    def __init__(
        self,
        policy: Decoder,
        captured_layers: tuple[int, ...],
        buffer: ExampleBuffer,
        config: OnlineDrafterConfig,
        warn: Callable[[str], None],
    ) -> None:
        self.buffer = buffer
        self.config = config
        self.warn = warn
        self.tap = StateTap(captured_layers, buffer.max_bytes // STEPS_KEPT)
        self.chosen: list[TrainingSequence] = []
        self.are_passed_over = True  # by the learner, as far as is known
        self._state_bytes = (len(captured_layers) + 1) * policy.config.hidden_size * policy.dtype.itemsize
        self._told_no_room = False

    def choose(self, groups: Sequence[Group], tokens: int, with_states: bool) -> None:
        """Chooses texts, so as to learn from so many response tokens; their states are wanted, or not."""
        self.chosen = longest_texts(groups, tokens, SPREAD * tokens, self._room)
        self.tap.choose(self.chosen if with_states else [])

    @property
    def _room(self) -> int:
        """Tokens of a step, prompts included, whose states fit the buffer beside as many of the last step."""
        return self.buffer.max_bytes // (STEPS_KEPT * (TOKEN_BYTES + self._state_bytes))

    @property
    def want_states(self) -> bool:
        """Whether the learner is asked for states along what was chosen."""
        return bool(self.tap.wanted)

    def take_in(self, step: int, recorded: Mapping[tuple[int, ...], TextStates]) -> list[Example]:
        """Moves what was chosen into the buffer, and returns it; the choice is reset.

        `recorded` are states that the engine kept.
        """
        asked, found = self.want_states, self.tap.take()
        chosen, self.chosen = self.chosen, []
        examples = [
            Example(text, step, step - 1, found.get(text.tokens) or _whole(recorded.get(text.tokens), text))
            for text in chosen
        ]
        if asked:
            missing = sum(text.tokens not in found for text in chosen)
            self.are_passed_over = missing > PASSED_OVER * len(chosen)
        self.buffer.add(step, examples)
        if examples and not len(self.buffer) and not self._told_no_room:
            self._told_no_room = True
            self._say_no_room(examples)
        return examples

    def _say_no_room(self, examples: Sequence[Example]) -> None:
        least = min(TOKEN_BYTES * len(example.sequence.tokens) for example in examples) / 1e9
        self.warn(
            f"rollout.speculation.online.buffer_gb = {self.config.buffer_gb:g} holds none of the step's "
            f"responses, so the eagle head learns nothing: the shortest one takes {least:.2g} without the "
            "policy's states, and far more with them; the default is 0.25"
        )


def _whole(states: TextStates | None, text: TrainingSequence) -> TextStates | None:
    """Returns the states if they cover all of a response; None otherwise.

    The engine takes what was sampled in an earlier step, or turn, for a part of the prompt.
    """
    return states if states is not None and len(states.hidden_RE) == len(text.loss_mask) else None
