"""Cuts a head's updates into slices that fit the memory, and packs them.

passages ──▶ updates of `update_rows` response tokens ──▶ slices of at most `slice_rows`, whose gradients
                                                          add up; the last one of an update moves the head
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.drafting.draft_attention import has_flash
from paceline.drafting.examples import Passage
from paceline.learning.batch import MicroBatch, TrainingSequence, pack
from paceline.policy.decoder import Decoder

# Response tokens of a passage and of an update at most, by device. On a GPU a few rows take as long
# as these: the time is that of launches.
PASSAGE_ROWS = {"cpu": 64, "cuda": 256, "meta": 256}
UPDATE_ROWS = {"cpu": 1024, "cuda": 4096, "meta": 4096}
# Tokens of a slice with all the text before them and padding; a longer text is a slice of its own.
SLICE_TOKENS = {"cpu": 2048, "cuda": 49152, "meta": 49152}
# The hidden size up to which these are meant: with a larger one a token takes more time and memory.
SLICE_HIDDEN = 2048
# On a GPU slices of ever new sizes took longer than the same one again (benchmarks/notes/heads.md). So they
# are filled up to one of so many sizes, in response tokens and in all tokens.
ROW_SIZES, TOKEN_SIZES = 4, 6


@dataclass(frozen=True)
class Slice:
    """Passages that go through the head together."""

    passages: list[Passage]
    ends_update: bool  # the update's last


class Slicing:
    """The sizes of slices on a policy's device, and how passages are cut to them."""

    def __init__(self, policy: Decoder, longest: int, shortest_prompt: int) -> None:
        """`longest`: positions of a text; a prompt of `shortest_prompt` tokens has a key to attend to."""
        self.device = policy.device
        device = policy.device.type
        share = max(1, policy.config.hidden_size // SLICE_HIDDEN)
        self.update_rows = UPDATE_ROWS[device]
        self.slice_rows = self.update_rows // share
        self.token_budget = SLICE_TOKENS[device] // share
        self.pads = not has_flash(device, policy.dtype)  # texts of a slice to the longest
        self.longest = longest
        self.shortest_prompt = shortest_prompt

    @property
    def passage_rows(self) -> int:
        return min(PASSAGE_ROWS[self.device.type], self.slice_rows)

    def halve(self) -> None:
        """Makes slices half as large, where memory ran out."""
        self.token_budget //= 2
        self.slice_rows = max(1, self.slice_rows // 2)

    def updates(self, passages: Sequence[Passage], most: int) -> list[Slice]:
        """Returns the slices of at most `most` updates; a small rest is left out."""
        updates: list[list[Passage]] = []
        rows = self.update_rows
        for passage in passages:
            if rows + passage.rows > self.update_rows:
                if len(updates) == most:
                    break
                updates.append([])
                rows = 0
            updates[-1].append(passage)
            rows += passage.rows
        if len(updates) > 1 and rows < self.update_rows // 2:
            updates.pop()
        cuts = [self.cut(update) for update in updates]
        return [Slice(part, part is parts[-1]) for parts in cuts for part in parts]

    def cut(self, passages: Sequence[Passage]) -> list[list[Passage]]:
        """Cuts passages, longest text first, into slices that fit, padded to the first where texts are."""
        parts: list[list[Passage]] = []
        rows = tokens = 0
        for passage in sorted(passages, key=lambda p: -p.length):
            longest = (parts[-1][0] if parts and self.pads else passage).length
            if not parts or tokens + longest > self.token_budget or rows + passage.rows > self.slice_rows:
                parts.append([])
                rows = tokens = 0
            parts[-1].append(passage)
            rows += passage.rows
            tokens += longest
        return parts

    def packed(self, passages: Sequence[Passage]) -> tuple[MicroBatch, torch.Tensor, list[torch.Tensor]]:
        """Returns the batch of passages, the last states that predict its responses, and captured ones."""
        sequences = [passage.sequence for passage in passages]
        filler = self._filler(sequences)
        batch = pack([*sequences, *filler], self.device)
        more_rows, more_tokens = sum(len(s.loss_mask) for s in filler), sum(len(s.tokens) for s in filler)
        states = [(passage, passage.example.states) for passage in passages]
        hidden = [s.hidden_RE[p.start : p.stop].to(self.device, non_blocking=True) for p, s in states]
        captured = [
            _joined(
                [s.captured_TE[layer][: p.length].to(self.device, non_blocking=True) for p, s in states],
                more_tokens,
            )
            for layer in range(len(states[0][1].captured_TE))
        ]
        return batch, _joined(hidden, more_rows), captured

    def _filler(self, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
        """Returns texts that nothing is learned from, with which a slice has one of few sizes.

        None where texts are padded anyway, and where they do not fit.
        """
        if self.pads:
            return []
        rows, tokens = sum(len(s.loss_mask) for s in sequences), sum(len(s.tokens) for s in sequences)
        more_rows = -rows % -(-self.slice_rows // ROW_SIZES)
        more_rows = min(more_rows, max(0, self.slice_rows - rows))
        # Prompts are so long that each query has a key to see, texts no longer than the policy's can be.
        prompt = self.shortest_prompt
        longest = self.longest - prompt
        least = more_rows + prompt * -(-more_rows // longest)
        more_tokens = least + -(tokens + least) % max(1, self.token_budget // TOKEN_SIZES)
        if tokens + more_tokens > self.token_budget:
            return []
        filler = []
        while more_tokens:
            taught = min(more_rows, longest)
            length = min(more_tokens, prompt + longest) if taught == more_rows else prompt + taught
            mask, logprobs = (False,) * taught, (0.0,) * taught
            filler.append(TrainingSequence((0,) * length, length - taught, mask, logprobs, 0.0, 1.0))
            more_rows, more_tokens = more_rows - taught, more_tokens - length
        return filler


def _joined(states: list[torch.Tensor], zeros: int) -> torch.Tensor:
    """Returns states one after the other, and so many of zeros."""
    return torch.cat([*states, states[0].new_zeros(zeros, states[0].shape[1])])
