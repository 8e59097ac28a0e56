"""Certificates of generators with noise of their own, from the command's options: vLLM, or a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from paceline.certify.certificate import Certificate
from paceline.certify.endpoint import Endpoint, EndpointSubject
from paceline.certify.foreign import foreign_plan
from paceline.certify.run import certify
from paceline.certify.vllm import (
    DISTURBED,
    NONE,
    SCENES,
    VllmOptions,
    VllmSubject,
    disturbed_folder,
    vllm_config,
)
from paceline.config import Config, load_config
from paceline.models.source import policy_folder
from paceline.policy.decoder import Decoder
from paceline.vllm_backend.start import vllm_python
from paceline.vllm_backend.versions import version_in

# Concurrent requests to a server.
SERVER_RUNNING = 16


@dataclass(frozen=True)
class Foreign:
    """The options of `paceline certify` that select the generator to certify."""

    policy: str
    overrides: tuple[str, ...]
    recipe: str
    drafter: str = NONE
    tokens: int = 3
    endpoint: str = ""
    model: str = ""

    @property
    def config(self) -> Config:
        if self.endpoint:
            return load_config(self.recipe, [f"policy.path={self.policy}", *self.overrides])
        return vllm_config(self.vllm, self.recipe, self.overrides, speculates=False)

    @property
    def vllm(self) -> VllmOptions:
        return VllmOptions(self.policy, self.drafter, self.tokens)


def certify_foreign(
    what: Foreign,
    policy: Decoder,
    prompts: Sequence[tuple[int, ...]],
    tokenizer: Tokenizer,
    quick: bool = False,
    samples: int = 0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Certifies a server, or vLLM without and with a drafter."""
    settings = {"policy": what.policy, "precision": str(policy.dtype).removeprefix("torch.")}
    settings["seed"] = str(seed)
    if what.endpoint:
        endpoint = Endpoint(what.endpoint, what.model)
        subject = EndpointSubject(policy, endpoint, SERVER_RUNNING)
        settings |= {"model": endpoint.model}
        plan = foreign_plan(quick, samples, seed, (), policy.config.vocab_size)
        return certify(subject, prompts, plan, settings, progress)
    with TemporaryDirectory(prefix="paceline-certify-") as scratch:
        overrides = list(what.overrides)
        if what.drafter == DISTURBED:
            folder = disturbed_folder(policy, policy_folder(what.policy), Path(scratch))
            overrides.append(f"rollout.speculation.draft_model_path={folder}")
        plain, speculating = (
            vllm_config(what.vllm, what.recipe, overrides, speculates) for speculates in (False, True)
        )
        version = version_in(str(vllm_python(plain.rollout.vllm.python))) or "of an unknown version"
        settings |= {"drafter": what.drafter}
        settings |= {"tokens": str(what.tokens)} if what.drafter != NONE else {}
        vllm = VllmSubject(policy, tokenizer, plain, speculating, version)
        plan = foreign_plan(quick, samples, seed, SCENES, policy.config.vocab_size)
        return certify(vllm, prompts, plan, settings, progress)
