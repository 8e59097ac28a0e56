"""The native engine in FP8 as a subject.

Calibration runs once, in an engine that is given prompts as in a run; every engine opened later starts from
its scales, as a resumed run does. The oracle (`fp8_policy.py`) takes those scales, too, and they are measured
again without the engine.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from tokenizers import Tokenizer

from paceline.certify.certificate import Check
from paceline.certify.fp8_policy import Fp8Policy, Fp8Recipe, next_scale
from paceline.certify.native import MakeDrafter, NativeSubject, widest
from paceline.certify.subject import KV_TOKENS, OpenedBackend, Snapshot
from paceline.engine.engine import Engine, EngineSettings
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder
from paceline.types import Precision, Request, SamplingParams

# Perturbed copies of the oracle.
COPIES = 8

# Prompt tokens that calibration sees; the engine measures no more than this.
CALIBRATION_TOKENS = 4096

# Factor of a KV scale over what was measured.
KV_MARGIN = 1.05

# Relative difference allowed between what the engine measures for its scales and what is measured here.
SCALE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05}


class Fp8Subject(NativeSubject):
    """The native engine rolling out in FP8, with the FP8 policy as its oracle."""

    name = "native engine in FP8"

    def __init__(
        self,
        policy: Decoder,
        prompts: Sequence[tuple[int, ...]],
        drafters: Sequence[MakeDrafter],
        tokens: int,
        settings: EngineSettings,
        adaptive: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.prompts = _up_to(prompts, CALIBRATION_TOKENS)
        engine = Engine(policy, replace(settings, max_running=64, kv_tokens=KV_TOKENS))
        OpenedBackend(engine).run(
            [
                Request(str(i), prompt, i, SamplingParams(max_tokens=1))
                for i, prompt in enumerate(self.prompts)
            ]
        )
        self.calibrated = engine.calibration_state()
        in_fp8 = Precision(settings.precision).fp8_weights
        in_base = settings.base_precision_layers if in_fp8 else len(policy.layers)
        self.recipe = Fp8Recipe(
            in_base,
            engine.rollout_precision.cache_scales_L2H,
            frozenset(engine.rollout_precision.kv_base_layers),
        )
        super().__init__(
            policy, Fp8Policy(policy, self.recipe), drafters, tokens, settings, adaptive, tokenizer
        )
        self.perturbed = [self.exact_policy.perturbed(seed) for seed in range(COPIES)]

    def with_positions(self, positions: int) -> None:
        """Its oracle and all copies of it would take minutes for texts that long."""

    def _exact_draft_policy(self) -> None:
        """Rounding in FP8 hides which token rejection must choose; statistics serve there."""

    def _proposals_are_known(self) -> bool:
        return False

    def snapshot(self, policy: Decoder) -> Snapshot:
        exact = Fp8Policy(copy.deepcopy(policy), self.recipe)
        return Snapshot(exact, [exact.perturbed(seed) for seed in range(COPIES)])

    def _prepare(self, engine: Engine) -> None:
        engine.load_calibration_state(self.calibrated)

    def own_checks(self) -> list[Check]:
        scales = [] if self.recipe.kv_scales_L2H is None else [self._check_scales()]
        return [*super().own_checks(), *scales]

    @torch.inference_mode()
    def _check_scales(self) -> Check:
        """Measures the scales without the engine's code: the power of two from 1.05 / 448 of the largest on.

        Where what was measured is next to a power of two, either side of it will do.
        """
        largest: list[torch.Tensor] = []
        attention = PackedAttention([len(prompt) for prompt in self.prompts], self.policy.device)
        attention.observe = lambda layer, q_THD, k_THD, v_THD: largest.append(
            torch.stack((k_THD, v_THD)).abs().amax((1, 3))
        )
        tokens_T = torch.tensor(
            [token for prompt in self.prompts for token in prompt], device=self.policy.device
        )
        widest(self.policy)(tokens_T, attention.positions_T, attention)
        largest_L2H = torch.stack(largest)
        if not self.settings.kv_scales_per_head:
            largest_L2H = largest_L2H.amax(-1, keepdim=True).expand_as(largest_L2H)
        tolerance = SCALE_TOLERANCE[self.policy.dtype]
        low_L2H, high_L2H = (next_scale(KV_MARGIN * largest_L2H * (1 + x)) for x in (-tolerance, tolerance))
        scales_L2H = self.recipe.kv_scales_L2H
        off = int(((scales_L2H < low_L2H) | (scales_L2H > high_L2H) | scales_L2H.isnan()).sum())
        base = len(self.recipe.kv_base_layers)
        detail = (
            f"{off} of {scales_L2H.numel()} are others (measured within {tolerance:g}); "
            f"{base} of {len(largest)} layers keep the policy's type"
        )
        return Check("KV scales", off == 0, detail)


def _up_to(prompts: Sequence[tuple[int, ...]], budget: int) -> list[tuple[int, ...]]:
    """Returns different prompts with at most `budget` tokens together."""
    chosen: list[tuple[int, ...]] = []
    for prompt in dict.fromkeys(prompts):
        if chosen and len(prompt) > budget:
            break
        chosen.append(prompt[:budget])
        budget -= len(chosen[-1])
    return chosen
