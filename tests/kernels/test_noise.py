"""The noise is Philox, Gumbel distributed, resolves the winning end, and does not depend on the shape."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.kernels import noise


def python_philox(counter, key, rounds):
    """Philox4x32 with Python's own integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_philox_in_python_matches_the_published_vector():
    """Random123's known-answer test for philox4x32-10 (the round count is the only thing we change)."""
    ones = 0xFFFFFFFF
    assert python_philox([ones] * 4, [ones] * 2, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_random_bits_equal_python_philox():
    for seed, position, stream in [(0, 0, 0), (-1, 2**31 - 1, 2), (0x123456789ABCDEF, 77, 1)]:
        bits = noise.random_bits(torch.tensor(seed), torch.tensor(position), 10, stream)
        expected = []
        for group in range(3):
            expected += python_philox(
                [group, position, stream, 0], [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], noise.ROUNDS
            )
        assert bits.tolist() == expected[:10]


def test_noise_of_some_tokens_is_what_they_have_among_all():
    seed, position = torch.tensor([3, -9, 2**40]), torch.tensor([0, 5, 2**31 - 1])
    tokens = torch.tensor([7, 0, 39, 4, 5, 6, 22])
    ours, theirs = noise.gumbel_of(seed, position, tokens), noise.gumbel(seed, position, 40)[:, tokens]
    assert torch.equal(ours, theirs)
    assert len(ours.unique()) == ours.numel()


def test_gumbel_follows_the_formula_to_float32_rounding():
    bits = torch.cat(
        [torch.arange(0, 2**12), torch.randint(0, 2**32, (2**16,)), torch.arange(2**32 - 2**12, 2**32)]
    )
    v = (bits.float() * 2.0**-32 + 2.0**-33).double().clamp(max=1 - 2.0**-24)  # coarse only at the losing end
    expected = -torch.log(-torch.log1p(-v))
    torch.testing.assert_close(noise.gumbel_from_bits(bits).double(), expected, rtol=1e-6, atol=1e-6)


def test_gumbel_winning_end_is_fine_and_finite():
    smallest = torch.arange(0, 2**20)
    values = noise.gumbel_from_bits(smallest)
    assert values.max() > 22.8 and (values.diff() < 0).all(), "neighbouring draws near v = 0 must not tie"
    assert torch.isfinite(noise.gumbel_from_bits(torch.tensor([2**32 - 1, 0]))).all()


def test_noise_distribution_is_gumbel():
    values = noise.gumbel(torch.arange(64), torch.arange(64) * 7, 4096).flatten().double().numpy()
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-3


def test_noise_of_streams_seeds_and_positions_is_independent():
    base = noise.gumbel(torch.tensor(5), torch.tensor(9), 20000)
    for other in (
        noise.gumbel(torch.tensor(6), torch.tensor(9), 20000),
        noise.gumbel(torch.tensor(5), torch.tensor(10), 20000),
        noise.gumbel(torch.tensor(5 + 2**32), torch.tensor(9), 20000),
        noise.gumbel(torch.tensor(5), torch.tensor(9), 20000, noise.STREAM_RECOVER),
    ):
        assert abs(np.corrcoef(base.numpy(), other.numpy())[0, 1]) < 5 / math.sqrt(20000)


def test_gumbel_argmax_samples_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    count = 40000
    noise_values = noise.gumbel(torch.arange(count), torch.full((count,), 3), 5)
    drawn = torch.bincount((logits + noise_values).argmax(-1), minlength=5).numpy()
    assert stats.chisquare(drawn, count * torch.softmax(logits.double(), 0).numpy()).pvalue > 1e-4


def test_noise_does_not_depend_on_the_shape():
    seeds, positions = torch.randint(-(2**62), 2**62, (3, 5)), torch.randint(0, 9999, (3, 5))
    whole = noise.gumbel(seeds, positions, 131)
    assert torch.equal(whole[1, 2], noise.gumbel(seeds[1, 2], positions[1, 2], 131))
    assert torch.equal(whole[..., :17], noise.gumbel(seeds, positions, 17))


def test_noise_triton_twin_is_bit_equal(device):
    seeds, positions = torch.randint(-(2**62), 2**62, (5,)), torch.randint(0, 2**20, (5,))
    expected = noise.gumbel(seeds, positions, 3001, noise.STREAM_ACCEPT)
    actual = noise.draw_gumbel_triton(seeds.to(device), positions.to(device), 3001, noise.STREAM_ACCEPT)
    assert torch.equal(actual.cpu(), expected)


def test_noise_of_each_column_of_a_table_is_its_own(device):
    """A flattened column is a view whose rows do not lie side by side."""
    seeds, positions = torch.randint(-(2**62), 2**62, (5, 2)), torch.randint(0, 2**20, (5, 2))
    columns = (x.to(device)[:, :1].flatten() for x in (seeds, positions))
    actual = noise.draw_gumbel_triton(*columns, 70, noise.STREAM_SAMPLE)
    assert torch.equal(actual.cpu(), noise.gumbel(seeds[:, 0], positions[:, 0], 70))


@pytest.mark.gpu
def test_noise_on_a_gpu_equals_the_cpu_over_1e8_values():
    rows, vocab_size = 64, 151936
    for start in range(0, 704, rows):
        seeds = torch.arange(start, start + rows) * 0x9E3779B97F4A7C15 % 2**62 - 2**61
        positions = torch.arange(start, start + rows) * 37
        actual = noise.draw_gumbel_triton(seeds.cuda(), positions.cuda(), vocab_size, noise.STREAM_SAMPLE)
        assert torch.equal(actual.cpu(), noise.gumbel(seeds, positions, vocab_size))
        assert torch.equal(actual, noise.gumbel(seeds.cuda(), positions.cuda(), vocab_size)), (
            "torch on the GPU agrees too"
        )
