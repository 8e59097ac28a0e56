"""`paceline bench learn`: updates by tokens per second, share of the peak, memory and where the time goes.

The policy has random weights in a named shape or those of a folder; responses are random tokens of given
lengths, each group of them to one prompt, with made-up rewards and the logprobs of a uniform policy. What is
timed is `Learner.update`, from groups to new weights, or with `learning.algorithm=sft` a step of `paceline
sft` on the same sequences, with everything the host does in it.

    MFU = (6 x parameters x tokens + attention) / seconds / peak
    attention = 6 x layers x heads x head dimension x sum of squared lengths    (causal, all passes)

Parameters are those a token passes (the experts chosen for it), embeddings once. With LoRA it is the same
formula, as if everything were trained.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from paceline.bench.learn_parts import LearnProfile, profile_update
from paceline.bench.spread import Spread
from paceline.config import Config
from paceline.learning.balance import active_parameters
from paceline.learning.batch import TrainingSequence
from paceline.learning.learner import Learner
from paceline.learning.supervised import imitate, supervised_sequence
from paceline.plan.learning import learner_bytes, meta_policy, policy_bytes
from paceline.plan.machine import gpu_at_hand
from paceline.plan.plan import usable_bytes
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.lora import add_adapters
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score, Segment

# Dense bf16 products by the vendor's datasheets, in operations per second.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


@dataclass(frozen=True)
class LearnWorkload:
    """What is learned from: `samples` responses to each prompt, all of given lengths in tokens."""

    prompt_tokens: int
    samples: int
    response_lengths: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """The length of every sequence, its prompt included."""
        return [self.prompt_tokens + length for length in self.response_lengths]

    def groups(self, vocab_size: int, seed: int = 0) -> list[Group]:
        """Returns groups of random tokens and rewards, the same ones for a seed."""
        rng = random.Random(seed)
        lengths = iter(self.response_lengths)
        groups = []
        for number in range(len(self.response_lengths) // self.samples):
            prompt = _random_tokens(rng, self.prompt_tokens, vocab_size)
            members = [
                _sample(rng, prompt, next(lengths), vocab_size, f"{number}/{i}") for i in range(self.samples)
            ]
            groups.append(Group(str(number), tuple(members)))
        return groups


def _random_tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))


def _sample(rng: random.Random, prompt: tuple[int, ...], length: int, vocab_size: int, name: str) -> Sample:
    request = Request(name, prompt, rng.getrandbits(62), SamplingParams(max_tokens=length))
    tokens = _random_tokens(rng, length, vocab_size)
    logprobs = (-math.log(vocab_size),) * length
    completion = Completion(request, tokens, logprobs, FinishReason.LENGTH, (Segment(0, length, 0),))
    return Sample(completion, Score(rng.random(), correct=False))


@dataclass(frozen=True)
class LearnPoint:
    """What updates took; sizes in bytes."""

    tokens: int  # prompts included
    sequences: int
    longest: int
    seconds: Spread
    first_seconds: float  # of the first update, which compiles kernels
    operations: float  # by the formula above
    mfu: float | None  # None: the device's peak is not known
    peak_bytes: int  # allocated by torch
    recomputed: str  # by the backward pass
    profile: LearnProfile

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds.median

    def record(self) -> dict:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def bench_learn(learner: Learner, groups: Sequence[Group], repeats: int) -> LearnPoint:
    """Times updates from the same groups after a first one, then profiles one more."""
    update: Callable[[], object] = partial(learner.update, groups)
    if learner.config.algorithm == "sft":
        update = partial(imitate, learner, _sequences(groups))
    shape = learner.policy.config
    device = learner.policy.device
    lengths = [
        len(sample.completion.request.prompt) + len(sample.completion.tokens)
        for group in groups
        for sample in group.samples
    ]
    first = _timed(update, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = Spread.of([_timed(update, device) for _ in range(repeats)])
    operations = model_operations(shape, lengths)
    peak = _device_peak(device)
    return LearnPoint(
        tokens=sum(lengths),
        sequences=len(lengths),
        longest=max(lengths),
        seconds=seconds,
        first_seconds=first,
        operations=operations,
        mfu=operations / seconds.median / peak if peak else None,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        recomputed=str(learner.policy.recompute),
        profile=profile_update(update, device),
    )


def make_learner(policy: Decoder, config: Config) -> Learner:
    """Returns a learner for the policy, which recomputes what the current GPU's plan asks for."""
    machine = gpu_at_hand() if policy.device.type == "cuda" else None
    if machine is not None:
        planned = meta_policy(policy.config, config, policy.dtype)
        held = policy_bytes(planned)
        room = usable_bytes(machine) - held.weights - held.base_copies - held.adapters
        # `gpu_at_hand` counts what torch already holds as free.
        policy.recompute = learner_bytes(planned, config, config.learning.micro_batch_tokens, room).recompute
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora, config.run.seed)
    return Learner(policy, config)


def model_operations(shape: DecoderConfig, lengths: Sequence[int]) -> float:
    """Returns the operations of forward and backward by the formula above."""
    attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * sum(n * n for n in lengths)
    return 6 * active_parameters(shape) * sum(lengths) + attention


def _device_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def _sequences(groups: Sequence[Group]) -> list[TrainingSequence]:
    completions = [sample.completion for group in groups for sample in group.samples]
    return [
        supervised_sequence(
            completion.request.prompt + completion.tokens,
            [False] * len(completion.request.prompt) + [True] * len(completion.tokens),
        )
        for completion in completions
    ]


def _timed(update: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    update()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
