"""The learner of one rank: what `Learner` offers, over shards.

Every method is called on all ranks at once, with the same arguments; where a rank raises or is lost, all
others raise `RanksLost`, and the ranks restart from the last checkpoint.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from paceline.config import Config, ConfigError
from paceline.learning.checkpoint import Fingerprint, TrainingState, read_state
from paceline.learning.distributed.export import whole_tensors
from paceline.learning.distributed.group import RankGroup
from paceline.learning.distributed.saving import collect_files, load_files, write_files
from paceline.learning.distributed.sharding import local
from paceline.learning.learner import Learner
from paceline.learning.mismatch import MismatchCheck
from paceline.policy.decoder import Decoder
from paceline.types import Group


class RankLearner:
    """Updates a policy that is sharded over all ranks of a group.

    `policy` is the whole policy, with adapters where the recipe has LoRA, the same on every rank, on the CPU
    or on the rank's GPU; it is sharded in place, and nothing but this object should use it afterwards.
    """

    def __init__(
        self,
        policy: Decoder,
        config: Config,
        group: RankGroup,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        check_ranks(config, group.count)
        self.group = group
        self.policy = policy
        with group.together("sharding the policy"):
            self.learner = Learner(policy, config, warn if group.rank == 0 else lambda message: None, group)

    def update(
        self, groups: Sequence[Group], check: MismatchCheck = lambda mismatch: None
    ) -> dict[str, float]:
        """Updates the policy from the step's groups; returns the same metrics on every rank.

        `check` is called on the first rank alone; if it raises, everything stays as it was, and the other
        ranks raise `DecidedElsewhere`.
        """
        with self.group.together("an update"):
            self._check_same(groups)
            return self.learner.update(groups, check)

    def exported_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors under their Hugging Face names, parameter by parameter, on every rank.

        All ranks must iterate to the end; a tensor is valid only until the next one.
        """
        with self.group.together("gathering weights"):
            yield from whole_tensors(self.policy)

    def not_finite(self) -> list[str]:
        """Returns the names of the parameters that hold infinities or NaN on any rank."""
        with self.group.together("looking for what is not finite"):
            own = [
                name
                for name, parameter in self.policy.named_parameters()
                if not local(parameter).isfinite().all()
            ]
            found = {name for text in self.group.texts(json.dumps(own)) for name in json.loads(text)}
            return sorted(found)

    def write(self, folder: Path, tokenizer_from: Path) -> dict[str, Fingerprint]:
        """Writes policy and optimiser into a checkpoint's folder that all ranks share.

        Returns the files' fingerprints for `write_checkpoint`, on every rank. Where a rank cannot write, the
        first one raises `NotWritten`, the others `DecidedElsewhere`, and all can continue.
        """
        with self.group.together("a checkpoint"), self.learner.weights.as_learned():
            files = collect_files(self.policy, self.learner.optimiser, self.group)
            return write_files(files, folder, tokenizer_from, self.group)

    def write_policy(self, folder: Path, tokenizer_from: Path) -> dict[str, Fingerprint]:
        """Writes a Hugging Face folder, with LoRA of the merged model, as `write` does."""
        with self.group.together("a Hugging Face folder"), self.learner.weights.as_learned():
            files = collect_files(self.policy, None, self.group)
            return write_files(files, folder, tokenizer_from, self.group)

    def load(self, checkpoint: Path) -> TrainingState:
        """Restores policy and optimiser from a checkpoint of any number of ranks; returns its counters."""
        with self.group.together("opening a checkpoint"):
            state = read_state(checkpoint)
            load_files(checkpoint, self.policy, self.learner.optimiser, state.optimiser_steps, self.group)
            self.learner.weights.round()
            return state

    def stop_rounding(self) -> None:
        """Called when rollouts have fallen back, on every rank."""
        with self.group.together("leaving FP8"):
            self.learner.weights.stop()

    def _check_same(self, groups: Sequence[Group]) -> None:
        digests = self.group.texts(_digest(groups))
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise ValueError(
                f"ranks {different} of {self.group.count} were given other samples than rank 0: "
                "an update takes the whole step's groups, the same on every rank"
            )


def _digest(groups: Sequence[Group]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for sample in (sample for group in groups for sample in group.samples):
        completion = sample.completion
        head = (completion.request.id, len(completion.request.prompt), len(completion.tokens), sample.score)
        digest.update(repr(head).encode())
        digest.update(array("q", completion.request.prompt + completion.tokens).tobytes())
        digest.update(array("d", completion.logprobs).tobytes())
    return digest.hexdigest()


def check_ranks(config: Config, count: int) -> None:
    """Raises where a recipe needs what several ranks cannot do."""
    learning = config.learning
    if count > 1 and learning.optimiser_state == "8bit":
        raise ConfigError(
            f"learning.optimiser_state = 8bit: its groups of 128 numbers do not follow the shards of {count} "
            "learner ranks; use device or host, each rank keeps only its share"
        )
