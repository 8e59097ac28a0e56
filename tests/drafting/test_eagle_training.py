"""The head learns from the right states, sees what a draft sees, and leaves the policy alone."""

import random

import pytest
import torch

from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.training import (
    HeadTrainer,
    HeadTraining,
    choose_vocabulary,
    drafted_tokens,
    teacher_states,
    train_offline,
)
from paceline.drafting.unroll import unroll
from paceline.learning.batch import TrainingSequence, pack
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Capture, Decoder
from paceline.policy.huggingface import load_policy
from tests.drafting.eagle_oracle import Draft, policy_states
from tests.oracles import double_precision, small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    small_model("llama", num_hidden_layers=4).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(folder) -> Decoder:
    return load_policy(folder, torch.float64)


def make_head(policy: Decoder, draft_vocab: int = 0, dtype: torch.dtype = torch.float64) -> EagleHead:
    head = EagleHead(config_for(policy.config, draft_vocab=draft_vocab), dtype)
    ids = sorted(random.Random(1).sample(range(policy.config.vocab_size), head.config.draft_vocab))
    head.draft_to_target.copy_(torch.tensor(ids))
    head.initialise(policy, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in head.parameters():  # away from trivial values, and large enough that attention matters
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
            dtype
        )
    return head


def make_sequence(
    prompt: int, response: int, seed: int = 0, temperature: float = 0.7, observed: tuple[int, ...] = ()
) -> TrainingSequence:
    rng = random.Random(f"{prompt}/{response}/{seed}")
    tokens = tuple(rng.randrange(97) for _ in range(prompt + response))
    mask = tuple(i not in observed for i in range(response))
    return TrainingSequence(tokens, prompt, mask, (0.0,) * response, 0.0, temperature)


SEQUENCES = [
    make_sequence(4, 7),
    make_sequence(1, 5),
    make_sequence(2, 3, temperature=1.3),
    make_sequence(5, 9, observed=(3, 4)),
]


def test_captured_states_are_those_of_transformers(folder, policy):
    tokens = torch.tensor([list(make_sequence(3, 9).tokens)])
    capture = Capture((1, 2, 3))
    packed = PackedAttention([tokens.shape[1]], policy.device)
    policy(tokens[0], packed.positions_T, packed, capture)
    with double_precision(), torch.no_grad():
        states = small_model("llama", num_hidden_layers=4)(tokens, output_hidden_states=True).hidden_states
    for ours, layer in zip(capture.states_TE, capture.layers, strict=True):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, states[layer][0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("draft_vocab", [0, 31])
def test_unroll_equals_drafts_written_out_token_by_token(policy, draft_vocab):
    """All starts of all packed sequences at once against single drafts: features, positions, keys, nothing
    off by one.
    """
    head, depth = make_head(policy, draft_vocab), 4
    batch = pack(SEQUENCES, policy.device)
    _, captured = teacher_states(policy, batch, head.config.captured_layers)
    with torch.no_grad():
        logits = [head.logits(x) for x in unroll(head, captured, policy.embedding.weight, batch, depth)]
        row = 0
        for sequence in SEQUENCES:
            tokens = list(sequence.tokens)
            _, states = policy_states(policy, tokens, head.config.captured_layers)
            for first in range(sequence.prompt_length, len(tokens)):  # the draft's first token
                draft = Draft(
                    policy, head, states, tokens, first - 2
                )  # without an entry where there is only one token before
                for step in range(min(depth, len(tokens) - first) if draft.keys else 0):
                    if step:
                        draft.step(tokens[first + step - 1])
                    torch.testing.assert_close(logits[step][row + step], draft.logits(), rtol=0, atol=1e-9)
                row += 1


@pytest.mark.parametrize("draft_vocab", [0, 31])
def test_loss_is_the_sum_over_all_drafts(policy, draft_vocab):
    """Cross-entropy and overlap of each token of each draft that can happen, from single drafts, against the
    trainer's gradients.
    """
    settings = HeadTraining(unroll=3, step_decay=0.6)
    head = make_head(policy, draft_vocab)
    trainer = HeadTrainer(policy, head, settings)
    batch = pack(SEQUENCES, policy.device)
    trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))

    twin = make_head(policy, draft_vocab)
    loss, count, divergence, overlap = 0.0, [0] * 3, [0.0] * 3, [0.0] * 3
    for sequence in SEQUENCES:
        tokens, prompt = list(sequence.tokens), sequence.prompt_length
        with torch.no_grad():
            logits, states = policy_states(policy, tokens, twin.config.captured_layers)
        for target in range(prompt, len(tokens)):  # the first token that the draft proposes
            if target < 2:
                continue  # there is no entry before the second token
            draft = Draft(policy, twin, states, tokens, target - 2)
            for step in range(min(3, len(tokens) - target)):
                if step:
                    draft.step(tokens[target + step - 1])
                if not sequence.loss_mask[target + step - prompt]:
                    break
                p = (logits[target + step - 1] / sequence.temperature).softmax(0)[twin.draft_to_target]
                q = (draft.logits() / sequence.temperature).softmax(0)
                teacher = p / p.sum()
                loss = loss - 0.6**step * (teacher * q.log()).sum()
                count[step] += 1
                divergence[step] += float((teacher * (teacher / q.detach()).log()).sum())
                overlap[step] += float(torch.minimum(p, q.detach()).sum())
    loss.backward()
    summed = trainer.sums_U3.t().tolist()
    assert summed[0] == count
    assert summed[1] == pytest.approx(divergence, abs=1e-8)
    assert summed[2] == pytest.approx(overlap, abs=1e-8)
    for (name, ours), theirs in zip(head.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-9, msg=lambda m: f"{name}: {m}")


def test_packed_sequences_have_the_loss_of_separate_ones(policy):
    def gradients(parts: list[list[TrainingSequence]]) -> list[torch.Tensor]:
        head = make_head(policy)
        trainer = HeadTrainer(policy, head, HeadTraining(unroll=3))
        for part in parts:
            batch = pack(part, policy.device)
            trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
        return [parameter.grad for parameter in head.parameters()]

    for ours, theirs in zip(gradients([SEQUENCES]), gradients([[s] for s in SEQUENCES]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_chunked_logits_change_no_gradient(policy, monkeypatch):
    def gradients() -> list[torch.Tensor]:
        head = make_head(policy, 31)
        trainer = HeadTrainer(policy, head, HeadTraining(unroll=2))
        batch = pack(SEQUENCES, policy.device)
        trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
        return [parameter.grad for parameter in head.parameters()]

    whole = gradients()
    monkeypatch.setattr("paceline.drafting.training.CHUNK_ELEMENTS", {"cpu": 97 * 4})
    for ours, theirs in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_drafted_tokens_stay_within_what_the_policy_sampled():
    batch = pack(SEQUENCES, torch.device("cpu"))
    for step in range(4):
        expected = []
        for s in SEQUENCES:
            for i in range(len(s.loss_mask)):
                window = range(i - step, i + 1)
                expected.append(
                    window[0] >= 0 and all(s.loss_mask[j] for j in window) and s.prompt_length + i - step >= 2
                )
        assert drafted_tokens(batch, step).tolist() == expected


def test_head_training_leaves_the_policy_unchanged(policy):
    """Not even where the policy's own graph is alive, as it is when head and policy learn from one forward
    pass.
    """
    head = make_head(policy)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trainer = HeadTrainer(policy, head, HeadTraining(unroll=2, lr=0.1))
    batch = pack(SEQUENCES, policy.device)
    for _ in range(2):
        capture = Capture(head.config.captured_layers)
        hidden_TE = policy(batch.tokens_T, batch.attention.positions_T, batch.attention, capture)
        assert hidden_TE.requires_grad
        trainer.accumulate(batch, hidden_TE, capture.states_TE)
        assert all(p.grad is None for p in policy.parameters())
        trainer.update()
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert not torch.equal(head.head.weight, policy.head.weight)
    assert not {p.data_ptr() for p in head.parameters()} & {p.data_ptr() for p in policy.parameters()}


def test_head_gradient_is_clipped_and_scaled_by_itself(policy):
    """The step does not depend on how many sequences were accumulated, and a huge gradient takes a bounded
    step.
    """
    norms = []
    for repeats in (1, 3):
        head = make_head(policy)
        trainer = HeadTrainer(policy, head, HeadTraining())
        for _ in range(repeats):
            batch = pack(SEQUENCES, policy.device)
            trainer.accumulate(batch, *teacher_states(policy, batch, head.config.captured_layers))
        norms.append(trainer.update().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0


def test_fresh_head_layer_writes_nothing_at_first_and_learns_in_every_part(policy):
    head = EagleHead(config_for(policy.config), torch.float64).initialise(policy, 0)
    batch = pack(SEQUENCES, policy.device)
    hidden, captured = teacher_states(policy, batch, head.config.captured_layers)
    with torch.no_grad():
        x = next(unroll(head, captured, policy.embedding.weight, batch, 1))
        assert torch.equal(x, head.features(captured)[(batch.predictors_R - 1).clamp(min=0)])
    trainer = HeadTrainer(policy, head, HeadTraining(unroll=2))
    reached = []
    for _ in range(2):
        trainer.accumulate(batch, hidden, captured)
        reached.append({name for name, parameter in head.named_parameters() if parameter.grad.any()})
        trainer.update()
    everything = {name for name, _ in head.named_parameters()}
    assert everything - reached[0] and reached[1] == everything


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_head_learns_in_either_precision(folder, dtype):
    policy = load_policy(folder, dtype)
    head = EagleHead(config_for(policy.config), dtype)
    head.initialise(policy, 0)
    reports = []
    settings = HeadTraining(steps=30, lr=3e-3, unroll=2, batch_sequences=4)
    train_offline(
        policy,
        head,
        [make_sequence(3, 8, seed) for seed in range(8)],
        settings,
        lambda step, report: reports.append(report),
    )
    assert head.fc.weight.dtype == dtype
    assert (
        reports[-1].divergence[0] < 0.6 * reports[0].divergence[0]
        and reports[-1].divergence[1] < 0.8 * reports[0].divergence[1]
    )


def test_train_offline_refuses_sequences_without_anything_to_learn(policy):
    with pytest.raises(ValueError, match="none of the 1 responses"):
        train_offline(
            policy, make_head(policy), [make_sequence(3, 2, observed=(0, 1))], HeadTraining(steps=1)
        )


def test_draft_vocabulary_is_what_responses_use():
    sequences = [
        TrainingSequence((1, 1, 1, 50, 60, 50, 70), 3, (True, True, True, False), (0.0,) * 4, 0.0, 1.0)
    ]
    assert choose_vocabulary(sequences, 97, (2,), 3) == [2, 50, 60]
    assert choose_vocabulary(sequences, 97, (2,), 5) == [0, 1, 2, 50, 60], (
        "prompts and observations do not count"
    )
    assert choose_vocabulary(sequences, 97, (2,), 97) == list(range(97))
