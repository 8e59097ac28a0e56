"""Expected acceptance against brute force and against what the engine realises."""

import pytest
import torch

from paceline.bench.acceptance import bench_acceptance, shared_noise_agreement
from paceline.certify.native import disturbed
from paceline.kernels.noise import gumbel
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import Request, SamplingParams


def test_agreement_is_that_of_shared_gumbels():
    logits = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    logits[1, 2, 3] = -torch.inf  # a token that the drafter cannot say
    p, q = logits.softmax(-1)
    expected = shared_noise_agreement(p, q)
    slow = [
        sum(1 / torch.maximum(a / a[t], b / b[t]).sum() if b[t] > 0 else 0.0 for t in range(12))
        for a, b in zip(p, q, strict=True)
    ]
    torch.testing.assert_close(expected, torch.stack(slow))
    noise = gumbel(torch.arange(40000), torch.zeros(40000, dtype=torch.int64), 12)
    for row in range(6):
        agreed = ((p[row].log() + noise).argmax(-1) == (q[row].log() + noise).argmax(-1)).double().mean()
        assert abs(float(agreed) - float(expected[row])) < 0.012
    torch.testing.assert_close(shared_noise_agreement(p, p), torch.ones(6, dtype=torch.float64))


def test_realised_acceptance_is_the_expected_one():
    policy = Decoder(DecoderConfig("llama", 24, 32, 48, 1, 2, 1, 16, 64)).initialise(0)
    policy.head.weight.data.mul_(14)
    requests = [
        Request(str(i), (3, 4, 5 + i % 3), 1000 + i, SamplingParams(max_tokens=40)) for i in range(64)
    ]
    point = bench_acceptance(policy, disturbed(policy, 0.7), requests, 1)
    assert point.positions == 64 * 40 and 0.1 < point.mean_tv < 0.6
    assert (
        point.rejection > point.shared_noise > point.shared_noise_bound > 0
        and point.rejection == pytest.approx(1 - point.mean_tv)
    )
    assert point.realised_rejection == pytest.approx(point.rejection, abs=0.04)
    assert point.realised_shared_noise == pytest.approx(point.shared_noise, abs=0.04)
    assert point.accept_length_shared_noise == pytest.approx(1 + point.realised_shared_noise)
