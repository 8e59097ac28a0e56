"""The folders that a recipe names for its drafters, checked against the policy; errors name the key."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import FRESH, Config, ConfigError, SpeculationConfig
from paceline.config.drafters import DRAFTERS, LEARNER, NATIVE
from paceline.drafting.eagle_folder import head_for, read_eagle_config
from paceline.drafting.eagle_head import EagleConfig, config_for
from paceline.policy.config import DecoderConfig, read_config
from paceline.policy.tokenizer import differing_tokens, load_tokenizer


@contextmanager
def errors_name_recipe_key(name: str, settings: SpeculationConfig) -> Iterator[None]:
    """Turns errors within into ones that name the folder the recipe gives for this drafter."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, FileNotFoundError) as error:
        key = DRAFTERS[name].folder_key
        remedy = "use a smaller model with the policy's own tokenizer, " if name == "draft_model" else ""
        remedy += (
            "train an eagle head for this policy with `paceline drafter train`, "
            f"or leave {name} out of rollout.speculation.drafters"
        )
        raise ConfigError(
            f"rollout.speculation.{key} = {getattr(settings, key)!r}: {error}; {remedy}"
        ) from None


def eagle_head(settings: SpeculationConfig, policy: DecoderConfig) -> tuple[str, EagleConfig]:
    """Returns the folder, a shipped head's name or FRESH, and what the head's configuration says."""
    if settings.eagle_path == FRESH:
        return FRESH, config_for(policy)
    path = head_for(settings.eagle_path, policy)
    if path is None:
        raise ConfigError(
            "rollout.speculation.eagle_path = 'auto': no head is shipped for this policy; make one with "
            "`paceline drafter train`"
        )
    return path, read_eagle_config(path, policy)


def check_teaching(config: Config, resumes: bool, warn: Callable[[str], None]) -> None:
    """Raises where a run would begin with a head that is to learn, or is fresh, and nothing trains it.

    A resumed run has a head that was trained, and is only warned.
    """
    speculation, replicas = config.rollout.speculation, config.cluster.replicas
    if LEARNER not in speculation.drafters:
        return
    online, fresh = speculation.online, speculation.eagle_path == FRESH and not resumes
    nothing = f"rollout.speculation.eagle_path = {FRESH!r} starts from nothing, and " if fresh else ""
    if fresh and not online.share:
        raise ConfigError(
            f"{nothing}rollout.speculation.online.share = 0: nothing would train it. "
            "Use online.share=0.05, or name the folder of a trained head"
        )
    if replicas == 1 and (fresh or (online.share and online.is_asked_for)):
        problem = (
            f"{nothing}cluster.replicas = {replicas}: replicas teach the eagle head while others finish, and "
            f"there are no others (rollout.speculation.online.share = {online.share:g}). Use "
            "cluster.replicas=2 or more, or cluster.replicas=0, or a trained head without "
            "rollout.speculation.online"
        )
        if not resumes:
            raise ConfigError(problem)
        warn(problem)


def draft_model_folder(
    settings: SpeculationConfig, policy: DecoderConfig, tokenizer: Tokenizer | None = None
) -> Path:
    """Returns the draft model's folder, checked against the policy: an id must mean the same to both.

    Without the two tokenizers only their sizes can be compared.
    """
    folder = Path(settings.draft_model_path)
    if not settings.draft_model_path or not (folder / "config.json").is_file():
        raise ValueError("must be a Hugging Face folder with a config.json")
    size = read_config(folder).vocab_size
    if size != policy.vocab_size:
        raise ValueError(f"the draft model has {size} tokens and the policy {policy.vocab_size}")
    if tokenizer is not None and (folder / "tokenizer.json").is_file():
        differing = differing_tokens(tokenizer, load_tokenizer(folder))
        if differing:
            number, (ours, theirs) = next(iter(differing.items()))
            example = f"{number} is {theirs!r} to it and {ours!r} to the policy"
            raise ValueError(
                f"its tokenizer is another one, {len(differing)} ids mean something else ({example})"
            )
    return folder


def drafter_overrides(overrides: list[str], drafters: list[str]) -> list[str]:
    """Returns a command's overrides with all drafters allowed, for commands that choose the drafters.

    Of the recipe's speculation only the folders, the head's precision and the shape count, whatever drafters
    it lists.
    """
    whose = {key: name for name, entry in DRAFTERS.items() for key in entry.keys}
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.rpartition(".")
        if "rollout.speculation" not in (section, key):
            continue
        if name == "shape" and drafters:
            continue
        if name not in whose:
            raise ValueError(
                f"{override}: the command's own options say who drafts and how; of rollout.speculation it "
                f"takes {', '.join(whose)} and shape"
            )
        if whose[name] not in drafters:
            who = f"--drafter {','.join(drafters)}" if drafters else "a backend that never speculates"
            raise ValueError(
                f"{key} = {value!r} does not apply to {who}, only to --drafter {whose[name]}; leave it out"
            )
    every = (f"drafters=[{', '.join(NATIVE)}]", "pacing=adaptive", "max_running=0")
    return [*overrides, *(f"rollout.speculation.{setting}" for setting in every)]
