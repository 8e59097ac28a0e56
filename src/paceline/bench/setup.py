"""A policy to measure, and requests that run as long as asked.

The policy is a folder's weights, as they are or widened to a shape (`models/widen.py`), or random ones in a
named shape.
"""

import random
from pathlib import Path

import torch

from paceline.config import Config
from paceline.device import prepare_device
from paceline.drafting.factory import DrafterFactory
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.reservation import RESERVED_STEPS
from paceline.engine.rows import MAX_QUERY
from paceline.models.source import PolicySource, policy_dtype, policy_folder
from paceline.models.widen import load_widened
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.policy.shapes import SHAPES
from paceline.policy.tokenizer import load_tokenizer
from paceline.tasks import make_task
from paceline.types import Request, SamplingParams


def bench_policy(model: str, device: torch.device) -> Decoder:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if model in SHAPES:
        return Decoder(SHAPES[model], dtype, device).initialise(0)
    folder, _, wide = model.partition("@")
    if not Path(folder).is_dir():
        raise ValueError(
            f"--model {model!r} is neither a folder nor a named shape ({', '.join(SHAPES)}); FOLDER@SHAPE "
            "widens a folder"
        )
    if wide:
        return load_widened(folder, wide, dtype, device)
    return load_policy(model, dtype, device)


def recipe_policy(config: Config) -> tuple[Decoder, list[tuple[int, ...]]]:
    """The recipe's policy, and its task's training prompts."""
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    task = make_task(config.task, load_tokenizer(folder), folder)
    prompts = [task.prompts.encode(problem) for problem in task.train]
    task.close()
    return PolicySource.of(config.policy).load(policy_dtype(config.policy, device), device), prompts


def recipe_engine(
    config: Config,
    policy: Decoder,
    requests: list[Request],
    max_running: int,
    drafter: str = "none",
    verify: str = "shared-noise",
) -> Engine:
    """With room for the requests."""
    longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests) + 2
    room = max_running * (
        longest + RESERVED_STEPS * (MAX_QUERY + 1)
    )  # what is reserved ahead for the deepest drafts, too
    settings = EngineSettings(
        max_running, room, max_length=longest, deterministic=config.rollout.deterministic, verify=verify
    )
    drafters = []
    if drafter != "none":
        tokenizer = load_tokenizer(policy_folder(config.policy.path))
        factory = DrafterFactory(config.rollout.speculation, PolicySource.of(config.policy).heads, tokenizer)
        drafters = [factory.make(drafter, policy)]
    return Engine(policy, settings, drafters=drafters)


def recipe_requests(config: Config, prompts: list[tuple[int, ...]], count: int) -> list[Request]:
    """The prompts in order, over and over, each time with new seeds."""
    rng = random.Random(0)
    sampling = SamplingParams(temperature=config.rollout.temperature, max_tokens=config.rollout.max_tokens)
    return [Request(str(i), prompts[i % len(prompts)], rng.getrandbits(62), sampling) for i in range(count)]


def bench_requests(lengths: list[int], prompt_tokens: int, vocab_size: int, seed: int = 0) -> list[Request]:
    """One request per length, each with a prompt of its own, sampled at temperature 1 to exactly that
    length.
    """
    rng = random.Random(seed)
    requests = []
    for i, length in enumerate(lengths):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(prompt_tokens))
        requests.append(
            Request(str(i), prompt, rng.getrandbits(62), SamplingParams(max_tokens=length, ignore_eos=True))
        )
    return requests


def describe(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
    }
