"""Puts the parts of a run together from its configuration: device, policy, tokenizer, task, backend.

`train`, `eval` and `rollout` all start here, so they agree on what a recipe means.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.backend import Backend
from paceline.config import Config, ConfigError
from paceline.device import prepare_device
from paceline.engine.factory import cpu_kv_tokens, make_native
from paceline.engine.lengths import Lengths
from paceline.engine.reference import ReferenceBackend
from paceline.models.widen import load_widened, named_shape, widened_config
from paceline.plan.machine import gpu_at_hand
from paceline.plan.plan import Plan, make_plan
from paceline.plan.suggestions import refusal, suggestions
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder, not_finite
from paceline.policy.huggingface import DTYPES, load_policy
from paceline.policy.lora import add_adapters
from paceline.policy.tokenizer import load_tokenizer
from paceline.rollout.sampler import GroupSampler
from paceline.tasks import make_task
from paceline.tasks.task import Task
from paceline.types import SamplingParams

BUILTIN_POLICY = Path(__file__).parent / "assets" / "builtin"
BUILTIN_POLICIES = {"builtin": BUILTIN_POLICY, "builtin-moe": BUILTIN_POLICY.with_name("builtin-moe")}


@dataclass
class Session:
    config: Config
    device: torch.device
    policy_folder: Path
    policy: Decoder
    tokenizer: Tokenizer
    task: Task
    backend: Backend
    sampler: GroupSampler
    plan: Plan | None = None  # of a GPU's memory

    def train_sampling(self) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(temperature=rollout.temperature, max_tokens=rollout.max_tokens)

    @property
    def machine(self) -> str:
        """What step times depend on: precision is what rollouts run in now, which after a fall-back is not
        the recipe's.
        """
        device = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"cpu {platform.machine()} x{os.cpu_count()}"
        )
        rollout = self.config.rollout
        base_layers = (
            f" but for layers {rollout.base_precision_layers}" if rollout.base_precision_layers else ""
        )
        mode = (
            f"{self.backend.precision}{base_layers}, {'deterministic' if rollout.deterministic else 'fast'}"
        )
        return f"{device}, torch {torch.__version__}, {self.policy.dtype}, rollouts in {mode}, {self.policy.config}"

    @contextmanager
    def learning_memory(self, needed: bool = True) -> Iterator[None]:
        """Within, learning has the KV pool's memory where the plan needs it."""
        if self.plan is None or not self.plan.sleeps or not needed:
            yield
            return
        self.backend.sleep()
        try:
            yield
        finally:
            torch.cuda.empty_cache()  # what learning used must be free before the pool comes back
            self.backend.wake()

    def close(self) -> None:
        self.sampler.close()
        self.backend.close()


def open_session(config: Config, learns: bool = False) -> Session:
    """`learns`: memory is planned for training, not for generation alone."""
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    plan = plan_gpu(config, folder, device, learns)
    policy = open_policy(config, folder, device)
    _check_finite(policy, config.policy.path)
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora, config.run.seed)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(tokenizer, policy, config.policy.path)
    task = make_task(config.task, tokenizer, folder)
    backend = make_backend(policy, tokenizer, config, plan)
    sampler = GroupSampler(backend, task, tokenizer, config.run.seed)
    return Session(config, device, folder, policy, tokenizer, task, backend, sampler, plan)


def _check_finite(policy: Decoder, path: str) -> None:
    """Such a policy samples something, so that a run would end later, after updates that all failed."""
    harmed = not_finite(policy)
    if harmed:
        raise ConfigError(
            f"policy.path = {path!r}: {len(harmed)} parameters are not finite in {policy.dtype}, first {harmed[0]}; "
            "the folder is damaged or its training diverged: use another policy, or policy.dtype=float32 if it was saved in that"
        )


def _check_vocabulary(tokenizer: Tokenizer, policy: Decoder, path: str) -> None:
    largest, size = max(tokenizer.get_vocab().values(), default=-1), policy.config.vocab_size
    if largest >= size:
        raise ConfigError(
            f"policy.path = {path!r}: its tokenizer.json has tokens up to id {largest}, and the policy's vocabulary ends at {size - 1}; "
            "they do not belong together: use the tokenizer that the policy was trained with"
        )


def open_policy(config: Config, folder: Path, device: torch.device) -> Decoder:
    dtype = policy_dtype(config, device)
    if config.policy.widen:
        return load_widened(folder, config.policy.widen, dtype, device)
    return load_policy(folder, dtype, device)


def widened_from(config: Config) -> Path | None:
    return policy_folder(config.policy.path) if config.policy.widen else None


def plan_gpu(config: Config, folder: Path, device: torch.device, learns: bool) -> Plan | None:
    """Before anything is loaded: a run that cannot fit is refused here, with what would fit. None on a
    CPU.
    """
    machine = gpu_at_hand() if device.type == "cuda" else None
    if machine is None:
        return None
    shape, dtype = policy_shape(config, folder), policy_dtype(config, device)
    plan = make_plan(config, shape, dtype, machine, learns)
    if plan.problem:
        raise refusal(plan, suggestions(config, shape, dtype, machine, learns))
    return plan


def policy_shape(config: Config, folder: Path) -> DecoderConfig:
    """Of the policy that `open_policy` makes."""
    shape = read_config(folder)
    return widened_config(shape, named_shape(config.policy.widen)) if config.policy.widen else shape


def make_backend(policy: Decoder, tokenizer: Tokenizer, config: Config, plan: Plan | None = None) -> Backend:
    if config.rollout.backend == "reference":
        return ReferenceBackend(policy, config.rollout.max_running, tokenizer)
    kv_tokens = plan.kv_tokens if plan is not None else cpu_kv_tokens(policy, config)
    request_tokens = Lengths.of(config, policy.config).request
    return make_native(
        policy, config.rollout, kv_tokens, tokenizer, config.run.seed, widened_from(config), request_tokens
    )


def policy_folder(path: str) -> Path:
    folder = BUILTIN_POLICIES.get(path, Path(path))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"policy.path = {path!r}: {folder} is not a Hugging Face folder with a config.json; shipped are: {', '.join(BUILTIN_POLICIES)}"
        )
    return folder


def policy_dtype(config: Config, device: torch.device) -> torch.dtype:
    name = config.policy.dtype
    return DTYPES[("bfloat16" if device.type == "cuda" else "float32") if name == "auto" else name]
