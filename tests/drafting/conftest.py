"""Fixtures of several files."""

import pytest
import torch

from paceline.drafting.eagle_folder import load_eagle
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy


@pytest.fixture(scope="module")
def moved():
    """The built-in policy and its head, and the policy after updates that the head knows nothing of."""
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle("builtin-eagle", policy, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if parameter.ndim > 1 and "embedding" not in name:
            parameter.data += 0.15 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    return policy, head
