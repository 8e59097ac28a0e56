"""Makes the vLLM client that a recipe asks for: its settings, the folders that vLLM opens, the probe."""

import random
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.config import Config, ConfigError, SpeculationConfig
from paceline.config.drafters import DRAFTERS, LEARNER
from paceline.drafting.eagle_folder import save_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.factory import make_drafter
from paceline.drafting.recipe import draft_model_folder, errors_name_recipe_key
from paceline.engine.factory import cpu_kv_tokens
from paceline.models.source import policy_folder
from paceline.policy.attention import PackedAttention
from paceline.policy.config import read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import ExportedWeights
from paceline.vllm_backend.cache_scales import SCALES, wants_scales
from paceline.vllm_backend.client import PROBE_TOLERANCE, QUANTISED_TOLERANCE, Probe, VllmClient
from paceline.vllm_backend.measured_scales import MeasuredScales
from paceline.vllm_backend.settings import DraftSettings, VllmSettings
from paceline.vllm_backend.versions import NoVllm, UnsupportedVersion, check_version, version_in
from paceline.worker.cuda_ipc import IpcWeights
from paceline.worker.readers import Weights

# Tokens of the text that is compared after each update.
PROBE_TOKENS = 48

# Options of vLLM's engine on a CPU, unless the recipe gives them: compiling takes minutes there.
CPU_OPTIONS = {"enforce_eager": True, "block_size": 32}

# Options of vLLM's engine that set how much memory it takes.
MEMORY_OPTIONS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}

# Tokens of a block of vLLM's KV cache at most, for counting what the cache must hold.
BLOCK = 32


def start_vllm(
    policy: Decoder, tokenizer: Tokenizer, config: Config, warn: Callable[[str], None]
) -> VllmClient:
    """Starts vLLM in its own environment and returns its client; it generates with the policy's weights."""
    rollout = config.rollout
    python = vllm_python(rollout.vllm.python)
    scratch = Path(tempfile.mkdtemp(prefix="paceline-vllm-"))
    head = make_head(policy, rollout.speculation)
    draft = draft_settings(policy, tokenizer, config, head, scratch)
    settings = vllm_settings(policy, config, draft)
    options = rollout.vllm.engine
    scales = MeasuredScales(policy, probe_text(policy)) if wants_scales(options) else None
    quantised = options.get("quantization") is not None or scales is not None
    tolerance = QUANTISED_TOLERANCE if quantised else PROBE_TOLERANCE[settings.dtype]
    probe = Probe(probe_text(policy), lambda tokens: learner_logprobs(policy, tokens), tolerance)
    exported = ExportedWeights(policy)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from exported.views().items()
        if scales is not None:
            yield SCALES, scales.measure()

    try:
        client = VllmClient(
            settings,
            str(python),
            weights,
            warn,
            probe,
            head=head,
            memory=_weights_memory(policy, config),
            see=None if scales is None else scales.see,
        )
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    weakref.finalize(client, shutil.rmtree, scratch, ignore_errors=True)
    client.update_weights(0)  # the folder's are those without the policy's adapters
    return client


def vllm_python(named: str) -> Path:
    """Returns the Python that a recipe names; raises ConfigError where it has no vLLM that is supported.

    One whose vLLM does not say its version is asked again when it runs.
    """
    python = Path(named).expanduser().absolute()
    problem = "" if python.is_file() else "there is no such file"
    try:
        version = "" if problem else version_in(str(python))
        if version:
            check_version(version)
    except UnsupportedVersion as error:
        raise ConfigError(f"rollout.vllm.python = {named!r}: {error}") from None
    except NoVllm as error:
        problem = str(error)
    if problem:
        raise ConfigError(
            f"rollout.vllm.python = {named!r}: {problem}; name the Python of an environment with vLLM, or "
            "make one with scripts/vllm_env.sh"
        )
    return python


def _weights_memory(policy: Decoder, config: Config) -> Weights | None:
    """Returns the learner's own GPU memory as vLLM's one rank maps it; None: it uses shared host memory."""
    on_gpu, transport = policy.device.type == "cuda", config.cluster.transport
    if transport == "ipc" and not on_gpu:
        raise ConfigError("cluster.transport = 'ipc' needs GPUs, this run has none; use transport=auto")
    if not on_gpu or config.rollout.vllm.ranks > 1 or transport == "memory":
        return None
    return IpcWeights()


def vllm_settings(policy: Decoder, config: Config, draft: DraftSettings | None) -> VllmSettings:
    rollout = config.rollout
    on_cpu = policy.device.type == "cpu"
    options = rollout.vllm.engine
    if not (on_cpu or rollout.kv_tokens or MEMORY_OPTIONS & set(options)):
        raise ConfigError(
            "rollout.backend = 'vllm' on a GPU: learner and vLLM share its memory; say how much is vLLM's, "
            "as rollout.kv_tokens or rollout.vllm.engine={gpu_memory_utilization: 0.5}"
        )
    kv_tokens = cpu_kv_tokens(policy, config) if on_cpu else rollout.kv_tokens
    longest = policy.config.max_positions
    return VllmSettings(
        folder=str(policy_folder(config.policy.path)),
        dtype=str(policy.dtype).removeprefix("torch."),
        max_positions=min(longest, kv_tokens) if kv_tokens else longest,
        max_running=rollout.max_running,
        kv_bytes=_kv_bytes(policy, config, draft, kv_tokens) if kv_tokens else 0,
        prefill_tokens=max(rollout.prefill_tokens, rollout.max_running * (draft.tokens + 1 if draft else 1)),
        seed=config.run.seed,
        eos_token_ids=tuple(policy.config.eos_token_ids),
        request_seeds=rollout.vllm.request_seeds,
        sleeps=not on_cpu and rollout.mode != "async" and bool(options.get("enable_sleep_mode", True)),
        tensor_parallel=rollout.vllm.tensor_parallel,
        pipeline_parallel=rollout.vllm.pipeline_parallel,
        expert_parallel=rollout.vllm.expert_parallel,
        draft=draft,
        engine=(CPU_OPTIONS if on_cpu else {}) | options,
    )


def make_head(policy: Decoder, speculation: SpeculationConfig) -> EagleHead | None:
    """Returns the head that vLLM will draft with, for a trainer in this process."""
    if LEARNER not in speculation.drafters:
        return None
    head = make_drafter(LEARNER, speculation, policy).head
    assert isinstance(head, EagleHead)
    return head


def draft_settings(
    policy: Decoder, tokenizer: Tokenizer, config: Config, head: EagleHead | None, scratch: Path
) -> DraftSettings | None:
    """Returns how vLLM speculates; the head is written to a folder, as vLLM opens it."""
    speculation = config.rollout.speculation
    if not speculation.drafters:
        return None
    name = speculation.drafters[0]
    options = dict(config.rollout.vllm.speculative)
    folder = ""
    if head is not None:
        save_eagle(head, scratch / name)
        folder = str(scratch / name)
    elif name == "draft_model":
        with errors_name_recipe_key(name, speculation):
            folder = str(draft_model_folder(speculation, policy.config, tokenizer))
    elif name == "ngram":
        options = {"prompt_lookup_max": 4, "prompt_lookup_min": 1} | options
    return DraftSettings(
        name, DRAFTERS[name].vllm_method, speculation.tokens, folder, speculation.max_running, options
    )


def probe_text(policy: Decoder) -> list[int]:
    """Returns a text whose logprobs depend on every layer: random tokens, the same in every run."""
    rng = random.Random("probe")
    length = min(PROBE_TOKENS, policy.config.max_positions - 1)
    return [rng.randrange(policy.config.vocab_size) for _ in range(length)]


@torch.no_grad()
def learner_logprobs(policy: Decoder, tokens: Sequence[int]) -> list[float]:
    """Returns the policy's logprobs of a text's tokens but the first."""
    packed = PackedAttention([len(tokens)], policy.device)
    tokens_T = torch.tensor(list(tokens), device=policy.device)
    logits_TV = policy.logits(policy(tokens_T, packed.positions_T, packed)[:-1])
    return logits_TV.float().log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0].tolist()


def _kv_bytes(policy: Decoder, config: Config, draft: DraftSettings | None, kv_tokens: int) -> int:
    """Returns the bytes of a cache that holds so many tokens, whole blocks of each running request."""
    shape, rollout = policy.config, config.rollout
    layers = shape.num_layers
    if draft is not None and draft.method in ("eagle3", "mtp"):
        layers += 1
    elif draft is not None and draft.folder:
        layers += read_config(Path(draft.folder)).num_layers
    tokens = kv_tokens + (rollout.max_running + 1) * (BLOCK + (draft.tokens if draft else 0))
    in_fp8 = str(rollout.vllm.engine.get("kv_cache_dtype", "")).startswith("fp8")
    number_bytes = 1 if in_fp8 else policy.dtype.itemsize
    return 2 * layers * shape.num_kv_heads * shape.head_dim * number_bytes * tokens
