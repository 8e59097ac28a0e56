"""A plain batched generator in torch: the simplest implementation of `Backend`, and an oracle.

Running rows live in one contiguous KV cache `[rows, kv heads, capacity, head dim]` per layer. Rows that
finish are yielded and the cache is compacted; waiting requests enter when half the places are free. Nothing
here is optimised.
"""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from paceline.backend import Backend
from paceline.engine.refusal import Limits, prompt_refusal, sampling_refusal
from paceline.kernels.noise import gumbel
from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import fill
from paceline.stats import RolloutStats
from paceline.types import Completion, FinishReason, Precision, Request, Segment

CAPACITY_STEP = 64


@dataclass
class Row:
    """One request in flight: its tokens so far, and the weights they were sampled under."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    aborted: bool = False

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        start = len(self.tokens) - 1
        if self.segments and self.segments[-1].weight_version == version:
            start = self.segments.pop().start
        self.segments.append(Segment(start, len(self.tokens), version))

    def complete(self, reason: FinishReason, error: str = "") -> Completion:
        tokens, logprobs, segments = tuple(self.tokens), tuple(self.logprobs), tuple(self.segments)
        return Completion(self.request, tokens, logprobs, reason, segments, error, tuple(self.top_logprobs))


class ReferenceBackend(Backend):
    """Generates with plain torch, one step at a time, without speculation."""

    def __init__(self, policy: Decoder, max_running: int = 256, tokenizer: Tokenizer | None = None) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.max_running = max_running
        self.version = 0
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.paused = False
        self.stats = RolloutStats()
        config = policy.config
        # Without a pool: the cache grows.
        self.limits = Limits(config.max_positions, sys.maxsize, config.vocab_size, tokenizer is not None)

    # -- the contract -----------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting.extend(Row(request) for request in requests)

    @torch.inference_mode()
    def completions(self) -> Iterator[Completion]:
        while (self.waiting or self.running) and not self.paused:
            yield from self._admit()
            yield from self._retire()
            if self.running:
                self._decode()
                yield from self._retire()

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        for row in (*self.waiting, *self.running):
            row.aborted |= row.request.id in ids

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        if weights is not None:
            fill(self.policy, dict(weights).__getitem__)
        self.version = version
        self._requeue()

    def _requeue(self) -> None:
        """Requeues the running rows ahead of the waiting ones; they resume with a recomputed cache."""
        self.waiting.extendleft(reversed(self.running))
        self.running, self.cache = [], []

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def sleep(self) -> None:
        self._requeue()

    def take_stats(self) -> RolloutStats:
        stats, self.stats = self.stats, RolloutStats()
        return stats

    @property
    def precision(self) -> Precision:
        return Precision.BASE

    def close(self) -> None:
        self.waiting.clear()
        self.running, self.cache = [], []

    # -- one step ---------------------------------------------------------------------------------

    def _admit(self) -> Iterator[Completion]:
        if not self.waiting or (self.running and len(self.running) > self.max_running // 2):
            return
        admitted: list[Row] = []
        while self.waiting and len(self.running) + len(admitted) < self.max_running:
            row = self.waiting.popleft()
            problem = prompt_refusal(row.request, self.limits)
            problem = problem or sampling_refusal(row.request.sampling, self.limits)
            if problem:
                yield row.complete(FinishReason.REFUSED, problem)
            elif row.aborted:
                yield row.complete(FinishReason.ABORTED)
            elif row.request.sampling.max_tokens == 0:
                yield row.complete(FinishReason.LENGTH)
            else:
                admitted.append(row)
        if admitted:
            self._prefill(admitted)

    def _prefill(self, rows: list[Row]) -> None:
        sequences = [[*row.request.prompt, *row.tokens] for row in rows]
        packed = PackedAttention([len(s) for s in sequences], self.policy.device)
        new_cache: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attend(layer: int, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
            new_cache.append((packed.pad(k_THD), packed.pad(v_THD)))
            return packed(layer, q_THD, k_THD, v_THD)

        tokens_T = torch.tensor([token for s in sequences for token in s], device=self.policy.device)
        hidden_TE = self.policy(tokens_T, packed.positions_T, attend)
        last = packed.boundaries_B1[1:].long() - 1
        self.stats.prefill_tokens += len(tokens_T)
        capacity = max([packed.longest, *[k.shape[2] for k, _ in self.cache[:1]]])
        old = self.cache or [(k[:0], v[:0]) for k, v in new_cache]
        self.cache = [
            tuple(
                torch.cat((_widen(a, capacity), _widen(b, capacity)))
                for a, b in zip(before, new, strict=True)
            )
            for before, new in zip(old, new_cache, strict=True)
        ]
        self.running.extend(rows)
        self._sample(rows, hidden_TE[last])

    def _decode(self) -> None:
        start = time.perf_counter()
        rows, device = self.running, self.policy.device
        positions_B = torch.tensor(
            [len(row.request.prompt) + len(row.tokens) - 1 for row in rows], device=device
        )
        longest = int(positions_B.max()) + 1
        if longest > self.cache[0][0].shape[2]:
            self.cache = [tuple(_widen(x, longest + CAPACITY_STEP) for x in pair) for pair in self.cache]
        visible_B1L = (torch.arange(longest, device=device) <= positions_B[:, None])[:, None, None, :]
        row_index = torch.arange(len(rows), device=device)

        def attend(layer: int, q_BHD: torch.Tensor, k_BHD: torch.Tensor, v_BHD: torch.Tensor) -> torch.Tensor:
            k_cache, v_cache = self.cache[layer]
            k_cache[row_index, :, positions_B], v_cache[row_index, :, positions_B] = k_BHD, v_BHD
            k, v = k_cache[:, :, :longest], v_cache[:, :, :longest]
            grouped = q_BHD.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(
                q_BHD.unsqueeze(2), k, v, visible_B1L, enable_gqa=grouped
            ).squeeze(2)

        last_tokens = torch.tensor([row.tokens[-1] for row in rows], device=device)
        self._sample(rows, self.policy(last_tokens, positions_B, attend))
        self.stats.running.append(len(rows))
        self.stats.step_seconds.append(time.perf_counter() - start)

    def _sample(self, rows: list[Row], hidden_BE: torch.Tensor) -> None:
        device = self.policy.device
        seeds = torch.tensor([row.request.seed for row in rows], device=device)
        positions = torch.tensor([len(row.request.prompt) + len(row.tokens) for row in rows], device=device)
        logits_BV = self.policy.logits(hidden_BE)
        temperatures = torch.tensor(
            [row.request.sampling.temperature for row in rows], dtype=logits_BV.dtype, device=device
        )
        scaled_BV = logits_BV / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
        noise_BV = gumbel(seeds, positions, logits_BV.shape[1]) * (temperatures > 0)[:, None]
        kept_BV = scaled_BV
        if any(row.request.sampling.truncates for row in rows):
            kept_BV = torch.stack([truncate(scaled_BV[i], row.request) for i, row in enumerate(rows)])
        tokens_B = (kept_BV + noise_BV).argmax(-1)
        logprobs_B = scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - scaled_BV.logsumexp(-1)
        for i, (row, token, logprob) in enumerate(
            zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        ):
            row.append(token, logprob, self.version)
            if row.request.sampling.top_logprobs:
                top = scaled_BV[i].log_softmax(-1).topk(row.request.sampling.top_logprobs)
                row.top_logprobs.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        self.stats.generated_tokens += len(rows)

    def _retire(self) -> Iterator[Completion]:
        reasons = [self._finish_reason(row) for row in self.running]
        if not any(reasons):
            return
        finished = [row.complete(reason) for row, reason in zip(self.running, reasons, strict=True) if reason]
        keep = [i for i, reason in enumerate(reasons) if not reason]
        self.running = [self.running[i] for i in keep]
        index = torch.tensor(keep, dtype=torch.long, device=self.policy.device)
        self.cache = [(k[index], v[index]) for k, v in self.cache] if keep else []
        yield from finished

    def _finish_reason(self, row: Row) -> FinishReason | None:
        if row.aborted:
            return FinishReason.ABORTED
        sampling, length = row.request.sampling, len(row.request.prompt) + len(row.tokens)
        stops = sampling.stop_token_ids + (() if sampling.ignore_eos else self.policy.config.eos_token_ids)
        if row.tokens and (row.tokens[-1] in stops or self._has_stop_string(row)):
            return FinishReason.STOP
        if len(row.tokens) >= sampling.max_tokens or length >= self.policy.config.max_positions:
            return FinishReason.LENGTH
        return None

    def _has_stop_string(self, row: Row) -> bool:
        stops = row.request.sampling.stop
        return bool(stops) and any(stop in self.tokenizer.decode(row.tokens) for stop in stops)


def truncate(scaled_V: torch.Tensor, request: Request) -> torch.Tensor:
    """Returns scores with minus infinity for every token that top-k, top-p and min-p drop, in that order."""
    sampling = request.sampling
    kept_V = scaled_V.clone()
    order = scaled_V.argsort(descending=True, stable=True)
    if sampling.top_k > 0:
        kept_V[order[sampling.top_k :]] = -torch.inf
    if sampling.top_p < 1.0:
        probabilities = kept_V.softmax(-1)[order]
        before = probabilities.cumsum(-1) - probabilities
        kept_V[order[before >= sampling.top_p]] = -torch.inf
    if sampling.min_p > 0.0:
        probabilities = kept_V.softmax(-1)
        kept_V[probabilities < sampling.min_p * probabilities.max()] = -torch.inf
    return kept_V


def _widen(x_BHLD: torch.Tensor, capacity: int) -> torch.Tensor:
    return F.pad(x_BHLD, (0, 0, 0, capacity - x_BHLD.shape[2]))
