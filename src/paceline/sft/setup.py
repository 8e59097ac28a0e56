"""From a recipe to the parts of supervised fine-tuning: policy, examples, learner.

A recipe may be one of RL: what it says of rollouts, rewards and the algorithm is not looked at, so that one
file can describe both stages. Overrides of such keys are refused, as nobody would see their effect.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.cluster.learning_home import LearningHome, OwnProcess, RankProcesses
from paceline.cluster.placing import find_places
from paceline.cluster.ranks import LearnerRanks, RankLaunch
from paceline.config import Config, ConfigError, CorrectionConfig, dump_config, load_config
from paceline.device import prepare_device
from paceline.learning.learner import Learner
from paceline.models.source import policy_dtype, policy_folder
from paceline.plan.machine import gpu_at_hand
from paceline.plan.supervised import make_supervised_plan, supervised_refusal, supervised_suggestions
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy, save_policy
from paceline.policy.lora import add_adapters
from paceline.policy.model_files import TOKENIZER_FILES, copy_files
from paceline.policy.tokenizer import character_tokenizer, load_tokenizer, save_tokenizer
from paceline.sft.examples import Examples, Reader, split_held_out
from paceline.tasks.chat import ChatTemplate
from paceline.tasks.make import make_task, task_alphabet

# In place of a policy's folder: an untrained one, in the task's own alphabet.
FRESH = "fresh"
# Its context in tokens and its depth: a CPU trains it within a quarter of an hour.
FRESH_POSITIONS = 1024
FRESH_LAYERS = 4

# Tokens of a micro-batch on a GPU where the recipe names none: fewer leave it waiting for launches.
GPU_MICRO_BATCH = 16384

# What of a recipe applies.
KEYS = (
    *("run", "policy", "sft", "checkpoint.keep", "report", "task"),
    *("rollout.max_tokens", "rollout.base_precision_layers", "cluster"),
    *(f"learning.{key}" for key in ("weight_decay", "beta1", "beta2", "max_grad_norm", "optimiser_state")),
    *(f"learning.{key}" for key in ("micro_batch_tokens", "precision", "deterministic")),
)
# Those that the run itself settles.
SETTLED = {
    "run.steps": "it follows from sft.epochs and sft.batch_size",
    "learning.lr": "it is sft.lr here",
    "learning.algorithm": "the command says it already",
    "cluster.replicas": "nothing is generated",
}


def load_supervised(recipe: str, overrides: Sequence[str]) -> Config:
    """Reads a recipe for supervised fine-tuning; raises where an override would be ignored."""
    refuse_ignored(overrides)
    return load_config(recipe, ["learning.algorithm=sft", "cluster.replicas=0", *overrides])


def refuse_ignored(overrides: Sequence[str]) -> None:
    """Raises where an override names a key of RL alone."""
    for override in overrides:
        key = override.partition("=")[0]
        applies = any(key == one or key.startswith(f"{one}.") for one in KEYS)
        if key in SETTLED or not applies:
            why = SETTLED.get(key, f"`paceline sft` looks at {', '.join(KEYS)}")
            raise ConfigError(f"{override}: does not apply to supervised fine-tuning, {why}; leave it out")


@dataclass
class Parts:
    """The parts of a run."""

    config: Config  # settled: with the run's own steps and learning rate
    device: torch.device
    shape: DecoderConfig
    train: Examples
    held_out: Examples
    home: LearningHome
    close: Callable[[], None]


def settle(config: Config, examples: int, on_gpu: bool) -> Config:
    """Returns the recipe with the learner's own keys set from `sft`; the same when it is settled again."""
    sft, given = config.sft, config.learning
    steps = sft.epochs * -(-examples // sft.batch_size)
    micro_batch = given.micro_batch_tokens
    if on_gpu and "micro_batch_tokens" not in given.model_fields_set:
        micro_batch = GPU_MICRO_BATCH
    learning = given.model_copy(
        update={
            **{"algorithm": "sft", "lr": sft.lr, "lr_schedule": sft.lr_schedule},
            "warmup_steps": min(sft.warmup_steps, steps // 10),
            "micro_batch_tokens": micro_batch,
            **{"epochs": 1, "minibatches": 1, "loss_mean": "token", "kl_coef": 0.0, "numerics": "fast"},
            "correction": CorrectionConfig(),
        }
    )
    run = config.run.model_copy(update={"steps": steps})
    return config.model_copy(update={"run": run, "learning": learning})


@contextmanager
def open_parts(config: Config, say: Callable[[str], None], warn: Callable[[str], None]) -> Iterator[Parts]:
    """Reads the examples and loads the policy; raises, with the way out, where that cannot work."""
    with tempfile.TemporaryDirectory() as scratch:
        device = prepare_device(config)
        folder = _start(config, Path(scratch))
        tokenizer = load_tokenizer(folder)
        shape = read_config(folder)
        train, held_out = read_examples(config, tokenizer, folder, shape)
        _tell(train, held_out, say, warn)
        config = settle(config, len(train.sequences), device.type == "cuda")
        home, close = _learning_home(config, folder, shape, device, train, warn)
        try:
            yield Parts(config, device, shape, train, held_out, home, close)
        finally:
            close()


def read_examples(
    config: Config, tokenizer: Tokenizer, folder: Path, shape: DecoderConfig
) -> tuple[Examples, Examples]:
    """Returns the examples to learn from and those held out."""
    sft = config.sft
    longest = min(sft.max_tokens or shape.max_positions, shape.max_positions)
    reader = Reader(tokenizer, ChatTemplate.from_folder(folder), shape.eos_token_ids, longest)
    if sft.data:
        found = reader.read(Path(sft.data), "sft.data")
        if sft.held_out:
            return found, reader.read(Path(sft.held_out), "sft.held_out")
    else:
        found = _demonstrations(config, reader, folder)
    return split_held_out(found, sft.held_out_share, config.run.seed)


def _demonstrations(config: Config, reader: Reader, folder: Path) -> Examples:
    task = make_task(config.task, reader.tokenizer, folder)
    try:
        if task.demonstrations is None:
            raise ConfigError(
                f"task.name = {config.task.name!r} has no demonstrations of its own; countdown has, and a "
                "file with task.data.response_column. Give examples with sft.data=FILE"
            )
        return reader.demonstrations(
            task, config.sft.demonstrations, config.run.seed, config.rollout.max_tokens
        )
    finally:
        task.close()


def _tell(
    train: Examples, held_out: Examples, say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    left_out = f", {train.too_long} too long and left out" if train.too_long else ""
    say(
        f"{len(train.sequences)} examples of {train.tokens:,} tokens{left_out}; "
        f"{len(held_out.sequences)} held out"
    )
    if 2 * train.endless > len(train.sequences):
        warn(
            f"{train.endless} of {len(train.sequences)} examples teach no end token of the policy "
            "(eos_token_id of its config.json), so it would not learn to stop: add the token that ends the "
            "assistant's turns in its chat template"
        )


def _start(config: Config, scratch: Path) -> Path:
    """Returns the folder of the policy and tokenizer that the run begins with and saves along."""
    template = config.sft.chat_template
    if config.policy.path == FRESH:
        write_fresh_policy(scratch, task_alphabet(config.task), config.run.seed)
        return scratch
    folder = policy_folder(config.policy.path)
    if not template:
        return folder
    try:
        source = Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"sft.chat_template = {template!r}: {error}; name a Jinja file") from None
    copy_files(folder, TOKENIZER_FILES, scratch)
    (scratch / "chat_template.jinja").write_text(source, encoding="utf-8")
    for path in folder.iterdir():
        if not (scratch / path.name).exists():
            (scratch / path.name).symlink_to(path.absolute())
    return scratch


def _learning_home(
    config: Config,
    folder: Path,
    shape: DecoderConfig,
    device: torch.device,
    train: Examples,
    warn: Callable[[str], None],
) -> tuple[LearningHome, Callable[[], None]]:
    dtype = policy_dtype(config.policy, device)
    longest = max(len(sequence.tokens) for sequence in train.sequences)
    if config.cluster.learners:
        # Ranks load the policy themselves; here only its shapes are needed.
        policy = load_policy(folder, dtype)
        where = config.policy.model_copy(update={"path": str(folder.absolute())})
        recipe = dump_config(config.model_copy(update={"policy": where}))
        places = find_places(config.cluster, device)
        seconds = config.cluster.heartbeat_seconds
        launch = RankLaunch("paceline.session:hosted_rank", recipe)
        ranks = LearnerRanks(launch, places.learners, warn, seconds)

        def close() -> None:
            ranks.close()
            places.release()

        return RankProcesses(ranks, policy, folder), close
    policy = load_policy(folder, dtype, device)
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora, config.run.seed)
    machine = gpu_at_hand() if device.type == "cuda" else None
    if machine is not None:
        plan = make_supervised_plan(config, shape, dtype, machine, longest)
        if plan.problem:
            fitting = supervised_suggestions(config, shape, dtype, machine, longest)
            raise supervised_refusal(plan, fitting)
        policy.recompute = plan.recompute
    return OwnProcess(Learner(policy, config, warn), policy, folder), lambda: None


def write_fresh_policy(folder: Path, alphabet: Sequence[str], seed: int) -> None:
    """Writes an untrained policy, as wide as the built-in one, with a token for each of these texts."""
    config = DecoderConfig(
        family="llama",
        vocab_size=len(alphabet) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_layers=FRESH_LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=FRESH_POSITIONS,
        tie_embeddings=True,
        eos_token_ids=(0,),
    )
    save_policy(Decoder(config).initialise(seed), folder)
    save_tokenizer(character_tokenizer(alphabet), folder)
