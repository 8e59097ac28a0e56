"""Prefill attention of the fast mode: right in both ways of reading keys, and chosen where it should be."""

from collections.abc import Iterator

import pytest
import torch

from paceline.kernels import prefill_attention as prefill
from paceline.kernels import prefill_flat as flat
from paceline.kernels.attention_tiles import AttentionShape
from paceline.kernels.fp8_format import E4M3, from_e4m3, to_e4m3
from paceline.kernels.prefill_attention import prefill_attention
from tests.gpu_path import META, on_gpu
from tests.kernels.test_attention import brute_force, caches, finite, forget

# Chunks that begin in the middle of a tile, at its start, behind many of them and not at all; the last one
# ends in a tile that the block table, of 13 blocks, does not fill.
CONTEXT, LENGTHS = [0, 50, 100, 33, 128, 150], [70, 0, 9, 40, 33, 50]
BLOCKS = 13
H200_SHARED = 232_448


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Makes unwritten memory NaN, which is what torch does to have every run fail alike."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def chunks(lengths: list[int], context: list[int], device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return boundaries, torch.tensor(context, dtype=torch.int32, device=device)


def quantised(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An E4M3 cache and its scales, which are unlike for K and V and for every head."""
    k_scale, v_scale = (torch.rand(k.shape[2]) / 50 + 0.005 for _ in range(2))
    return to_e4m3(k.float() / k_scale[:, None]), to_e4m3(v.float() / v_scale[:, None]), k_scale, v_scale


def check(device, heads, rows, tile, gathered, fp8=False, dtype=torch.float32):
    num_heads, num_kv_heads, head_dim = heads
    boundaries, context = chunks(LENGTHS, CONTEXT)
    k, v, table = caches(num_kv_heads, head_dim, len(LENGTHS), BLOCKS * 16, dtype=dtype)
    forget(k, v, table, [start + length for start, length in zip(CONTEXT, LENGTHS, strict=True)])
    scales = ()
    if fp8:
        k, v, *scales = quantised(k, v)
        assert k.float().isnan().any(), "unwritten"
        known = [to_e4m3(cache.float().nan_to_num(7.0)) for cache in (k, v)]
    else:
        known = finite(k, v)
    q = torch.randn(sum(LENGTHS), num_heads, head_dim).to(dtype)
    expected = prefill_attention.reference(q, *known, table, boundaries, context, *scales)
    moved = (t.to(device) for t in (q, k, v, table, boundaries, context, *scales))
    if not fp8:
        moved = (*moved, None, None)
    out = flat.flat_attention_triton(*moved, gathered=gathered, rows=rows, tile=tile).cpu()
    close = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(out.float(), expected.float(), **close)
    if fp8:
        k, v = (from_e4m3(x) * scale[:, None] for x, scale in zip(known, scales, strict=True))
    for token, row, position in ((69, 0, 69), (70, 2, 100), (150, 4, 159), (201, 5, 199)):
        exact = brute_force(q[token], k, v, table[row], position)
        torch.testing.assert_close(out[token].double(), exact, **close)


@pytest.mark.parametrize("gathered", [False, True], ids=["pointers", "gathered"])
@pytest.mark.parametrize(
    "heads, rows, tile",
    [
        pytest.param((4, 2, 32), 16, 32, id="small"),
        pytest.param((14, 2, 64), 64, 32, id="groups of 7", marks=pytest.mark.slow),
        pytest.param((4, 2, 32), flat.QUERY_ROWS, flat.FLAT_TILE, id="as on a GPU", marks=pytest.mark.slow),
    ],
)
def test_flat_kernel(device, unwritten_is_nan, heads, rows, tile, gathered):
    if device == "cuda":
        rows, tile = flat.QUERY_ROWS, flat.FLAT_TILE
    check(device, heads, rows, tile, gathered, dtype=torch.float32 if device == "cpu" else torch.bfloat16)


@pytest.mark.parametrize(
    "half, heads, rows",
    [
        pytest.param(False, (4, 2, 32), 16, id="small"),
        pytest.param(False, (14, 2, 64), 64, id="groups of 7", marks=pytest.mark.slow),
        pytest.param(True, (14, 2, 64), 64, id="half, groups of 7", marks=pytest.mark.slow),
    ],
)
def test_flat_kernel_over_an_e4m3_cache(device, unwritten_is_nan, half, heads, rows):
    """The interpreter has no products in bfloat16, and float32 takes another kernel on a GPU."""
    rows, tile = (rows, 32) if device == "cpu" else (flat.QUERY_ROWS, flat.FLAT_TILE)
    dtype = torch.float16 if half else torch.float32 if device == "cpu" else torch.bfloat16
    check(device, heads, rows, tile, gathered=True, fp8=True, dtype=dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "E4M3"])
def test_gathered_keys_are_the_caches_numbers(device, unwritten_is_nan, dtype, fp8):
    """Exactly; zeros up to the end of the last tile; and nothing after that, or where it is not asked for."""
    tile, span = 32, 224
    boundaries, context = chunks(LENGTHS, CONTEXT)
    k, v, table = caches(2, 32, len(LENGTHS), BLOCKS * 16, dtype=dtype)
    if fp8:
        k, v, _, _ = quantised(k.nan_to_num(0.0), v.nan_to_num(0.0))
        numbers = torch.arange(256, dtype=torch.uint8)
        numbers[numbers.view(E4M3).float().isnan()] = 0
        k[table[0, 0], :4].view(-1)[:] = numbers.view(E4M3)  # every number there is
    wide = [from_e4m3(x) if fp8 else x.float() for x in (k, v)]
    k, v, *packing = (t.to(device) for t in (k, v, table, boundaries, context))
    shape = AttentionShape(4, 2, 32, 16, 16, 2, fp8, tile)
    gathered = flat._gather((k, v), tuple(packing), shape, dtype)
    for cache, x in zip(wide, gathered, strict=True):
        assert x.dtype == dtype
        x = x.cpu().float().view(2, len(LENGTHS), span, 32)
        for row, (start, length) in enumerate(zip(CONTEXT, LENGTHS, strict=True)):
            end = start + length if length else 0
            read = -(-end // tile) * tile
            expected = cache[table[row].long()].flatten(0, 1)[:end].transpose(0, 1)
            assert torch.equal(x[:, row, :end], expected)
            assert (x[:, row, end:read] == 0).all() and x[:, row, read:].isnan().all()


def test_gathering_pays_for_long_chunks(monkeypatch):
    monkeypatch.setattr(flat, "has_tma", lambda device: True)

    def pays(tokens, sequences=1, keys=30_000, heads=(32, 8), dtype=torch.bfloat16, cache=None):
        q = torch.empty(tokens, heads[0], 128, dtype=dtype, device=META)
        k_cache = torch.empty(4, 16, heads[1], 128, dtype=cache or dtype, device=META)
        table = torch.empty(sequences, -(-keys // 16), dtype=torch.int32, device=META)
        return flat.gathering_pays(q, k_cache, table)

    assert pays(512) and pays(8192, sequences=4) and pays(8192, sequences=16, keys=2000)
    assert not pays(8192, sequences=8, keys=1024) and not pays(2048, keys=4096), "launches take longer"
    assert pays(8192, sequences=8, keys=1024, cache=E4M3), "or no flat tiles"
    assert not pays(16_384, sequences=5), "too much memory"
    assert not pays(16_384, sequences=5, cache=E4M3)
    assert not pays(8192, dtype=torch.float32, cache=E4M3)
    monkeypatch.setattr(flat, "has_tma", lambda device: False)
    assert not pays(8192) and not pays(8192, cache=E4M3)


def test_prefill_kernel_choice(monkeypatch):
    """By mode, length, cache and GPU."""
    monkeypatch.setattr(flat, "shared_memory", lambda device: H200_SHARED)
    monkeypatch.setattr(prefill, "flat_attention_triton", lambda *inputs: f"flat, gathered {inputs[-1]}")
    monkeypatch.setattr(prefill, "prefill_attention_triton", lambda *inputs, **scales: "groups")

    def chosen(tokens, deterministic=False, tma=True, cache=torch.bfloat16, head_dim=128, width=600):
        monkeypatch.setattr(flat, "has_tma", lambda device: tma)
        q = torch.empty(tokens, 32, head_dim, dtype=torch.bfloat16, device=META)
        k = torch.empty(4, 16, 8, head_dim, dtype=cache, device=META)
        table = torch.empty(1, width, dtype=torch.int32, device=META)
        bounds, context = (torch.empty(n, dtype=torch.int32, device=META) for n in (2, 1))
        with on_gpu():
            return prefill_attention(q, k, k, table, bounds, context, deterministic=deterministic)

    assert chosen(8192, deterministic=True) == chosen(511) == chosen(8192, head_dim=256) == "groups"
    assert chosen(8192, deterministic=True, cache=E4M3) == chosen(511, cache=E4M3) == "groups"
    assert chosen(8192) == chosen(8192, cache=E4M3) == "flat, gathered True"
    assert chosen(8192, tma=False) == chosen(1000) == "flat, gathered False"
    assert chosen(600, width=40) == "groups", "launches take longer"
    assert chosen(8192, tma=False, cache=E4M3) == "groups"


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "E4M3"])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(32, 8), (28, 4), (8, 8)])
def test_flat_prefill_of_a_long_chunk_is_brute_force(num_heads, num_kv_heads, fp8):
    """At the tiles that the engine's fast mode takes, behind a long context, query by query in float64."""
    k, v, table = caches(num_kv_heads, 128, 1, 8192, dtype=torch.bfloat16)
    forget(k, v, table, [7501])
    scales = ()
    if fp8:
        k, v, *scales = quantised(k, v)
    q = torch.randn(1500, num_heads, 128, dtype=torch.bfloat16)
    assert flat.flat_tiles_pay(q.cuda(), 1, 8192)
    moved = (t.cuda() for t in (q, k, v, table, *chunks([1500], [6001]), *scales))
    out = prefill_attention(*moved, deterministic=False).cpu()
    if fp8:
        k, v = (from_e4m3(x) * scale[:, None] for x, scale in zip((k, v), scales, strict=True))
    for j in (0, 1, 15, 127, 128, 700, 1499):
        expected = brute_force(q[j], k, v, table[0], 6001 + j)
        assert (out[j].double() - expected).norm() / expected.norm() < 1e-2, j


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dim, dtype, fp8",
    [
        (128, torch.bfloat16, False),
        (64, torch.bfloat16, False),
        (128, torch.float16, False),
        (128, torch.float32, False),
        (64, torch.float32, False),
        (128, torch.bfloat16, True),
        (64, torch.float16, True),
    ],
)
# Long enough for large tiles, not, and so on average.
@pytest.mark.parametrize("lengths", [[1300], [40, 7, 129, 600], [700, 0, 1500, 900]])
def test_fast_prefill_is_the_deterministic_one_up_to_rounding(lengths, head_dim, dtype, fp8):
    k, v, table = caches(2, head_dim, len(lengths), 2048, dtype=dtype)
    context = [77, 0, 300, 1001][: len(lengths)]
    forget(k, v, table, [start + length for start, length in zip(context, lengths, strict=True)])
    scales = (None, None)
    if fp8:
        k, v, *scales = (t.cuda() for t in quantised(k, v))
    q = torch.randn(sum(lengths), 8, head_dim, dtype=dtype, device="cuda")
    inputs = q, k.cuda(), v.cuda(), table.cuda(), *chunks(lengths, context, "cuda"), *scales
    fast, exact = (prefill_attention(*inputs, deterministic=mode).double() for mode in (False, True))
    assert (fast - exact).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize("lengths, context", [([2000], [0]), ([700, 0, 1500, 900], [127, 50, 128, 1001])])
def test_gathered_prefill_is_pointers_up_to_rounding(unwritten_is_nan, heads, lengths, context):
    num_heads, num_kv_heads, head_dim = heads
    if not flat.has_tma(torch.device("cuda", 0)):
        pytest.skip("this GPU has no TMA")
    k, v, table = caches(num_kv_heads, head_dim, len(lengths), 2032, dtype=torch.bfloat16)
    forget(k, v, table, [start + length for start, length in zip(context, lengths, strict=True)])
    q = torch.randn(sum(lengths), num_heads, head_dim, dtype=torch.bfloat16)
    inputs = [t.cuda() for t in (q, k, v, table, *chunks(lengths, context))]
    gathered, pointers = (flat.flat_attention_triton(*inputs, gathered=way).double() for way in (True, False))
    assert (gathered - pointers).norm() / pointers.norm() < 2e-3
