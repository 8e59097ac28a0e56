"""The Python API: `paceline.train(config)` and `paceline.load(folder)`."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.config import Config, ConfigError, load_config, parse_config
from paceline.config.arguments import as_texts
from paceline.device import best_device, prepare_torch
from paceline.engine.engine import Engine
from paceline.engine.settings import EngineSettings
from paceline.loop import Result
from paceline.loop import train as run_training
from paceline.models.source import policy_dtype, policy_folder
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.policy.tokenizer import load_tokenizer
from paceline.report.console import Console
from paceline.report.run_directory import RunDirectory
from paceline.types import Completion, Purpose, Request, SamplingParams, request_seed

MAX_RUNNING = 256  # requests that `Policy.generate` decodes together
MAX_KV_TOKENS = 1 << 20  # of its KV pool; requests beyond that wait


def train(config: Config | None = None, resume: str | Path | None = None, quiet: bool = True) -> Result:
    """Runs training; `result.summary` has accuracy before and after, and the run directory.

    `resume` continues a run directory, by its own recipe where `config` is None. A new run without a `config`
    uses the recipe `default`.
    """
    folder = Path(resume) if resume else None
    return run_training(_recipe(config, folder), resume=folder, console=Console(quiet=quiet))


def _recipe(config: Config | None, resume: Path | None) -> Config:
    if config is None:
        return load_config("default") if resume is None else RunDirectory.open(resume).config()
    if not isinstance(config, Config):
        shown = f"config = {config!r}" if isinstance(config, str) else f"config is a {type(config).__name__}"
        raise TypeError(
            f"{shown}: must be a Config, such as paceline.load_config('default', ['run.steps=5']); of a dict "
            "of sections, paceline.config.parse_config makes one"
        )
    return config


def load(folder: str | Path = "builtin", dtype: str = "auto", device: str = "auto") -> "Policy":
    """Returns a policy from a Hugging Face folder, a checkpoint's `policy/`, or a shipped one by name.

    `auto` is the current GPU in bfloat16, or the CPU in float32.
    """
    where = _device(device)
    config = parse_config({"policy": {"path": str(folder), "dtype": dtype}}).policy
    found = policy_folder(config.path)
    return Policy(load_policy(found, policy_dtype(config, where), where), load_tokenizer(found))


def _device(name: str) -> torch.device:
    if name == "auto":
        return best_device()
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):  # not a device name of torch
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: must be auto, cpu, cuda, or one of several GPUs as cuda:1")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= gpus:
        seen = f"torch sees {gpus} GPU{'s' if gpus > 1 else ''} here" if gpus else "torch sees no GPU here"
        raise ConfigError(
            f"device = {name!r}: {seen}; use device='auto' or 'cpu', and `paceline doctor` for the reason"
        )
    return device


class Policy:
    """A decoder with its tokenizer: enough to sample from a policy."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer

    def generate(
        self,
        prompts: Sequence[str],
        samples: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        max_tokens: int = 256,
    ) -> list[list[str]]:
        """Returns `samples` texts for each prompt; the same seed gives the same texts."""
        groups = self.complete(prompts, samples, seed, temperature, max_tokens)
        return [[self.tokenizer.decode(completion.tokens) for completion in group] for group in groups]

    def complete(
        self,
        prompts: Sequence[str],
        samples: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        max_tokens: int = 256,
    ) -> list[list[Completion]]:
        """Returns `samples` completions for each prompt, with tokens and logprobs, from the native engine."""
        prompts = as_texts("prompts", prompts)
        if not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples = {samples!r}: must be a whole number of at least 1")
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        requests = [
            Request(
                f"{p}/{s}",
                tuple(self.tokenizer.encode(text).ids),
                request_seed(Purpose.EVAL, seed, 0, text, p, s),
                sampling,
                group=str(p),
            )
            for p, text in enumerate(prompts)
            for s in range(samples)
        ]
        done = self._run(requests)
        return [[done[f"{p}/{s}"] for s in range(samples)] for p in range(len(prompts))]

    def _run(self, requests: Sequence[Request]) -> dict[str, Completion]:
        if not requests:
            return {}
        prepare_torch(self.decoder.device)
        running = min(MAX_RUNNING, len(requests))
        limit = self.decoder.config.max_positions
        longest = min(limit, max(len(r.prompt) + r.sampling.max_tokens for r in requests))
        # Room for every running request, and for the blocks that steps reserve ahead.
        kv_tokens = max(longest + 256, min(MAX_KV_TOKENS, running * (longest + 256)))
        engine = Engine(
            self.decoder, EngineSettings(max_running=running, kv_tokens=kv_tokens), self.tokenizer
        )
        engine.submit(requests)
        done = {completion.request.id: completion for completion in engine.completions()}
        engine.close()
        for completion in done.values():
            if completion.error:
                raise ValueError(f"prompt {completion.request.group}: {completion.error}")
        return done
