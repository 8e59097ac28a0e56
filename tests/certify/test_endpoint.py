"""A server that samples what the policy says is certified; one that trusts its drafter too much is not."""

import pytest
import torch

from paceline.certify.endpoint import Endpoint, EndpointError
from paceline.certify.foreign_run import Foreign, certify_foreign
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.policy.tokenizer import load_tokenizer
from tests.certify.endpoint_server import server

PROMPTS = [(5, 9, 7, 4, 22, 8), (6, 13, 30, 8, 9, 4, 17), (7, 7, 12)]


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


def certificate(policy, url):
    what = Foreign(str(BUILTIN_POLICY), (), "default", endpoint=url)
    return certify_foreign(what, policy, PROMPTS, load_tokenizer(BUILTIN_POLICY), quick=True, samples=120)


@pytest.mark.slow
def test_server_that_samples_the_policy_passes(policy):
    with server(policy) as url:
        found = certificate(policy, url)
    assert found.passed, found.table()
    assert {"model": "tiny"}.items() <= found.settings.items()


@pytest.mark.slow
def test_server_that_accepts_too_many_proposals_fails(policy):
    with server(policy, trust=0.2) as url:
        found = certificate(policy, url)
    assert any(check.name.startswith("frequencies") for check in found.failed), found.table()


@pytest.mark.slow
def test_server_that_serves_another_policy_fails(policy):
    other = load_policy(BUILTIN_POLICY, torch.float32)
    with torch.no_grad():
        other.embedding.weight.mul_(1.02)
    with server(other) as url:
        found = certificate(policy, url)
    assert any(check.name.startswith("logprobs of a learner") for check in found.failed), found.table()


def test_address_without_a_server_is_named():
    with pytest.raises(EndpointError, match="127.0.0.1:9"):
        Endpoint("http://127.0.0.1:9")
    with pytest.raises(EndpointError, match="--endpoint 'localhost:8000' is no address.*http://"):
        Endpoint("localhost:8000")
