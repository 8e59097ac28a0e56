"""A widened head proposes what the small one does for the small policy."""

import pytest
import torch

from paceline.drafting.acceptance import measure_acceptance
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.engine.engine import Engine, EngineSettings
from paceline.models.source import BUILTIN_POLICY
from paceline.models.widen import widen
from paceline.models.widen_eagle import widen_eagle
from paceline.policy.attention import PackedAttention
from paceline.policy.huggingface import load_policy
from paceline.types import Request, SamplingParams
from tests.drafting.heads import random_head
from tests.models.test_widen import TARGETS


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("draft_vocab", [0, 30])
def test_same_logits_from_the_same_tokens(target, draft_vocab):
    policy = load_policy(BUILTIN_POLICY, torch.float64)
    head = EagleHead(config_for(policy.config, (1, 2, 5), draft_vocab), torch.float64)
    head.draft_to_target.copy_(torch.arange(len(head.draft_to_target)) + (3 if draft_vocab else 0))
    random_head(head, policy, 1)
    wide = widen(policy, TARGETS[target])
    wide_head = widen_eagle(head, policy.config, wide)
    tokens = torch.randint(48, (40,), generator=torch.Generator().manual_seed(2))
    packed = PackedAttention([39], policy.device)
    outs = []
    with torch.no_grad():
        for model, drafter in ((policy, head), (wide, wide_head)):
            captured, x = [], model.embedding(tokens[:-1])
            for index, layer in enumerate(model.layers):
                if index in drafter.config.captured_layers:
                    captured.append(x)
                x = layer(x, model.rope_table[packed.positions_T], index, packed)
            out = drafter(drafter.features(captured), model.embedding(tokens[1:]), packed.positions_T, packed)
            again = drafter(
                out, model.embedding(tokens[1:]), packed.positions_T, packed
            )  # from its own states, as a longer draft
            outs.append((drafter.logits(out), drafter.logits(again)))
    for small, large in zip(*outs, strict=True):
        assert small.std() > 0.5 and (small - large).abs().max() < 1e-8
    assert torch.equal(wide_head.draft_to_target, head.draft_to_target)


def test_the_shipped_heads_acceptance_survives():
    """In float64, where no rounding decides a token: same responses, same acceptance at every depth."""
    from paceline.drafting.eagle_folder import load_eagle

    policy = load_policy(BUILTIN_POLICY, torch.float64)
    head = load_eagle("builtin-eagle", policy, torch.float64, "cpu")
    wide = widen(policy, TARGETS["twice-the-head"])
    wide_head = widen_eagle(head, policy.config, wide)
    engine = Engine(policy, EngineSettings(max_running=4, kv_tokens=1024))
    engine.submit([Request(str(i), (5 + i, 6, 7, 8), i, SamplingParams(max_tokens=40)) for i in range(4)])
    completions = list(engine.completions())
    small, large = (measure_acceptance(p, h, completions, 3) for p, h in ((policy, head), (wide, wide_head)))
    assert small.shared_noise == large.shared_noise and small.shared_noise.tokens > 40
