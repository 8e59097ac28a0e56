"""Attention to a prefix and a diagonal, in blocks and by the flash kernel, against one softmax over both."""

import pytest
import torch

from paceline.drafting import draft_attention
from paceline.drafting.draft_attention import BlockedPrefix, PrefixAndDiagonal, flash_prefixes
from paceline.policy.attention import PackedAttention

# Prompt and response tokens of packed sequences: a lone token before the response, a long one, a short one.
SEQUENCES = [(1, 6), (40, 130), (2, 3), (7, 69), (3, 1)]
# Prompts so long that every query sees a key of the prefix.
LONG_PROMPTS = [(9, 6), (40, 30)]
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64


def draw(step: int, dtype: torch.dtype, device: str, sequences=SEQUENCES) -> list[torch.Tensor]:
    """Returns q, the prefix's k and v, own k and own v, the last gradient, all random."""
    generator = torch.Generator().manual_seed(step)
    tokens, rows = (sum(sizes) for sizes in zip(*[(p + r, r) for p, r in sequences], strict=True))
    few, all_heads = (KV_HEADS, HEAD_DIM), (HEADS, HEAD_DIM)
    shapes = [(rows, *all_heads), (tokens, *few), (tokens, *few)]
    shapes += [(step, rows, *few), (step, rows, *few), (rows, *all_heads)]
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def expected(tensors: list[torch.Tensor], step: int, sequences=SEQUENCES) -> list[torch.Tensor]:
    """Returns the result and all gradients, from one softmax per query in float64."""
    q, k, v, own_k, own_v, grad = (t.detach().double().cpu() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v, own_k, own_v)]
    k, v, own_k, own_v = (t.repeat_interleave(HEADS // KV_HEADS, -2) for t in leaves[1:])
    if step:  # the key that a row sees of an earlier step is an earlier row's
        own_k, own_v = (
            torch.stack([rows.roll(step - 1 - i, 0) for i, rows in enumerate(t)]) for t in (own_k, own_v)
        )
    out, row, start = [], 0, 0
    for prompt, response in sequences:
        for place in range(response):
            visible = slice(start, start + max(0, prompt - 2 + place - step + 1))
            keys = torch.cat([k[visible], own_k[:, row]])
            values = torch.cat([v[visible], own_v[:, row]])
            weights = (torch.einsum("hd,khd->kh", q[row], keys) * HEAD_DIM**-0.5).softmax(0)
            # Where there is no key, the result is zero: it is not used, but its gradient must be a number.
            out.append(torch.einsum("kh,khd->hd", weights, values) if len(keys) else torch.zeros_like(q[row]))
            row += 1
        start += prompt + response
    result = torch.stack(out)
    result.backward(grad)
    return [result.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def computed(prefix, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors[:-1]]
    out = PrefixAndDiagonal.apply(prefix, *leaves)
    out.backward(tensors[-1])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def packed(device: str, sequences=SEQUENCES) -> tuple[PackedAttention, PackedAttention]:
    tokens = PackedAttention([p + r for p, r in sequences], torch.device(device))
    return tokens, PackedAttention([r for _, r in sequences], torch.device(device))


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.slow) for step in (0, 3))])
@pytest.mark.parametrize("block_scores", [pytest.param(1 << 24, marks=pytest.mark.slow), 5000])
def test_blocked_prefix_equals_one_softmax(monkeypatch, step, block_scores):
    monkeypatch.setattr(draft_attention, "BLOCK_SCORES", block_scores)
    tensors = draw(step, torch.float64, "cpu")
    tokens, rows = packed("cpu")
    entries = [torch.arange(p - 2, p - 2 + r) for p, r in SEQUENCES]
    prefix = BlockedPrefix(tokens, rows, torch.cat(entries), step)
    for ours, theirs in zip(computed(prefix, tensors), expected(tensors, step), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [SEQUENCES, LONG_PROMPTS], ids=["short", "long"])
@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_flash_prefix_equals_one_softmax(step, sequences):
    tensors = draw(step, torch.bfloat16, "cuda", sequences)
    tokens, rows = packed("cuda", sequences)
    prefix = flash_prefixes(tokens.lengths, rows.lengths, 6, torch.device("cuda"))[step]
    for ours, theirs in zip(computed(prefix, tensors), expected(tensors, step, sequences), strict=True):
        if not theirs.numel():  # step 0 has no keys of its own
            continue
        assert ours.isfinite().all()
        error = (ours.double().cpu() - theirs).norm() / theirs.norm()
        assert error < 0.01, error


class PlainFlash:
    """What the flash kernels compute: causal attention of packed sequences, aligned to their ends."""

    def parts(self, q, k, query_bounds, key_bounds, scale):
        for start, stop, first, last in zip(
            query_bounds[:-1], query_bounds[1:], key_bounds[:-1], key_bounds[1:], strict=True
        ):
            queries, keys = slice(int(start), int(stop)), slice(int(first), int(last))
            wide = k[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
            places = torch.arange(stop - start)[:, None] + (last - first) - (stop - start)
            hidden = torch.arange(last - first)[None] > places
            scores = torch.einsum("qhd,khd->hqk", q[queries], wide) * scale
            yield queries, keys, scores.masked_fill(hidden, -torch.inf)

    def forward(self, q, k, v, query_bounds, key_bounds, max_q, max_k, dropout, causal, mask, *, scale):
        assert causal and max_q == query_bounds.diff().max() and max_k == key_bounds.diff().max()
        out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan, dtype=q.dtype)
        for queries, keys, scores in self.parts(q, k, query_bounds, key_bounds, scale):
            wide = v[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
            out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), wide)
            lse[:, queries] = scores.logsumexp(-1).masked_fill((scores == -torch.inf).all(-1), torch.inf)
        return out, lse, None, None, None

    def backward(
        self, grad, q, k, v, out, lse, query_bounds, key_bounds, max_q, max_k, dropout, causal, *rest, scale
    ):
        groups = (k.shape[1], -1)
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys, scores in self.parts(q, k, query_bounds, key_bounds, scale):
            weights = (scores - lse[:, queries, None]).exp()
            wide_k, wide_v = (x[keys].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            own = (grad[queries] * out[queries]).sum(-1).t()[..., None]
            slopes = weights * (torch.einsum("qhd,khd->hqk", grad[queries], wide_v) - own) * scale
            grad_q[queries] = torch.einsum("hqk,khd->qhd", slopes, wide_k)
            for total, part in (
                (grad_k, torch.einsum("hqk,qhd->khd", slopes, q[queries])),
                (grad_v, torch.einsum("hqk,qhd->khd", weights, grad[queries])),
            ):
                total[keys] = part.unflatten(1, groups).sum(2)
        return grad_q, grad_k, grad_v


@pytest.mark.parametrize("sequences", [SEQUENCES, LONG_PROMPTS], ids=["short", "long"])
@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.slow) for step in (0, 1, 2, 5)), 3])
def test_flash_prefix_inputs_make_one_softmax(step, sequences, monkeypatch):
    """On a CPU, with plain products in the kernel's place: its bounds, and queries of zeros."""
    plain = PlainFlash()
    monkeypatch.setattr(draft_attention, "flash_forward", plain.forward)
    monkeypatch.setattr(draft_attention, "flash_backward", plain.backward)
    tensors = draw(step, torch.float64, "cpu", sequences)
    tokens, rows = packed("cpu", sequences)
    prefix = flash_prefixes(tokens.lengths, rows.lengths, 6, torch.device("cpu"))[step]
    assert (prefix.blind_R1 is None) == (sequences is LONG_PROMPTS)
    for ours, theirs in zip(computed(prefix, tensors), expected(tensors, step, sequences), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.gpu
def test_draft_attention_memory_is_linear_in_the_length():
    """A response of 16,000 tokens: all pairs of scores would take 4.6 GB for these nine heads."""
    length, heads, step = 16_000, 9, 2
    lengths = [length + 2]
    device = torch.device("cuda")
    q = torch.randn(length, heads, HEAD_DIM, dtype=torch.bfloat16, device=device, requires_grad=True)
    k, v = (torch.randn(length + 2, heads, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    own = torch.randn(2, step, length, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefix = flash_prefixes(lengths, [length], step + 1, device)[step]
    PrefixAndDiagonal.apply(prefix, q, k, v, own[0], own[1]).float().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1e9


def prefix_of(sequences, step: int) -> BlockedPrefix:
    tokens, rows = packed("cpu", sequences)
    entries = [torch.arange(p - 2, p - 2 + r) for p, r in sequences]
    return BlockedPrefix(tokens, rows, torch.cat(entries), step)


@pytest.mark.slow
def test_draft_attention_at_the_end_of_a_long_text_sees_all_of_it():
    """One softmax over all keys of 16,000 tokens; none of them is too far away."""
    sequences = [(15_997, 3), (5, 2)]
    tensors = draw(1, torch.float64, "cpu", sequences)
    for ours, theirs in zip(
        computed(prefix_of(sequences, 1), tensors), expected(tensors, 1, sequences), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_blocked_prefix_holds_one_block_of_scores_at_once(monkeypatch):
    """In both directions: all pairs of queries and keys of a long text would not fit."""
    monkeypatch.setattr(draft_attention, "BLOCK_SCORES", 20_000)
    held, scores = [], BlockedPrefix._scores

    def watched(self, *arguments):
        held.append(scores(self, *arguments))
        return held[-1]

    monkeypatch.setattr(BlockedPrefix, "_scores", watched)
    computed(prefix_of(SEQUENCES, 1), draw(1, torch.float32, "cpu"))
    assert max(block.numel() for block in held) <= 20_000
