"""Tokens, logprobs and truncation against brute force; rows do not influence each other."""

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paceline.kernels import noise
from paceline.kernels.sampler import sample, sample_triton, sample_truncated


def inputs(num_rows, vocab_size, scale=3.0):
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.3, 2.0]).repeat(-(-num_rows // 5))[:num_rows]
    seed, position = torch.randint(-(2**62), 2**62, (num_rows,)), torch.randint(0, 9999, (num_rows,))
    return torch.randn(num_rows, vocab_size) * scale, temperature, seed, position


def brute_force(logits, temperature, seed, position):
    tokens, logprobs = [], []
    for row in range(logits.shape[0]):
        hot = temperature[row] > 0
        scaled = logits[row] / (temperature[row] if hot else 1.0)
        scores = scaled + noise.gumbel(seed[row], position[row], logits.shape[1]) if hot else scaled
        token = max(range(len(scores)), key=lambda t: (scores[t].item(), -t))
        tokens.append(token)
        logprobs.append(torch.log_softmax(scaled.double(), 0)[token])
    return torch.tensor(tokens), torch.stack(logprobs)


def test_sample_reference_is_brute_force():
    case = inputs(5, 3001)
    tokens, logprobs = brute_force(*case)
    actual, actual_logprobs = sample.reference(*case)
    assert torch.equal(actual, tokens)
    torch.testing.assert_close(actual_logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [130, pytest.param(5001, marks=pytest.mark.slow)])
def test_sample_kernel_gives_the_references_tokens(device, vocab_size):
    case = inputs(5, vocab_size)
    token, logprob = sample_triton(*(t.to(device) for t in case))
    expected, expected_logprob = sample.reference(*case)
    assert torch.equal(token.cpu(), expected)
    torch.testing.assert_close(logprob.cpu(), expected_logprob, rtol=1e-5, atol=1e-5)


def test_sample_breaks_ties_by_the_lowest_id(device):
    logits = torch.zeros(2, 5000)
    logits[:, [4999, 4000, 700, 701]] = 5.0
    case = [
        t.to(device)
        for t in (
            logits,
            torch.zeros(2),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
        )
    ]
    assert (
        sample_triton(*case)[0].tolist()
        == [700, 700]
        == sample.reference(*(t.cpu() for t in case))[0].tolist()
    )


def test_sample_of_a_row_of_nan_gives_a_token_that_exists_and_no_logprob(device):
    logits, *noise_of = inputs(3, 2500)
    logits[1] = torch.nan
    logits[2, 2499] = torch.nan
    token, logprob = sample_triton(logits.to(device), *(t.to(device) for t in noise_of))
    assert ((token >= 0) & (token < 2500)).all()
    assert logprob.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("vocab_size", [130, 5001])
def test_truncation_of_some_rows_leaves_the_others_bits(device, vocab_size):
    """In a mixed batch every row takes the truncating path; alone, a row without truncation does not."""
    case = [t.to(device) for t in inputs(10, vocab_size)]
    whole = torch.arange(10, device=device) < 5
    top_k = torch.where(whole, 0, 7)
    top_p = torch.where(whole, 1.0, 0.9)
    min_p = torch.zeros(10, device=device)
    token, logprob, log_mass = sample_truncated(*case, top_k, top_p, min_p)
    alone_token, alone_logprob = sample(*case)
    assert torch.equal(token[whole], alone_token[whole]) and torch.equal(logprob[whole], alone_logprob[whole])
    assert (log_mass[whole] == 0).all() and (log_mass[~whole] < 0).all()


@pytest.mark.slow
def test_sample_never_draws_masked_logits(device):
    logits, temperature, seed, position = inputs(5, 5000)
    logits[:, :4500] = -torch.inf  # whole chunks are empty
    token, logprob = sample_triton(*(t.to(device) for t in (logits, temperature, seed, position)))
    assert (token >= 4500).all() and torch.isfinite(logprob).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_sample_cpu_rows_are_invariant(threads, set_num_threads):
    set_num_threads(threads)
    case = inputs(6, 40000)
    truncation = (
        torch.tensor([0, 50, 0, 7, 0, 0]),
        torch.tensor([1.0, 0.9, 0.8, 1.0, 0.5, 1.0]),
        torch.tensor([0, 0, 0, 0, 0, 0.05]),
    )
    plain, truncated = sample.reference(*case), sample_truncated(*case, *truncation)
    for row in range(6):
        one = slice(row, row + 1)
        for whole, part in (
            (plain, sample.reference(*(t[one] for t in case))),
            (truncated, sample_truncated(*(t[one] for t in (*case, *truncation)))),
        ):
            assert all(torch.equal(w[one], p) for w, p in zip(whole, part, strict=True)), row


@pytest.mark.gpu
def test_sample_gpu_rows_are_invariant():
    case = [t.cuda() for t in inputs(64, 151936)]
    token, logprob = sample_triton(*case)
    expected, expected_logprob = sample.reference(*(t.cpu() for t in case))
    assert torch.equal(token.cpu(), expected)
    torch.testing.assert_close(logprob.cpu(), expected_logprob, rtol=1e-5, atol=1e-5)
    for row in (0, 1, 17, 63):
        one = sample_triton(*(t[row : row + 1] for t in case))
        assert torch.equal(one[0], token[row : row + 1]) and torch.equal(one[1], logprob[row : row + 1])
        truncation = torch.tensor([40]).cuda(), torch.tensor([0.9]).cuda(), torch.tensor([0.01]).cuda()
        alone = sample_truncated(*(t[row : row + 1] for t in case), *truncation)
        together = sample_truncated(*case, *(t.expand(64) for t in truncation))
        assert all(torch.equal(a, t[row : row + 1]) for a, t in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "top_k, top_p, min_p",
    [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1), (40, 0.7, 0.02), (1, 0.1, 0.9)],
)
def test_truncation_keeps_what_hugging_face_keeps(top_k, top_p, min_p):
    num_rows = 4000
    logits = (torch.randn(1, 60, dtype=torch.float64) * 2).expand(num_rows, -1)
    temperature = torch.full((num_rows,), 1.5)
    seed = torch.arange(num_rows)
    position = torch.arange(num_rows)
    token, logprob, log_mass = sample_truncated(
        logits,
        temperature,
        seed,
        position,
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
    )
    scaled = expected = logits[:1] / 1.5
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    kept = torch.isfinite(expected[0])
    assert kept[token].all() and set(token.tolist()) >= set(
        torch.nonzero(kept & (scaled.softmax(-1)[0] > 0.01)).squeeze(1).tolist()
    )
    mass = scaled.softmax(-1)[0][kept].sum().log()
    torch.testing.assert_close(log_mass, mass.expand(num_rows), rtol=0, atol=1e-9)
    torch.testing.assert_close(logprob, scaled.log_softmax(-1)[0][token], rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_truncated_sampling_can_be_captured():
    case = [t.cuda() for t in inputs(4, 5000)]
    truncation = torch.full((4,), 50).cuda(), torch.full((4,), 0.9).cuda(), torch.zeros(4).cuda()
    expected = sample_truncated(*case, *truncation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample_truncated(*case, *truncation)
    graph.replay()
    assert all(torch.equal(c, e) for c, e in zip(captured, expected, strict=True))
