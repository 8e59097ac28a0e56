"""The client of a worker that runs vLLM: starts it in its own environment and checks what it does.

After every update the worker is asked for the logprobs of a probe text, and they are compared with the
learner's: weights that did not arrive, or arrived in the wrong place, end the run instead of spoiling it. A
drafter whose proposals are never accepted is reported.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.backend import Speculation
from paceline.cluster.capabilities import RemoteSpeculation
from paceline.cluster.pool import UNLIMITED, ReplicaPool
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import head_tensors
from paceline.drafting.eagle_head import EagleHead
from paceline.stats import RolloutStats
from paceline.types import Completion
from paceline.vllm_backend.settings import VllmSettings
from paceline.worker.client import Patience
from paceline.worker.process import Launch, WorkerFailed, WorkerProcess
from paceline.worker.readers import Weights
from paceline.worker.wire import Message

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")

# Mean difference of a probe token's logprob between vLLM and the learner that rounding explains, by type.
# SmolLM2-135M in bfloat16 differs from itself in float32 by 0.043.
PROBE_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 0.2}

# The same where vLLM multiplies in a narrower type than the policy's own.
QUANTISED_TOLERANCE = 0.5

# Drafts of a rollout after which one without any accepted token is no accident.
ENOUGH_DRAFTS = 50

# How a checkpoint names the head's tensors.
EAGLE = f"{EagleDrafter.name}."

# Left out of what vLLM's process inherits: settings of this environment's Python and of the learner's
# allocator, whose expandable segments do not go with the pool that vLLM sleeps with.
NOT_INHERITED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)

# Environment variables of its process, unless they are set already.
DEFAULT_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # policies are folders here
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # on a CPU it would pin itself to cores that others use
}


@dataclass(frozen=True)
class Probe:
    """A text and the learner's logprobs of it."""

    tokens: Sequence[int]
    logprobs: Callable[[Sequence[int]], list[float]]  # of all tokens but the first, by the learner
    tolerance: float


class VllmClient(ReplicaPool):
    """vLLM in a process of its own, as a `Backend`."""

    cure = (
        "With a full GPU, lower rollout.kv_tokens; rollout.vllm.engine has vLLM's options; without a cure, "
        "use rollout.backend=native"
    )

    def __init__(
        self,
        settings: VllmSettings,
        python: str,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        warn: Callable[[str], None] = lambda message: None,
        probe: Probe | None = None,
        head: EagleHead | None = None,
        patience: Patience | None = None,
        memory: Weights | None = None,
        see: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`head` is what vLLM drafts with, where this process may train it.

        `memory` is where weights lie that vLLM reads; by default a piece of the host's. `see` is shown every
        text that was written, prompt included.
        """
        self.settings = settings
        self.gives_memory = settings.sleeps
        self.probe = probe
        self.head = head
        self._see = see
        self.probed = 0.0  # mean difference of the last probe's logprobs
        self._changed_since_drafts = ""
        launch = vllm_launch(settings, python)
        super().__init__(launch, [WorkerProcess], UNLIMITED, weights, warn, patience, memory=memory)

    def completions(self) -> Iterator[Completion]:
        for completion in super().completions():
            if self._see is not None:
                self._see((*completion.request.prompt, *completion.tokens))
            yield completion

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Sends weights and compares vLLM's logprobs of a probe text with the learner's."""
        super().update_weights(version, weights)
        self._changed_since_drafts = f"the weights of version {version}"
        if self.probe is not None and weights is None:
            self._compare(self.probe, version)

    def text_logprobs(self, tokens: Sequence[int]) -> list[float]:
        answer = self.call(Message("text_logprobs", {"tokens": [int(token) for token in tokens]}))
        return [float(value) for value in answer.fields["logprobs"]]

    def take_stats(self) -> RolloutStats:
        stats = super().take_stats()
        for name, drafts in stats.drafts.items():
            if self._changed_since_drafts and drafts.drafts >= ENOUGH_DRAFTS:
                if not drafts.accepted:
                    self.warn(
                        f"none of {drafts.proposed} tokens that {name} proposed was accepted since "
                        f"{self._changed_since_drafts}: its weights are lost or belong to another policy"
                    )
                self._changed_since_drafts = ""
        return stats

    @property
    def speculation(self) -> Speculation | None:
        return VllmDrafting(self) if self.settings.draft is not None else None

    def note_published(self, version: int) -> None:
        self._changed_since_drafts = f"the head of version {version}"

    def _compare(self, probe: Probe, version: int) -> None:
        theirs = torch.tensor(self.text_logprobs(probe.tokens), dtype=torch.float64)
        ours = torch.tensor(probe.logprobs(probe.tokens), dtype=torch.float64)
        self.probed = float((theirs - ours).abs().mean())
        if not self.probed <= probe.tolerance:
            raise WorkerFailed(
                f"after the update to version {version} vLLM's logprobs of a probe text differ from the "
                f"learner's by {self.probed:.3g} on average (allowed: {probe.tolerance:g}): it does not "
                "generate with the learner's weights. Is the policy's family one that both compute alike?"
            )


@dataclass
class VllmDrafting(RemoteSpeculation):
    """vLLM's drafter; the head that is trained lies in this process, and is sent when it is published."""

    pool: VllmClient

    @property
    def trainable_head(self) -> nn.Module | None:
        """The head that a trainer copies; None where vLLM drafts without one."""
        return self.pool.head

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies weights into the head that lies here and sends it."""
        head = self.pool.head
        assert head is not None, "vLLM's drafter has no head to publish to"
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.copy_(weights[name])
        super().publish_drafter(version, head_tensors(head))
        self.pool.note_published(version)

    def drafter_state(self) -> dict[str, torch.Tensor]:
        """Returns the head as the native engine's checkpoints have it."""
        head = self.pool.head
        if head is None:
            return {}
        return {f"{EAGLE}{name}": tensor.to("cpu", copy=True) for name, tensor in head.state_dict().items()}

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads a head and publishes it."""
        own = {name.removeprefix(EAGLE): t for name, t in tensors.items() if name.startswith(EAGLE)}
        head = self.pool.head
        if own and head is not None:
            head.load_state_dict(own)
            self.publish_drafter(0, dict(head.named_parameters()))


def vllm_launch(settings: VllmSettings, python: str) -> Launch:
    """Returns how vLLM's process is started: by its own Python, which finds only Paceline of ours."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    if settings.engine.get("enforce_eager"):  # its sampler compiles functions of its own
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    return Launch(
        "paceline.vllm_backend.backend:hosted_backend",
        settings.dump(),
        command=(python, str(BOOTSTRAP)),
        environment=DEFAULT_ENVIRONMENT | environment,
    )
