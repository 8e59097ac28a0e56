"""What the client of vLLM's process checks: every update by a probe, every drafter by its acceptance."""

import json

import pytest
import torch

from paceline.drafting.eagle_folder import BUILTIN_EAGLE, head_tensors, load_eagle
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.huggingface import load_policy
from paceline.vllm_backend import client as client_module
from paceline.vllm_backend.client import Probe, VllmClient
from paceline.worker.codec import tensors_of
from paceline.worker.process import Launch, WorkerFailed
from tests.vllm_backend.test_backend import SETTINGS


@pytest.fixture
def start(monkeypatch):
    started = []

    def begin(accepted: int = 1, lost: bool = False, head=None) -> tuple[VllmClient, list[str], dict]:
        stub = json.dumps({"accepted": accepted, "lost": lost})
        launch = Launch("tests.vllm_backend.stub_backend:make", stub)
        monkeypatch.setattr(client_module, "vllm_launch", lambda settings, python: launch)
        learner = {"weight": torch.tensor(0.0)}
        warnings: list[str] = []
        probe = Probe([1, 2, 3], lambda tokens: [-float(learner["weight"]) * t for t in tokens[1:]], 1e-3)
        client = VllmClient(SETTINGS, "", lambda: learner.items(), warnings.append, probe, head=head)
        started.append(client)
        return client, warnings, learner

    yield begin
    for client in started:
        client.close()


@pytest.mark.slow
def test_probe_passes_an_update_that_arrives(start):
    client, _, learner = start()
    learner["weight"] = torch.tensor(0.5)
    client.update_weights(1)
    assert client.probed < 1e-6


def test_probe_ends_the_run_if_an_update_is_lost(start):
    client, _, learner = start(lost=True)
    learner["weight"] = torch.tensor(0.5)
    with pytest.raises(WorkerFailed, match=r"version 1.*allowed: 0.001"):
        client.update_weights(1)


@pytest.mark.slow
@pytest.mark.parametrize(("accepted", "warned"), [(0, True), (1, False)])
def test_drafter_that_is_never_accepted_is_reported_once(start, accepted, warned):
    client, warnings, _ = start(accepted)
    client.update_weights(4)
    client.take_stats()
    assert bool(warnings) == warned
    if warned:
        assert "none of 300 tokens that eagle proposed" in warnings[0] and "version 4" in warnings[0]
    client.take_stats()
    assert len(warnings) == int(warned)


def kept_head(client):
    return tensors_of(client.restored.published)


@pytest.mark.slow
def test_published_head_is_sent_under_its_folders_names_and_kept_for_the_next_worker(start):
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle(BUILTIN_EAGLE, policy, torch.float32)
    client, _, _ = start(head=head)
    changed = {name: parameter + 1 for name, parameter in head.named_parameters()}
    client.speculation.publish_drafter(2, changed)
    assert client.restored.published.fields["version"] == 2
    kept = kept_head(client)
    assert set(kept) == set(head_tensors(head))
    assert torch.equal(kept["fc.weight"], changed["fc.weight"].detach())
    assert client.speculation.trainable_head is head


@pytest.mark.slow
def test_checkpointed_head_has_the_native_engines_names(start):
    policy = load_policy(BUILTIN_POLICY, torch.float32)
    head = load_eagle(BUILTIN_EAGLE, policy, torch.float32)
    client, _, _ = start(head=head)
    state = {name: tensor + 1 for name, tensor in client.speculation.drafter_state().items()}
    assert "eagle.fc.weight" in state
    client.speculation.load_drafter_state(state)
    assert torch.equal(head.fc.weight.detach(), state["eagle.fc.weight"])
    assert torch.equal(kept_head(client)["fc.weight"], state["eagle.fc.weight"])
