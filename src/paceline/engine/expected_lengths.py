"""Expected response lengths: the mean over the same prompt's, of siblings and of earlier epochs.

They only decide which request starts first (`rollout.admission: longest`), never what is sampled.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.types import Purpose, Request

# Prompts that are kept; the least recently seen one is dropped.
MAX_PROMPTS = 1 << 16
# Responses that a prompt's mean covers, roughly: lengths change as the policy learns.
MEMORY = 16


@dataclass
class _Mean:
    tokens: float = 0.0
    responses: int = 0

    def note(self, tokens: int) -> None:
        self.responses = min(self.responses + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self.responses


class ExpectedLengths:
    """Mean response lengths by prompt."""

    def __init__(self, max_prompts: int = MAX_PROMPTS) -> None:
        self.max_prompts = max_prompts
        self._by_prompt: OrderedDict[tuple[int, ...], _Mean] = OrderedDict()
        self._overall = _Mean()

    def note(self, request: Request, tokens: int) -> None:
        """Records the length of a finished response; evaluations are not recorded."""
        if request.purpose is not Purpose.TRAIN:
            return
        self._overall.note(tokens)
        self._by_prompt.setdefault(request.prompt, _Mean()).note(tokens)
        self._by_prompt.move_to_end(request.prompt)
        if len(self._by_prompt) > self.max_prompts:
            self._by_prompt.popitem(last=False)

    def of(self, request: Request) -> float:
        """Returns the expected response tokens.

        The request's own estimate comes first; an unknown prompt gets the mean over all prompts.
        """
        if request.expected_tokens:
            return float(request.expected_tokens)
        return self._by_prompt.get(request.prompt, self._overall).tokens

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the means as tensors, the least recently seen prompt first."""
        means = [self._overall, *self._by_prompt.values()]
        return {
            "prompts": torch.tensor([t for prompt in self._by_prompt for t in prompt], dtype=torch.int32),
            "lengths": torch.tensor([len(prompt) for prompt in self._by_prompt], dtype=torch.int32),
            "tokens": torch.tensor([mean.tokens for mean in means], dtype=torch.float64),
            "responses": torch.tensor([mean.responses for mean in means], dtype=torch.int32),
        }

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        means = [
            _Mean(tokens, responses)
            for tokens, responses in zip(
                tensors["tokens"].tolist(), tensors["responses"].tolist(), strict=True
            )
        ]
        prompts = tensors["prompts"].split(tensors["lengths"].tolist())
        self._overall = means[0]
        self._by_prompt = OrderedDict(
            (tuple(prompt.tolist()), mean) for prompt, mean in zip(prompts, means[1:], strict=True)
        )
