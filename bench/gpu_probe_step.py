"""A fake Qwen3-8B decode step made of the kernels alone: random weights, one CUDA graph, no engine.

Shared by the gpu_probe scripts. `Model.step` is what one decode or verify step launches, in order.
"""

import statistics

import torch
import torch.nn.functional as F

from paceline.kernels.linear import linear
from paceline.kernels.norm import rms_norm, rms_norm_residual
from paceline.kernels.paged_attention import paged_attention
from paceline.kernels.prefill_attention import prefill_attention
from paceline.kernels.rope_kv import rope_and_write_kv
from paceline.kernels.sampler import sample
from paceline.kernels.swiglu import silu_multiply

HIDDEN, HEADS, KV_HEADS, DIM, FF, VOCAB, LAYERS = 4096, 32, 8, 128, 12288, 151936, 36
BLOCK_SIZE, EPSILON = 16, 1e-6
DEVICE = "cuda"


def weight(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02)


class Model:
    def __init__(self, layers=LAYERS, max_rows=256, max_tokens=512):
        self.num_layers = layers
        self.qkv = [weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN) for _ in range(layers)]
        self.o = [weight(HIDDEN, HEADS * DIM) for _ in range(layers)]
        self.gate_up = [weight(2 * FF, HIDDEN) for _ in range(layers)]
        self.down = [weight(HIDDEN, FF) for _ in range(layers)]
        self.embedding, self.head = weight(VOCAB, HIDDEN), weight(VOCAB, HIDDEN)
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.qk_norm = torch.ones(DIM, dtype=torch.bfloat16, device=DEVICE)
        blocks_per_row = -(-max_tokens // BLOCK_SIZE)
        blocks = max_rows * blocks_per_row
        shape = (blocks, BLOCK_SIZE, KV_HEADS, DIM)
        self.k = [torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(layers)]
        self.v = [torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(layers)]
        self.table = torch.randperm(blocks, device=DEVICE).int().view(max_rows, blocks_per_row)
        angle = torch.arange(4096, device=DEVICE)[:, None] / 1e6 ** (
            torch.arange(0, DIM, 2, device=DEVICE) / DIM
        )
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def slots(self, rows, positions):
        return self.table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE

    def layers(self, x, positions, slots, attend, linear_):
        residual, x = x, rms_norm(x, self.norm, EPSILON)
        for i in range(self.num_layers):
            qkv = linear_(x, self.qkv[i])
            q = rope_and_write_kv(
                qkv,
                positions,
                slots,
                self.cos,
                self.sin,
                self.k[i],
                self.v[i],
                HEADS,
                self.qk_norm,
                self.qk_norm,
                EPSILON,
            )
            x = linear_(attend(q, i).view(-1, HEADS * DIM), self.o[i])
            x, residual = rms_norm_residual(x, residual, self.norm, EPSILON)
            x = linear_(silu_multiply(linear_(x, self.gate_up[i])), self.down[i])
            x, residual = rms_norm_residual(x, residual, self.norm, EPSILON)
        return x

    def step(self, tokens_RQ, context_R, temperature, seed, linear_=linear):
        num_rows, num_queries = tokens_RQ.shape
        positions = (context_R[:, None] + torch.arange(num_queries, device=DEVICE)).flatten()
        rows = torch.arange(num_rows, device=DEVICE).repeat_interleave(num_queries)
        slots = self.slots(rows, positions)
        table = self.table[:num_rows]

        def attend(q, i):
            q = q.view(num_rows, num_queries, HEADS, DIM)
            return paged_attention(q, self.k[i], self.v[i], table, context_R)

        x = self.layers(F.embedding(tokens_RQ.flatten(), self.embedding), positions, slots, attend, linear_)
        logits = linear_(x, self.head, out_dtype=torch.float32)
        return sample(logits, temperature, seed, positions + 1)

    def prefill(self, tokens_T, cu_seqlens, context_S, positions, slots, linear_=linear):
        table = self.table[: context_S.shape[0]]

        def attend(q, i):
            return prefill_attention(q, self.k[i], self.v[i], table, cu_seqlens, context_S)

        x = self.layers(F.embedding(tokens_T, self.embedding), positions, slots, attend, linear_)
        return linear_(x[cu_seqlens[1:].long() - 1], self.head, out_dtype=torch.float32)


def graph_of(function):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def time_graph(graph, repeats=7, inner=2):
    """(median, spread) milliseconds of one replay."""
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times), max(times) - min(times)


def decode_inputs(num_rows, num_queries=1, context=255):
    tokens = torch.randint(0, VOCAB, (num_rows, num_queries), device=DEVICE)
    contexts = torch.full((num_rows,), context, dtype=torch.int32, device=DEVICE)
    temperature = torch.ones(num_rows * num_queries, device=DEVICE)
    seed = torch.randint(-(2**62), 2**62, (num_rows * num_queries,), device=DEVICE)
    return tokens, contexts, temperature, seed
