"""Experts are right against a token-by-token sum, and a token's bits depend on no other token."""

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import moe, moe_routing
from paceline.kernels.linear import Tile, linear
from paceline.kernels.triton_support import INTERPRETED
from tests.kernels.cases import first

SMALL_TILE = Tile(16, 32, 32, 4, 2)


def make_weights(
    experts: int, size: int, inner: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(experts)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * shape[-1] ** -0.5).to(device, dtype)

    return matrix(experts, size), matrix(experts, 2 * inner, size), matrix(experts, size, inner)


def token_by_token(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, k: int, normalise: bool
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for row, token in enumerate(x):
        probabilities = (router @ token).softmax(-1)
        chosen = sorted(range(len(router)), key=lambda e: -probabilities[e])[:k]
        total = sum(probabilities[e] for e in chosen) if normalise else 1.0
        for e in chosen:
            gate, up = (gate_up[e] @ token).chunk(2)
            out[row] += probabilities[e] / total * (down[e] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    "experts, k, size, inner", [(8, 2, 128, 128), (5, 5, 48, 40), (128, 8, 32, 24), (1, 1, 16, 16)]
)
def test_moe_reference_is_right(experts, k, size, inner, normalise):
    weights = make_weights(experts, size, inner, torch.float64)
    x = torch.randn(37, size, dtype=torch.float64)
    out = moe.expert_feed_forward(x, *weights, k, normalise)
    torch.testing.assert_close(out, token_by_token(x, *weights, k, normalise), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("experts, k, size, inner", [(8, 2, 128, 128), (8, 3, 48, 40), (64, 8, 64, 48)])
def test_moe_cpu_tokens_are_invariant(experts, k, size, inner, dtype):
    """Any number of tokens, any place among them, neighbours that all choose the same expert or never do."""
    weights = make_weights(experts, size, inner, dtype)
    x = torch.randn(96, size, dtype=dtype)
    whole = moe.expert_feed_forward(x, *weights, k, True)
    for num_rows in range(1, 97):
        first = (num_rows * 31) % (97 - num_rows)
        rows = slice(first, first + num_rows)
        assert torch.equal(moe.expert_feed_forward(x[rows], *weights, k, True), whole[rows]), (
            f"{num_rows} tokens from {first}"
        )
    for crowd in (
        x[:1] + 1e-3 * torch.randn(96, size, dtype=dtype),
        -x[:1] * torch.rand(96, 1, dtype=dtype),
        x * 1e4,
    ):
        for place in (0, 17, 95):
            crowd[place] = x[0]
            assert torch.equal(moe.expert_feed_forward(crowd, *weights, k, True)[place], whole[0])


def test_routing_of_equal_scores_takes_the_lowest_expert():
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    _, experts = moe_routing.route_reference(scores, 3, False, torch.float32)
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("num_rows, experts, k", first(2, [(18, 128, 8), (9, 5, 3), (1, 128, 8), (4, 1, 1)]))
def test_route(device, num_rows, experts, k, normalise):
    scores = torch.randn(num_rows, experts) * 3
    scores[0, : experts // 2] = scores[0, 0]  # ties
    weights, chosen = moe_routing.route_triton(scores.to(device), k, normalise, torch.float32)
    expected_weights, expected = moe_routing.route_reference(scores, k, normalise, torch.float32)
    assert torch.equal(chosen.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights)


def test_routing_of_a_row_of_nan_stays_inside(device):
    scores = torch.randn(3, 6)
    scores[1] = torch.nan
    _, chosen = moe_routing.route_triton(scores.to(device), 2, True, torch.float32)
    assert chosen.min() >= 0 and chosen.max() < 6
    assert torch.equal(chosen[0::2].cpu().long(), scores[0::2].topk(2).indices)


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize(
    "num_rows, experts, k, rows",
    first(2, [(40, 7, 1, 16), (3, 4, 2, 2), (300, 8, 4, 16), (1, 128, 8, 16), (200, 20, 8, 64)]),
)
def test_sort_by_expert(device, num_rows, experts, k, rows, skew):
    """Every slot lies in exactly one tile, of its own expert, and the tiles that are left over say so."""
    scores = torch.rand(num_rows, experts)
    if skew:
        scores[:, 0] += 1.0
        scores[:, experts // 2] -= 1.0
    chosen = scores.topk(k).indices
    tiles = moe.sort_by_expert_triton(chosen.int().to(device), experts, rows)
    assert tiles.slots_S.cpu().sort().values.tolist() == list(range(num_rows * k))
    slots, used = tiles.slots_S.tolist(), []
    for expert, start, stop in tiles.tiles_3T.t().tolist():
        if expert >= 0:
            assert 0 < stop - start <= rows
            assert all(chosen.flatten()[slot] == expert for slot in slots[start:stop])
            assert slots[start:stop] == sorted(slots[start:stop])
            used += range(start, stop)
    assert used == list(range(num_rows * k))


@pytest.mark.parametrize(
    "num_rows, experts, k, size, inner", first(2, [(1, 16, 4, 64, 48), (5, 4, 2, 48, 32), (40, 6, 3, 32, 64)])
)
def test_moe_kernels_interpreted(num_rows, experts, k, size, inner):
    if not INTERPRETED:
        pytest.skip("kernels are compiled here, not interpreted")
    weights = make_weights(experts, size, inner, torch.float32)
    x = torch.randn(num_rows, size)
    routed = moe_routing.route_triton(x @ weights[0].t(), k, True, torch.float32)
    out = moe.experts_triton(x, *routed, *weights[1:], SMALL_TILE)
    torch.testing.assert_close(out, moe.expert_feed_forward(x, *weights, k, True), rtol=1e-5, atol=1e-5)


QWEN3_30B = (128, 2048, 768)
GPU_SHAPES = [QWEN3_30B, (8, 128, 128), (60, 576, 192)]


@pytest.mark.gpu
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_moe_kernels_on_a_gpu_are_right(shape, normalise):
    weights = make_weights(*shape, torch.bfloat16, "cuda")
    in_double = tuple(w.double().cpu() for w in weights)
    k = min(8, shape[0] // 4)
    for num_rows in (1, 2, 16, 40, 256, 1500):
        x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
        out = moe.expert_feed_forward(x, *weights, k, normalise)
        exact = moe.expert_feed_forward(x.double().cpu(), *in_double, k, normalise)
        assert (out.cpu() - exact).norm() / exact.norm() < 8e-3, num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_moe_gpu_tokens_are_invariant(shape):
    """Every batch size through its own tile, then every tile, then a crowd at one expert."""
    weights = make_weights(*shape, torch.bfloat16, "cuda")
    k = min(8, shape[0] // 4)
    x = torch.randn(3000, shape[1], device="cuda").bfloat16()
    whole = moe.expert_feed_forward(x, *weights, k, True)
    for num_rows in (*range(1, 65), 100, 128, 200, 256, 300, 511, 1024, 1700):
        first = (num_rows * 31) % (3001 - num_rows)
        rows = slice(first, first + num_rows)
        assert torch.equal(moe.expert_feed_forward(x[rows], *weights, k, True), whole[rows]), num_rows
    for tile in {moe.choose_expert_tile(slots, shape[0]) for slots in (1, 20 * shape[0], 500 * shape[0])}:
        routed = moe_routing.route_triton(linear(x, weights[0], torch.float32, True), k, True, x.dtype)
        assert torch.equal(moe.experts_triton(x, *routed, *weights[1:], tile), whole), tile
    crowd = x[:1].repeat(300, 1)
    assert torch.equal(moe.expert_feed_forward(crowd, *weights, k, True), whole[:1].repeat(300, 1))


@pytest.mark.gpu
def test_moe_gpu_graph_replays_with_other_tokens():
    """Nothing is read back by the host: a captured graph follows tokens that choose other experts."""
    weights = make_weights(*QWEN3_30B, torch.bfloat16, "cuda")
    x = torch.randn(48, QWEN3_30B[1], device="cuda").bfloat16()
    moe.expert_feed_forward(x, *weights, 8, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.expert_feed_forward(x, *weights, 8, True)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, moe.expert_feed_forward(x, *weights, 8, True))
