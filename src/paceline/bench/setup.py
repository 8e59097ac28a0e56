"""A policy to measure, and requests of given lengths.

The policy is a folder's weights, or random ones in a named shape.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.config import Config
from paceline.device import prepare_device
from paceline.models.source import BUILTIN_POLICIES, policy_dtype, policy_folder
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.policy.shapes import SHAPES
from paceline.policy.tokenizer import load_tokenizer
from paceline.tasks import make_task
from paceline.types import Request, SamplingParams


def bench_policy(model: str, device: torch.device) -> Decoder:
    dtype = bench_dtype(device)
    if model in SHAPES:
        return Decoder(SHAPES[model], dtype, device).initialise(0)
    return load_policy(_model_folder(model), dtype, device)


def _model_folder(model: str) -> Path:
    folder = Path(BUILTIN_POLICIES.get(model, model))
    if not folder.is_dir():
        raise ValueError(f"--model {model!r} is neither a folder nor a named shape ({', '.join(SHAPES)})")
    return folder


def refuse_beyond_positions(shape: DecoderConfig, prompt_tokens: int, new_tokens: int, option: str) -> None:
    """Raises where a request would be longer than the policy allows, and so cut short.

    `option` is what asks for `new_tokens` on the command line.
    """
    if prompt_tokens + new_tokens > shape.max_positions:
        raise ValueError(
            f"{option}: {new_tokens} new tokens after --prompt {prompt_tokens} need "
            f"{prompt_tokens + new_tokens} positions, and this policy has {shape.max_positions}; ask for "
            "fewer, or measure another --model"
        )


def bench_dtype(device: torch.device) -> torch.dtype:
    """Returns the type that everything is measured in: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def recipe_policy(config: Config) -> tuple[Decoder, list[tuple[int, ...]]]:
    """Returns the recipe's policy, and its task's training prompts."""
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    task = make_task(config.task, load_tokenizer(folder), folder)
    prompts = [task.prompts.encode(problem) for problem in task.train]
    task.close()
    return load_policy(folder, policy_dtype(config.policy, device), device), prompts


def recipe_tokenizer(config: Config) -> Tokenizer:
    return load_tokenizer(policy_folder(config.policy.path))


def recipe_requests(config: Config, prompts: list[tuple[int, ...]], count: int) -> list[Request]:
    """Returns `count` requests: the prompts in order, over and over, each time with new seeds."""
    rng = random.Random(0)
    sampling = SamplingParams(temperature=config.rollout.temperature, max_tokens=config.rollout.max_tokens)
    return [Request(str(i), prompts[i % len(prompts)], rng.getrandbits(62), sampling) for i in range(count)]


def bench_requests(lengths: list[int], prompt_tokens: int, vocab_size: int, seed: int = 0) -> list[Request]:
    """Returns one request per length, each with a prompt of its own, sampled to exactly that length."""
    rng = random.Random(seed)
    requests = []
    for i, length in enumerate(lengths):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(prompt_tokens))
        requests.append(
            Request(str(i), prompt, rng.getrandbits(62), SamplingParams(max_tokens=length, ignore_eos=True))
        )
    return requests


def describe(device: torch.device) -> dict[str, str]:
    """Returns what figures depend on beside the model, for their JSON files."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "dtype": str(bench_dtype(device)).removeprefix("torch."),
    }
