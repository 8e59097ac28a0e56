"""The best candidates: the kernel against the reference, the reference against sorting everything."""

import pytest
import torch

from paceline.kernels import candidates, noise
from paceline.kernels.candidates import best_candidates
from paceline.kernels.rejection import Truncation
from paceline.kernels.sampler import sample, sample_truncated


def make(rows: int, vocab: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    temperature = torch.tensor([1.0, 0.0, 0.6])[torch.arange(rows) % 3]
    return logits, temperature, torch.arange(rows) * 991 + 7, torch.arange(rows) * 3


def test_candidates_are_the_largest_logits_with_the_policys_noise():
    logits, temperature, seed, position = make(6, 50)
    logits[3, 3:] = -torch.inf  # a draft vocabulary of three tokens
    tokens, scores = best_candidates(logits, temperature, seed, position, 4)
    gumbel = noise.gumbel(seed, position, 50)
    for row in range(6):
        hot = temperature[row] > 0
        expected = logits[row] / temperature[row] + gumbel[row] if hot else logits[row]
        order = expected.argsort(descending=True)[:4].tolist()
        assert tokens[row].tolist() == (order if row != 3 else [*order[:3], -1])
        assert torch.equal(scores[row], expected[order])
    assert torch.equal(tokens[:, 0], sample(logits, temperature, seed, position)[0])


def test_candidates_within_truncation_come_first():
    logits, temperature, seed, position = make(6, 50)
    cut = Truncation(torch.tensor([2, 0, 3, 0, 1, 0]), torch.ones(6) * 0.9, torch.zeros(6))
    tokens, _ = best_candidates(logits, temperature, seed, position, 4, cut)
    arguments = cut.top_k_R, cut.top_p_R, cut.min_p_R
    first = sample_truncated(logits, temperature, seed, position, *arguments)[0]
    assert torch.equal(tokens[:, 0], first)
    assert set(tokens[0, :2].tolist()) == set(logits[0].topk(2).indices.tolist())
    assert set(tokens[2, :3].tolist()) == set(logits[2].topk(3).indices.tolist())
    assert all(len(set(row)) == 4 for row in tokens.tolist()), "what is cut follows"


def among_all(logits, vocabulary, size):
    """The logits of all tokens, of which only some are possible."""
    return torch.full((len(logits), size), -torch.inf, device=logits.device).index_copy(1, vocabulary, logits)


def test_candidates_of_some_tokens_are_those_of_all_with_the_others_impossible():
    vocabulary = torch.tensor([41, 3, 8, 9, 49, 20, 33])
    logits, *noise_of = make(6, len(vocabulary))
    logits[4, 2:] = -torch.inf  # fewer than are asked for
    ours = best_candidates(logits, *noise_of, 4, vocabulary_V=vocabulary)
    theirs = best_candidates(among_all(logits, vocabulary, 50), *noise_of, 4)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert ours[0][4].tolist()[2:] == [-1, -1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_candidates_kernel_of_some_tokens_is_the_kernel_of_all(device, count):
    vocabulary = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:2100].to(device)
    logits, *noise_of = (tensor.to(device) for tensor in make(3, 2100))
    ours = candidates.best_candidates_triton(logits, *noise_of, count, vocabulary_V=vocabulary)
    theirs = candidates.best_candidates_triton(among_all(logits, vocabulary, 5000), *noise_of, count)
    reference = candidates._best_candidates.reference(logits, *noise_of, count, vocabulary_V=vocabulary)
    for number in (0, 1):
        assert torch.equal(ours[number], theirs[number])
        assert torch.equal(ours[number], reference[number])


@pytest.mark.slow
def test_candidates_kernel_is_the_reference(device):
    for vocab in (3, 97, 2500):
        arguments = [tensor.to(device) for tensor in make(3, vocab)]
        arguments[0][1, : vocab - 1] = -torch.inf
        ours = candidates.best_candidates_triton(*arguments, 4)
        reference = candidates._best_candidates.reference(*arguments, 4)
        assert torch.equal(ours[0], reference[0])
        assert torch.equal(ours[1], reference[1])


@pytest.mark.slow
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_candidates_of_rows_of_nan_are_none(device, bad):
    logits, *others = (tensor.to(device) for tensor in make(3, 97))
    logits[1] = bad
    tokens, _ = candidates.best_candidates_triton(logits, *others, 4)
    assert (tokens[[0, 2]] >= 0).all() and (tokens[1] == -1).all()
