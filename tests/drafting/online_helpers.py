"""What tests of heads that learn during a run share: responses, states along them, heads, a spoiled one."""

import functools
from pathlib import Path

import torch

from paceline.config import OnlineDrafterConfig
from paceline.drafting.eagle_folder import load_eagle, save_eagle
from paceline.drafting.online import Accepted, OnlineHead
from paceline.engine.reference import ReferenceBackend
from paceline.learning.batch import pack
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.types import Completion, Group, Request, Sample, SamplingParams, Score

SMALL = [
    "run.device=cpu",
    "run.threads=1",
    "task.train_problems=8",
    "task.eval_problems=4",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=48",
    "eval.max_tokens=48",
    "eval.every=0",
    "report.closing_pairs=0",
    "rollout.speculation.drafters=[eagle]",
    "rollout.speculation.pacing=fixed",
    "rollout.speculation.tokens=3",
]


def groups_of(policy, count: int) -> list[Group]:
    """Responses that the policy itself wrote; it never changes, so they are generated once."""
    return [
        Group("sums", tuple(Sample(completion, Score(0.0, False)) for completion in written(policy, count)))
    ]


@functools.cache
def written(policy, count: int) -> list[Completion]:
    prompts = [(3 + i % 5, 9, 4, 8, 5, 7) for i in range(count)]
    requests = [
        Request(str(i), prompt, 1000 + i, SamplingParams(max_tokens=40, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    backend = ReferenceBackend(policy)
    backend.submit(requests)
    with torch.inference_mode():
        return list(backend.completions())


class Engines:
    """What heads are published to."""

    def __init__(self) -> None:
        self.published: list[dict[str, torch.Tensor]] = []

    def publish_drafter(self, version: int, weights) -> None:
        self.published.append({name: tensor.clone() for name, tensor in weights.items()})


def online(policy, head, said: list | None = None, trainers=None, rate: float | None = 1.0, **settings):
    """A head that makes `rate` updates a step from the first one on; None: as many as it measures."""
    config = OnlineDrafterConfig(**settings)
    warn = (said if said is not None else []).append
    made = OnlineHead(policy, head, config, 0, warn, Engines(), trainers)
    if made.learner is not None:
        made.learner.slicing.update_rows = 160
    if rate is not None:
        made.rate, made.measured = rate, 2
    return made


def accepted(mean: float, drafts: int = 5000) -> Accepted:
    return Accepted(mean, drafts, 5)


def follow(
    drafter: OnlineHead,
    step: int,
    groups: list[Group],
    drafts: Accepted | None = None,
    seconds: float = 1.0,
) -> dict[str, float]:
    """A step: the policy's pass over what the head asks for, then the head's turn."""
    drafter.expect(groups)
    if drafter.tap.chosen:
        policy = drafter.learner.policy
        sequences = list(drafter.tap.chosen.values())
        batch = pack(sequences, policy.device)
        with torch.no_grad():
            capture = drafter.tap.watch(sequences)
            policy(batch.tokens_T, batch.attention.positions_T, batch.attention, capture)
    return drafter.follow(step, drafts, seconds)


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def spoiled_head(folder: Path) -> Path:
    """Writes the built-in head with noise in its matrices: one that a few updates make better."""
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle("builtin-eagle", policy, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.6 * parameter.data.std() * noise
    save_eagle(head, folder)
    return folder
