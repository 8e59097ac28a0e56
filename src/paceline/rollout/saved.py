"""A folder of saved samples to learn from, checked against the policy before the run begins.

`samples.py` has the file format.
"""

from dataclasses import dataclass
from pathlib import Path

from paceline.config import ConfigError
from paceline.rollout.samples import read_groups
from paceline.types import Group


@dataclass(frozen=True)
class SavedSamples:
    """The output of `paceline rollout --save`, for the policy that learns from it."""

    option: str  # that named the folder
    folder: Path
    policy: str  # `policy.path`
    vocab_size: int

    @property
    def files(self) -> list[Path]:
        """The folder's files, one per step; raises ConfigError where there are none."""
        files = sorted(self.folder.glob("step_*.jsonl"))
        if not files:
            raise ConfigError(
                f"{self.option} {self.folder}: it holds no step_*.jsonl; make some with "
                f"`paceline rollout --save {self.folder}`"
            )
        return files

    def read(self, file: Path) -> list[Group]:
        """Returns a file's groups; raises ConfigError where it has none, or of another vocabulary."""
        try:
            groups = read_groups(file)
        except ValueError as error:
            raise ConfigError(
                f"{self.option} {self.folder}: {error}; remove this file, or save them again with "
                "`paceline rollout --save`"
            ) from None
        largest = max(_largest_token(group) for group in groups)
        if largest >= self.vocab_size:
            raise ConfigError(
                f"{self.option} {self.folder}: {file} has token {largest}, and the vocabulary of "
                f"{self.policy!r} ends at {self.vocab_size - 1}; name the policy that wrote them "
                "(policy.path), or save samples of this one with `paceline rollout --save`"
            )
        return groups


def _largest_token(group: Group) -> int:
    completions = [sample.completion for sample in group.samples]
    return max((max((*c.request.prompt, *c.tokens), default=-1) for c in completions), default=-1)
