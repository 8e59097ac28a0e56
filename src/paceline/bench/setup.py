"""A policy to measure, and requests that run as long as asked.

The policy is a folder's weights, or random ones in a named shape.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.config import Config, ConfigError
from paceline.device import prepare_device
from paceline.drafting.factory import DrafterFactory
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.reservation import RESERVED_STEPS
from paceline.engine.rows import MAX_QUERY
from paceline.models.source import BUILTIN_POLICIES, policy_dtype, policy_folder
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.policy.shapes import SHAPES
from paceline.policy.tokenizer import load_tokenizer
from paceline.tasks import make_task
from paceline.types import Request, SamplingParams


def bench_policy(model: str, device: torch.device) -> Decoder:
    """Loads a folder's weights, or makes random ones in a named shape."""
    dtype = bench_dtype(device)
    if model in SHAPES:
        return Decoder(SHAPES[model], dtype, device).initialise(0)
    return load_policy(_model_folder(model), dtype, device)


def bench_shape(model: str) -> DecoderConfig:
    """Returns a named shape, or that of a folder."""
    return SHAPES[model] if model in SHAPES else read_config(_model_folder(model))


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


def recipe_shape(config: Config, device: torch.device) -> tuple[DecoderConfig, torch.dtype]:
    """Returns shape and type of a recipe's policy, whose path may name a shape instead of a folder."""
    path = config.policy.path
    dtype = policy_dtype(config.policy, device)
    if path in SHAPES:
        return SHAPES[path], dtype
    try:
        return read_config(policy_folder(path)), dtype
    except ConfigError as error:
        raise ConfigError(f"{error}; shapes that can be measured by name: {', '.join(SHAPES)}") from None


def recipe_policy(config: Config) -> tuple[Decoder, list[tuple[int, ...]]]:
    """Returns the recipe's policy, and its task's training prompts."""
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    task = make_task(config.task, load_tokenizer(folder), folder)
    prompts = [task.prompts.encode(problem) for problem in task.train]
    task.close()
    return load_policy(folder, policy_dtype(config.policy, device), device), prompts


def recipe_tokenizer(config: Config) -> Tokenizer:
    """Returns the tokenizer of the recipe's policy."""
    return load_tokenizer(policy_folder(config.policy.path))


def recipe_engine(
    config: Config,
    policy: Decoder,
    requests: list[Request],
    max_running: int,
    drafter: str = "none",
    verify: str = "shared-noise",
) -> Engine:
    """Returns an engine whose KV pool holds the longest of the requests in every row."""
    longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests) + 2
    reserved = RESERVED_STEPS * (MAX_QUERY + 1)  # ahead of each row, for the deepest drafts
    rollout = config.rollout
    settings = EngineSettings(
        max_running,
        max_running * (longest + reserved),
        max_length=longest,
        deterministic=rollout.deterministic,
        verify=verify,
        trees=rollout.speculation.shape == "tree",
        precision=rollout.precision,
        base_precision_layers=rollout.base_precision_layers,
        kv_scales_per_head=rollout.kv_scales == "head",
    )
    drafters = []
    if drafter != "none":
        factory = DrafterFactory(config.rollout.speculation, recipe_tokenizer(config))
        drafters = [factory.make(drafter, policy)]
    return Engine(policy, settings, drafters=drafters)


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
