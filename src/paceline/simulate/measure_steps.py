"""Times whole steps and rollouts of the native engine: points to hold out, so that a profile made of kernels
can be judged.
"""

import time
from collections.abc import Callable

import torch

from paceline.bench.decode import NoDrafter
from paceline.bench.setup import bench_policy, bench_requests
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from paceline.simulate.points import FIT, HELD_OUT, RolloutPoint, StepPoint
from paceline.simulate.workload import Lengths

NEW_TOKENS = 48


class StepBench:
    """Measures points of one model until the time is up; what was left out is said."""

    def __init__(
        self, model: str, device: torch.device, deadline: float, note: Callable[[str], None]
    ) -> None:
        self.model, self.device, self.deadline, self.note = model, device, deadline, note
        self.policy: Decoder = bench_policy(model, device)
        self.steps: list[StepPoint] = []
        self.rollouts: list[RolloutPoint] = []

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def decode(self, points: list[tuple[int, int, int]], seen: tuple[tuple[int, int, int], ...] = ()) -> None:
        """(rows, prompt tokens, draft tokens); those with the same prompt and depth share an engine. A fit
        may look at those in `seen`.
        """
        for prompt, k in dict.fromkeys((prompt, k) for _, prompt, k in points):
            batches = [rows for rows, p, depth in points if (p, depth) == (prompt, k)]
            length = prompt + NEW_TOKENS * 2 + 2
            settings = EngineSettings(
                max_running=max(batches), kv_tokens=max(batches) * (length + 64), max_length=length
            )
            pacer = FixedPacer(Strategy(NoDrafter.name, k), 10**6) if k else None
            engine = Engine(self.policy, settings, drafters=[NoDrafter()] if k else (), pacer=pacer)
            for rows in batches:
                if self.late:
                    self.note(f"out of time before {self.model} batch {rows}, prompt {prompt}, k {k}")
                    return
                self._decode_point(engine, rows, prompt, k, FIT if (rows, prompt, k) in seen else HELD_OUT)

    def _decode_point(self, engine: Engine, rows: int, prompt: int, k: int, use: str) -> None:
        self._seconds(engine, [NEW_TOKENS + 1] * rows, prompt)  # compiles and captures
        short = self._seconds(engine, [1] * rows, prompt)
        long = self._seconds(engine, [NEW_TOKENS + 1] * rows, prompt)
        seconds = (long - short) / NEW_TOKENS
        self.steps.append(StepPoint(self.model, rows, prompt + NEW_TOKENS // 2, seconds, k + 1, use=use))
        if not k:
            self.steps.append(StepPoint(self.model, rows, 0, short, 1, prompt))
        self.note(
            f"{self.model} batch {rows} prompt {prompt} k {k}: step {seconds * 1e3:.3f} ms, prefill and "
            f"first token {short * 1e3:.1f} ms"
        )

    def rollout(self, requests: int, prompt: int, mean: float, high: int) -> None:
        if self.late:
            self.note(f"out of time before {self.model}'s rollout")
            return
        lengths = [int(n) for n in Lengths(mean, 1.0, 16, high).draw_as_bench(requests)]
        kv_tokens = sum(lengths) + requests * (prompt + 64)
        engine = Engine(
            self.policy,
            EngineSettings(max_running=requests, kv_tokens=kv_tokens, max_length=prompt + max(lengths) + 2),
        )
        self._seconds(engine, lengths, prompt)
        engine.take_stats()
        seconds = self._seconds(engine, lengths, prompt)
        stats = engine.take_stats()
        tail = sum(
            s for s, running in zip(stats.step_seconds, stats.running, strict=True) if running * 8 <= requests
        )
        self.rollouts.append(RolloutPoint(self.model, requests, prompt, (mean, 1.0, 16, high), seconds, tail))
        self.note(f"{self.model} rollout of {requests}: {seconds:.2f} s, tail {tail:.2f} s")

    def _seconds(self, engine: Engine, lengths: list[int], prompt: int) -> float:
        requests = bench_requests(lengths, prompt, engine.policy.config.vocab_size)
        start = time.perf_counter()
        engine.submit(requests)
        count = sum(len(completion.tokens) for completion in engine.completions())
        assert count == sum(lengths), f"{count} tokens came back instead of {sum(lengths)}"
        return time.perf_counter() - start
