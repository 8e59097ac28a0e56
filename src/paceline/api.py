"""The Python API: `paceline.train(config)` and `paceline.load(folder)`."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.config import Config, load_config
from paceline.engine.reference import ReferenceBackend
from paceline.loop import Result
from paceline.loop import train as run_training
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import DTYPES, load_policy
from paceline.policy.tokenizer import load_tokenizer
from paceline.report.console import Console
from paceline.session import policy_folder
from paceline.types import Completion, Purpose, Request, SamplingParams, request_seed


def train(config: Config | None = None, resume: str | Path | None = None, quiet: bool = True) -> Result:
    """Runs training; `result.summary` has accuracy before and after, and the run directory."""
    return run_training(
        config or load_config("default"),
        resume=Path(resume) if resume else None,
        console=Console(quiet=quiet),
    )


def load(folder: str | Path = "builtin", dtype: str = "float32") -> "Policy":
    """A policy from a Hugging Face folder, a checkpoint's `policy/`, or the built-in one."""
    path = policy_folder(str(folder))
    return Policy(load_policy(path, DTYPES[dtype]), load_tokenizer(path))


class Policy:
    """A decoder with its tokenizer: enough to look at what a policy writes."""

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
        """`samples` texts for each prompt; the same seed gives the same texts."""
        return [
            [self.tokenizer.decode(c.tokens) for c in group]
            for group in self.complete(prompts, samples, seed, temperature, max_tokens)
        ]

    def complete(
        self,
        prompts: Sequence[str],
        samples: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        max_tokens: int = 256,
    ) -> list[list[Completion]]:
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
        backend = ReferenceBackend(self.decoder)
        backend.submit(requests)
        with torch.inference_mode():
            done = {completion.request.id: completion for completion in backend.completions()}
        return [[done[f"{p}/{s}"] for s in range(samples)] for p in range(len(prompts))]
