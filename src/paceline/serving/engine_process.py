"""The engine's process: makes the engine of a recipe and runs it for the server that started it."""

import os
import socket
import sys
import time

import yaml

from paceline.config import Config, parse_config
from paceline.device import prepare_device
from paceline.engine.engine import Engine
from paceline.engine.factory import CPU_KV_BYTES, cpu_kv_tokens, make_engine
from paceline.kernels.fp8_format import E4M3
from paceline.models.source import policy_dtype, policy_folder
from paceline.paged.cache import BLOCK_SIZE, token_bytes
from paceline.policy.config import read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.policy.lora import add_adapters
from paceline.policy.tokenizer import load_tokenizer
from paceline.serving.engine_host import EngineHost
from paceline.serving.frames import FrameReader, Message, pack
from paceline.session import plan_gpu


def main(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        engine = open_engine(parse_config(yaml.safe_load(_first_message(connection)["recipe"])))
    except (OSError, ValueError) as error:  # what the user can put right
        connection.sendall(pack({"failed": str(error)}))
        return
    EngineHost(engine, connection, description(engine)).run()
    # A server that was killed leaves steps and threads that nobody waits for.
    sys.stdout.flush()
    os._exit(0)


def open_engine(config: Config) -> Engine:
    """Returns the native engine of a recipe, for requests as long as the policy takes."""
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    config, plan = plan_gpu(config, read_config(folder), device, learns=False)
    policy = load_policy(folder, policy_dtype(config.policy, device), device)
    if config.policy.lora.path:
        add_adapters(policy, config.policy.lora, config.run.seed)
    kv_tokens = plan.kv_tokens if plan is not None else _cpu_kv_tokens(policy, config)
    return make_engine(
        policy,
        config.rollout,
        kv_tokens,
        load_tokenizer(folder),
        config.run.seed,
        min(policy.config.max_positions, kv_tokens),
        keeps_prefixes=True,
    )


def description(engine: Engine) -> Message:
    """Returns what a server needs to know of its engine."""
    shape = engine.policy.config
    return {
        "max_length": min(engine.max_length, (engine.pool.num_blocks - 1) * BLOCK_SIZE),
        "vocab_size": shape.vocab_size,
        "eos_token_ids": list(shape.eos_token_ids),
        "created": int(time.time()),
    }


def _cpu_kv_tokens(policy: Decoder, config: Config) -> int:
    """Returns the recipe's KV pool, or one for all rows at full length where that fits."""
    if config.rollout.kv_tokens:
        return cpu_kv_tokens(policy, config)
    shape = policy.config
    dtype = E4M3 if config.rollout.precision.fp8_kv else policy.dtype
    fits = CPU_KV_BYTES // token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    return min(fits, config.rollout.max_running * shape.max_positions)


def _first_message(connection: socket.socket) -> Message:
    frames = FrameReader()
    while data := connection.recv(1 << 16):
        if messages := frames.feed(data):
            return messages[0]
    raise SystemExit(0)  # the server has gone already
