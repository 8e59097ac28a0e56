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

from paceline.backends.base import Backend
from paceline.backends.native import make_native
from paceline.backends.reference import ReferenceBackend
from paceline.config import Config, ConfigError
from paceline.models.widen import load_widened
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import DTYPES, load_policy
from paceline.policy.lora import add_adapters
from paceline.policy.tokenizer import load_tokenizer
from paceline.rollout import GroupSampler
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

    def train_sampling(self) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(temperature=rollout.temperature, max_tokens=rollout.max_tokens)

    @property
    def machine(self) -> str:
        """What step times depend on."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"cpu {platform.machine()} x{os.cpu_count()}"
        return f"{device}, torch {torch.__version__}, {self.policy.dtype}, {self.policy.config}"

    def close(self) -> None:
        self.sampler.close()
        self.backend.close()


def open_session(config: Config) -> Session:
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    policy = open_policy(config, folder, device)
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora, config.run.seed)
    tokenizer = load_tokenizer(folder)
    task = make_task(config.task, tokenizer, folder)
    backend = make_backend(policy, tokenizer, config)
    sampler = GroupSampler(backend, task, tokenizer, config.run.seed)
    return Session(config, device, folder, policy, tokenizer, task, backend, sampler)


def open_policy(config: Config, folder: Path, device: torch.device) -> Decoder:
    dtype = policy_dtype(config, device)
    if config.policy.widen:
        return load_widened(folder, config.policy.widen, dtype, device)
    return load_policy(folder, dtype, device)


def make_backend(policy: Decoder, tokenizer: Tokenizer, config: Config) -> Backend:
    if config.rollout.backend == "reference":
        return ReferenceBackend(policy, config.rollout.max_running, tokenizer)
    longest_response = max(config.rollout.max_tokens, config.eval.max_tokens)
    return make_native(policy, config.rollout, longest_response, tokenizer, config.run.seed)


def prepare_device(config: Config) -> torch.device:
    wanted = config.run.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = 'cuda': torch sees no GPU here; use run.device=cpu, and `paceline doctor` for the reason")
    device = torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")
    torch.set_num_threads(1)  # a rollout's operations are too small to share; the learner asks for more
    if device.type == "cpu":
        # oneDNN packs the weight anew at every call, which costs more than it gains at the few rows of a rollout.
        torch.backends.mkldnn.enabled = False
    return device


@contextmanager
def learning_threads(config: Config) -> Iterator[None]:
    """Learning's matrices are worth all cores; everything else runs on one."""
    torch.set_num_threads(config.run.threads or os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(1)


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
