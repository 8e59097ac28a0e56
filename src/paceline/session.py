"""Puts the parts of a run together from its configuration: device, policy, tokenizer, task, backend.

`train`, `eval` and `rollout` all start here, so they interpret a recipe alike.
"""

import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from tokenizers import Tokenizer
from torch import nn

from paceline.backend import Backend
from paceline.cluster.idle_training import IdleTraining
from paceline.cluster.learning_home import LearningHome, OwnProcess, RankProcesses
from paceline.cluster.placing import Processes, start_processes
from paceline.cluster.pool import ReplicaPool
from paceline.cluster.ranks import LearnerRanks, RankLaunch
from paceline.config import Config, ConfigError, dump_config, parse_config
from paceline.device import learning_threads, prepare_device
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.factory import DrafterFactory
from paceline.drafting.replica_trainer import ReplicaTrainer
from paceline.engine.engine import Engine
from paceline.engine.factory import cpu_kv_tokens, make_engine
from paceline.engine.lengths import Lengths
from paceline.engine.reference import ReferenceBackend
from paceline.learning.learner import Learner
from paceline.models.source import policy_dtype, policy_folder
from paceline.plan.cluster import ClusterPlan, cluster_refusal, make_cluster_plan
from paceline.plan.head_room import settle_learning
from paceline.plan.machine import Machine, gpu_at_hand
from paceline.plan.plan import Plan, make_plan
from paceline.plan.suggestions import refusal, suggestions
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder, not_finite
from paceline.policy.huggingface import ExportedWeights, load_policy
from paceline.policy.lora import add_adapters
from paceline.policy.tokenizer import load_tokenizer
from paceline.rollout.dynamic_sampling import DynamicSampling
from paceline.rollout.sampler import GroupSampler
from paceline.rollout.saved import SavedSamples
from paceline.rollout.schedule import ScheduledRollouts
from paceline.rollout.sources import LiveRollouts, RolloutSource, SavedRollouts, training_params
from paceline.rollout.stream import StreamingRollouts
from paceline.tasks import make_task
from paceline.tasks.order import ProblemOrder
from paceline.tasks.task import Task
from paceline.types import Precision, SamplingParams
from paceline.vllm_backend.start import start_vllm
from paceline.worker.client import WorkerBackend
from paceline.worker.process import Launch

if TYPE_CHECKING:
    from paceline.cluster.rank_host import RankHost

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """The parts of one run, on one device."""

    config: Config
    device: torch.device
    policy_folder: Path
    policy: Decoder
    tokenizer: Tokenizer
    task: Task
    backend: Backend
    sampler: GroupSampler
    plan: Plan | None = None  # of a GPU's memory; None on a CPU
    schedule: Path | None = None  # of an earlier run, to repeat
    processes: Processes | None = None  # None: this process, and a worker in mode async
    _asleep: bool = field(default=False, init=False)  # whether the generator sleeps while the policy learns

    @property
    def ranks(self) -> LearnerRanks | None:
        """The ranks that learn; None: this process does."""
        return self.processes.ranks if self.processes is not None else None

    def train_sampling(self) -> SamplingParams:
        return training_params(self.config.rollout)

    def saved_rollouts(self, folder: Path) -> SavedRollouts:
        """Returns a source of saved groups; raises ConfigError where the policy cannot learn from them."""
        path = self.config.policy.path
        return SavedRollouts(SavedSamples("--replay", folder, path, self.policy.config.vocab_size))

    def rollout_source(self, order: ProblemOrder, warn: Callable[[str], None]) -> RolloutSource:
        rollout = self.config.rollout
        rounds = self.config.learning.dynamic_sampling_rounds
        if self.schedule is not None:
            return ScheduledRollouts(self.sampler, order, rollout, self.schedule)
        if rollout.mode != "sync":
            return StreamingRollouts(self.sampler, order, rollout, rounds, warn)
        live = LiveRollouts(
            self.sampler, order, rollout.prompts_per_step, rollout.samples_per_prompt, self.train_sampling()
        )
        return DynamicSampling(live, rollout.prompts_per_step, rounds, warn) if rounds else live

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu {platform.machine()} x{os.cpu_count()}"

    def machine(self, precision: Precision) -> str:
        """Returns everything that step times depend on as a key, for rollouts in this precision."""
        rollout = self.config.rollout
        base_layers = ""
        if rollout.base_precision_layers:
            base_layers = f" but for layers {rollout.base_precision_layers}"
        mode = f"{precision}{base_layers}, {'deterministic' if rollout.deterministic else 'fast'}"
        return (
            f"{self.device_name}, torch {torch.__version__}, {self.policy.dtype}, rollouts in {mode}, "
            f"{rollout.speculation.shape}s, "
            f"{self.policy.config}"
        )

    @contextmanager
    def learning(self, needs_memory: bool = True, stays: bool = False) -> Iterator[None]:
        """Gives the learner all cores, a device without graph capture and, if planned, the KV pool's memory.

        `stays`: something else trains next, so the generator stays asleep until then, or until `wake`.
        """
        with learning_threads(self.config), self.backend.training():
            if needs_memory and not self._asleep and self.gives_memory:
                self.backend.sleep()
                self._asleep = True
            try:
                yield
            except BaseException:
                self.wake()
                raise
            if not stays:
                self.wake()

    @property
    def gives_memory(self) -> bool:
        """Whether the generator sleeps while the policy learns."""
        if isinstance(self.backend, WorkerBackend):
            return self.backend.gives_memory
        if isinstance(self.backend, ReplicaPool):
            return self.config.cluster.placement == "colocated"
        return self.plan is not None and self.plan.sleeps

    def wake(self) -> None:
        if not self._asleep:
            return
        self._asleep = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # learning's memory must be free before the pool is allocated
        self.backend.wake()

    def learning_home(self, warn: Callable[[str], None]) -> LearningHome:
        if self.ranks is not None:
            return RankProcesses(self.ranks, self.policy, self.policy_folder)
        learner = Learner(self.policy, self.config, warn)
        if self.backend.low_precision is not None:
            learner.observe_attention = self.backend.low_precision.attention_observer
            learner.kv_scales = self.backend.low_precision.kv_scales
        return OwnProcess(learner, self.policy, self.policy_folder)

    @property
    def idle_training(self) -> IdleTraining | None:
        return self.backend.idle_training if isinstance(self.backend, ReplicaPool) else None

    def drafting_head(self) -> nn.Module | None:
        """Returns the head that drafts, or one like it if it lives in another process; None: none drafts."""
        speculation = self.backend.speculation
        if speculation is None or speculation.trainable_head is not None:
            return None if speculation is None else speculation.trainable_head
        factory = DrafterFactory(self.config.rollout.speculation, self.tokenizer)
        if EagleDrafter.name not in factory.names(self.policy.config):
            return None
        return factory.make(EagleDrafter.name, self.policy).head

    def close(self) -> None:
        """Ends reward workers and processes, and drops outstanding requests."""
        self.sampler.close()
        self.backend.close()
        if self.processes is not None:
            self.processes.close()


def open_session(config: Config, learns: bool = False, schedule: Path | None = None) -> Session:
    """Opens the parts that a recipe names; `learns`: memory is planned for training as well.

    A `schedule` is repeated in this process, whatever the mode.
    """
    if schedule is not None:
        _check_schedule(schedule, config)
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    vllm = config.rollout.backend == "vllm"
    ranked = learns and config.cluster.learners > 0 and schedule is None
    plan = None
    if not ranked and not vllm:  # vLLM plans its own memory
        config, plan = plan_gpu(config, read_config(folder), device, learns)
    pooled = learns and config.cluster.replicas > 0 and schedule is None
    in_worker = learns and config.rollout.mode == "async" and schedule is None and not vllm
    _check_cache_stays(config, plan, in_worker)
    # Where ranks learn, this process needs the policy only for its shapes.
    policy = load_policy(folder, policy_dtype(config.policy, device), "cpu" if ranked else device)
    _check_finite(policy, config.policy.path)
    if config.policy.lora.rank and not ranked:
        add_adapters(policy, config.policy.lora, config.run.seed)
    if plan is not None:
        policy.recompute = plan.recompute
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(tokenizer, policy, config.policy.path)
    _note_lengths(config, policy)
    task = make_task(config.task, tokenizer, folder)
    if not learns:  # a run logs it to a file
        task.scoring.log_output(None)
    processes = None
    try:
        if pooled:
            launch = Launch("paceline.session:hosted_replica", dump_config(config))
            rank_launch = RankLaunch("paceline.session:hosted_rank", dump_config(config))
            weights = policy_weights(policy)
            processes = start_processes(launch, rank_launch, config, device, weights, logger.warning)
            backend: Backend = processes.pool
        elif in_worker:
            backend = start_worker(policy, config, device)
        else:
            backend = make_backend(policy, tokenizer, config, plan)
    except BaseException:
        task.close()  # its processes would outlive a restarted run
        raise
    sampler = GroupSampler(backend, task, tokenizer, config.run.seed)
    return Session(
        config, device, folder, policy, tokenizer, task, backend, sampler, plan, schedule, processes
    )


def _note_lengths(config: Config, policy: Decoder) -> None:
    positions = policy.config.max_positions
    for key, tokens in (("rollout", config.rollout.max_tokens), ("eval", config.eval.max_tokens)):
        if tokens > positions:
            logger.warning(
                "%s.max_tokens = %d: policy.path = %r has %d positions, where a response ends at the latest",
                key,
                tokens,
                config.policy.path,
                positions,
            )


def plan_gpu(
    config: Config, shape: DecoderConfig, device: torch.device, learns: bool, replica: bool = False
) -> tuple[Config, Plan | None]:
    """Plans a GPU's memory before anything is loaded; raises, with what would fit, where the run does not.

    Returns the recipe adjusted to the memory there is, and the plan; None on a CPU.
    """
    machine = gpu_at_hand() if device.type == "cuda" else None
    if machine is None:
        return config, None
    what = shape, policy_dtype(config.policy, device), machine, learns, replica
    config, plans = settle_learning(config, lambda one: {"run": make_plan(one, *what)})
    if plans["run"].problem:
        raise refusal(plans["run"], suggestions(config, *what))
    return config, plans["run"]


def plan_replica(config: Config, shape: DecoderConfig, device: torch.device) -> tuple[Config, Plan | None]:
    """Plans the GPU of a replica, which may share it with a learner rank; returns as `plan_gpu`."""
    machine = gpu_at_hand() if device.type == "cuda" else None
    if machine is None or config.cluster.placement == "apart":
        return plan_gpu(config, shape, device, learns=False, replica=True)
    # The rank may hold part of its share already; the plan counts all of it.
    whole = Machine(machine.name, machine.total_bytes)
    what = shape, policy_dtype(config.policy, device), whole
    config, plans = settle_learning(config, lambda one: make_cluster_plan(one, *what).plans)
    plan = ClusterPlan(plans)
    if plan.problem:
        raise cluster_refusal(plan, config, *what)
    return config, plans["learner and replica"]


def make_backend(policy: Decoder, tokenizer: Tokenizer, config: Config, plan: Plan | None = None) -> Backend:
    if config.rollout.backend == "vllm":
        return start_vllm(policy, tokenizer, config, logger.warning)
    if config.rollout.backend == "reference":
        return ReferenceBackend(policy, config.rollout.max_running, tokenizer)
    kv_tokens = plan.kv_tokens if plan is not None else cpu_kv_tokens(policy, config)
    request_tokens = Lengths.of(config, policy.config).request
    return make_engine(policy, config.rollout, kv_tokens, tokenizer, config.run.seed, request_tokens)


def start_worker(policy: Decoder, config: Config, device: torch.device) -> Backend:
    """Starts the recipe's generator in a process of its own, which receives the policy's weights by copy."""
    if device.type == "cuda" and not config.rollout.kv_tokens:
        raise ConfigError(
            "rollout.mode = 'async' on one GPU: two processes share its memory, the plan is made for one; "
            "say how large the KV pool may be (rollout.kv_tokens)"
        )
    launch = Launch("paceline.session:hosted_backend", dump_config(config))
    return WorkerBackend(launch, policy_weights(policy), logger.warning)


def policy_weights(policy: Decoder) -> Callable[[], Iterable[tuple[str, torch.Tensor]]]:
    """Returns a function that returns the policy's weights at the time of the call."""
    exported = ExportedWeights(policy)
    return lambda: exported.views().items()


def hosted_rank(settings: str) -> "RankHost":
    from paceline.cluster.rank_host import RankHost  # imports torch.distributed

    record = json.loads(settings)
    config = parse_config(yaml.safe_load(record["recipe"]))
    device = prepare_device(config)
    policy = load_policy(policy_folder(config.policy.path), policy_dtype(config.policy, device), device)
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora, config.run.seed)
    return RankHost(policy, config, record["rank"], record["count"], device)


def hosted_replica(settings: str) -> Backend:
    """Returns the generator of a recipe whose learners run elsewhere, or on the same GPU."""
    config = parse_config(yaml.safe_load(settings))
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    config, plan = plan_replica(config, read_config(folder), device)
    policy = load_policy(folder, policy_dtype(config.policy, device), device)
    backend = make_backend(policy, load_tokenizer(folder), config, plan)
    if config.rollout.head_may_learn and isinstance(backend, Engine):
        head = backend.trainable_head
        if isinstance(head, EagleHead):  # else the run itself may refuse
            backend.slice_trainer = ReplicaTrainer(policy, head, config, backend, logger.warning)
    return backend


def hosted_backend(settings: str) -> Backend:
    config = parse_config(yaml.safe_load(settings))
    device = prepare_device(config)
    folder = policy_folder(config.policy.path)
    policy = load_policy(folder, policy_dtype(config.policy, device), device)
    return make_backend(policy, load_tokenizer(folder), config)


def _check_schedule(path: Path, config: Config) -> None:
    rollout = config.rollout
    if rollout.backend == "vllm":
        raise ConfigError(
            f"--schedule {path}: rollout.backend = 'vllm' samples with noise of its own, so that nothing can "
            "be repeated; use rollout.backend=native"
        )
    if rollout.mode == "sync":
        raise ConfigError(
            f"--schedule {path}: rollout.mode = 'sync' takes its groups in prompt order, there is nothing to "
            "repeat; leave it out"
        )
    if rollout.on_update == "keep":
        raise ConfigError(
            f"--schedule {path}: with rollout.on_update = 'keep' a response depends on caches of older "
            "weights, which a repetition does not have; schedules of on_update=recompute can be repeated"
        )


def _check_cache_stays(config: Config, plan: Plan | None, in_worker: bool) -> None:
    if config.rollout.on_update == "keep" and plan is not None and plan.sleeps and not in_worker:
        raise ConfigError(
            "rollout.on_update = 'keep': the KV pool gives its memory to learning on this GPU, and with it "
            "what it holds; lower rollout.kv_tokens until both fit (`paceline plan`), or use "
            "on_update=recompute"
        )


def _check_finite(policy: Decoder, path: str) -> None:
    """Such a policy does sample, so without this check a run would fail later, after its updates."""
    harmed = not_finite(policy)
    if harmed:
        raise ConfigError(
            f"policy.path = {path!r}: {len(harmed)} parameters are not finite in {policy.dtype}, first "
            f"{harmed[0]}; the folder is damaged or its training diverged: use another policy, or "
            "policy.dtype=float32 if it was saved in that"
        )


def _check_vocabulary(tokenizer: Tokenizer, policy: Decoder, path: str) -> None:
    largest = max(tokenizer.get_vocab().values(), default=-1)
    size = policy.config.vocab_size
    if largest >= size:
        raise ConfigError(
            f"policy.path = {path!r}: its tokenizer.json has tokens up to id {largest}, and the policy's "
            f"vocabulary ends at {size - 1}; they do not belong together: use the tokenizer that the policy "
            "was trained with"
        )
