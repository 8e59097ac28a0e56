"""vLLM as a subject: its worker without and with speculation, each started once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from paceline.certify.certificate import Check
from paceline.certify.foreign import ForeignSubject
from paceline.certify.native import disturbed
from paceline.certify.subject import OpenedBackend, Opening
from paceline.config import Config, load_config
from paceline.config.drafters import VLLM
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import save_policy
from paceline.vllm_backend.client import VllmClient
from paceline.vllm_backend.start import start_vllm

# The drafter that stands for vLLM without speculation, and the one that is made from the policy.
NONE = "none"
DISTURBED = "disturbed"

# What is done to a running vLLM beside sampling.
SCENES = ("paused", "aborted", "weights", "endings", "limit")

# Requests that run together, unless the recipe sets it.
MAX_RUNNING = 64


@dataclass(frozen=True)
class VllmOptions:
    """What of vLLM is certified."""

    policy: str
    drafter: str  # none, disturbed, or a recipe's name of one
    tokens: int  # proposed per step

    def __post_init__(self) -> None:
        known = (NONE, DISTURBED, *VLLM)
        if self.drafter not in known:
            raise ValueError(
                f"--drafter {self.drafter!r}: with --backend vllm it is one of {', '.join(known)}"
            )


def vllm_config(options: VllmOptions, recipe: str, overrides: Sequence[str], speculates: bool) -> Config:
    """Returns the recipe of one of the two engines that are compared with the policy."""
    name = "draft_model" if options.drafter == DISTURBED else options.drafter
    drafters = [name] if speculates and name != NONE else []
    own = [f"policy.path={options.policy}", "rollout.backend=vllm"]
    own += [
        f"rollout.speculation.{setting}" for setting in ("pacing=fixed", f"drafters=[{','.join(drafters)}]")
    ]
    if drafters:
        own += ["rollout.speculation.verify=rejection", f"rollout.speculation.tokens={options.tokens}"]
    else:  # the recipe's options of its drafters would not apply
        own += ["rollout.speculation.verify=shared-noise", "rollout.vllm.speculative={}"]
    given = [
        override
        for override in overrides
        if drafters or not override.startswith(("rollout.speculation", "rollout.vllm.speculative"))
    ]
    return load_config(recipe, [f"rollout.max_running={MAX_RUNNING}", *own, *given])


class VllmSubject(ForeignSubject):
    """vLLM behind its worker."""

    takes_weights = True

    def __init__(
        self, policy: Decoder, tokenizer: Tokenizer, plain: Config, speculating: Config, version: str
    ) -> None:
        speculation = speculating.rollout.speculation
        super().__init__(policy, speculation.tokens if speculation.drafters else 0)
        self.name = f"vLLM {version}"
        self.tokenizer = tokenizer
        self.decode = tokenizer.decode
        self.configs = {False: plain, True: speculating}
        self.opened: dict[bool, VllmClient] = {}
        self.warnings: list[str] = []

    def open(self, opening: Opening) -> OpenedBackend:
        speculates = bool(opening.tokens and self.tokens)
        if speculates not in self.opened:
            config = self.configs[speculates]
            self.opened[speculates] = start_vllm(self.policy, self.tokenizer, config, self.warnings.append)
        client = self.opened[speculates]
        client.resume()
        return OpenedBackend(client)

    def own_checks(self) -> list[Check]:
        """Reports vLLM's own figures, and ends its processes."""
        checks = []
        for speculates, client in self.opened.items():
            probed = f"a probe text's logprobs differ from a learner's by {client.probed:.1e} on average"
            checks.append(Check(f"weights arrive, {'speculating' if speculates else 'plain'}", True, probed))
            for name, drafts in client.take_stats().drafts.items():
                shares = ", ".join(f"{100 * n / drafts.drafts:.0f}%" for n in drafts.accepted_at)
                detail = f"{drafts.accepted} of {drafts.proposed} tokens accepted; by place {shares}"
                checks.append(Check(f"{name} is accepted", drafts.accepted > 0, detail))
            client.close()
        checks += [Check("warnings", None, text, promised=False) for text in self.warnings]
        return checks + super().own_checks()


def disturbed_folder(policy: Decoder, policy_folder: Path, scratch: Path) -> str:
    """Writes the policy with noise on its weights, as a draft model."""
    folder = scratch / DISTURBED
    save_policy(disturbed(policy), folder, tokenizer_from=policy_folder)
    return str(folder)
