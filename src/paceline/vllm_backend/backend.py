"""A `Backend` over one vLLM engine: requests in, steps, completions out; runs in vLLM's environment.

    submit ──▶ adapter ──step──▶ tokens and logprobs of each request ──▶ its record ──▶ completion

vLLM has noise of its own, so a request that is run again gives another sample of the same distribution. What
a request has so far is kept here, token by token with the weights that sampled it: an aborted one still has
it, and stop texts end a response at the token that completes them.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.backend import Backend, Speculation
from paceline.engine.stop_strings import first_stop
from paceline.pacing.strategy import PLAIN, Decision, Observation, Strategy
from paceline.stats import RequestTrace, RolloutStats
from paceline.types import Completion, FinishReason, Precision, Request, Segment
from paceline.vllm_backend.adapter import VllmEngine
from paceline.vllm_backend.progress import Progress, RequestRefused, StepStats
from paceline.vllm_backend.settings import VllmSettings

# The name of a text that is read for its logprobs, among requests.
TEXT = "text to read"


@dataclass
class Record:
    """A request's tokens and timing so far."""

    request: Request
    submitted: float
    first_token: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # of the weights, and where they began

    def add(self, progress: Progress, version: int) -> None:
        """Appends a step's tokens, sampled under these weights."""
        if progress.tokens and (not self.versions or self.versions[-1][0] != version):
            self.versions.append((version, len(self.tokens)))
        self.first_token = self.first_token or time.perf_counter()
        self.tokens += progress.tokens
        self.logprobs += progress.logprobs
        if self.request.sampling.top_logprobs:
            self.top_logprobs += progress.top_logprobs

    def cut(self, count: int) -> None:
        """Drops the tokens after the first `count`."""
        del self.tokens[count:], self.logprobs[count:], self.top_logprobs[count:]

    def completion(self, reason: FinishReason) -> Completion:
        count = len(self.tokens)
        starts = [(version, start) for version, start in self.versions if start < count]
        stops = [start for _, start in starts[1:]] + [count]
        segments = [
            Segment(start, stop, version) for (version, start), stop in zip(starts, stops, strict=True)
        ]
        most = self.request.sampling.top_logprobs
        tops = tuple(_most_likely(top, most) for top in self.top_logprobs)
        return Completion(
            self.request, tuple(self.tokens), tuple(self.logprobs), reason, tuple(segments), top_logprobs=tops
        )

    def trace(self, reason: FinishReason) -> RequestTrace:
        now = time.perf_counter()
        moments = [("waiting", self.submitted, -1)]
        moments += [("decode", self.first_token, -1)] if self.first_token else []
        moments.append(("left", now, -1))
        count = len(self.tokens)
        return RequestTrace(self.request.id, tuple(moments), len(self.request.prompt), count, reason)


class VllmBackend(Backend):
    """Generates with vLLM."""

    def __init__(self, engine: VllmEngine, settings: VllmSettings, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self.settings = settings
        self.tokenizer = tokenizer
        self.records: dict[str, Record] = {}
        self.finished: deque[Completion] = deque()
        self.paused = False
        self.asleep = False
        self.version = 0
        self.stats = RolloutStats()
        draft = settings.draft
        self._decision = Decision(Strategy(draft.drafter, draft.tokens) if draft is not None else PLAIN)
        self._text_logprobs: list[float] | None = None
        self._speculation = VllmSpeculation(self) if draft is not None else None

    # -- the contract (backend.py) ----------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        fp8 = self.settings.engine.get("quantization") == "fp8"
        if str(self.settings.engine.get("kv_cache_dtype", "")).startswith("fp8"):
            return Precision.FP8_KV if fp8 else Precision.KV
        return Precision.FP8 if fp8 else Precision.BASE

    @property
    def speculation(self) -> "VllmSpeculation | None":
        return self._speculation

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            problem = self._problem(request)
            if problem:
                self.finished.append(Completion(request, (), (), FinishReason.REFUSED, (), error=problem))
            else:
                self.records[request.id] = Record(request, time.perf_counter())

    def completions(self) -> Iterator[Completion]:
        while not self.paused:
            if self.finished:
                yield self.finished.popleft()
            elif self.records:
                self._step()
            else:
                return

    def abort(self, request_ids: Iterable[str]) -> None:
        known = [name for name in request_ids if name in self.records]
        self.engine.abort(known)
        for name in known:
            self._finish(self.records[name], FinishReason.ABORTED)

    def update_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        assert weights is not None, "the learner's weights lie in another process: they must be sent"
        self.settle()
        self.engine.load_policy(weights)
        self.version = version

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def take_stats(self) -> RolloutStats:
        stats, self.stats = self.stats, RolloutStats()
        return stats

    def sleep(self) -> None:
        if self.settings.sleeps:
            self.settle()
            self.asleep = True
            self.engine.sleep()

    def wake(self) -> None:
        if self.settings.sleeps:
            self.engine.wake()
            self.asleep = False
            if self._speculation is not None:
                self._speculation.load_late()

    def close(self) -> None:
        self.records.clear()
        self.finished.clear()
        self.engine.close()

    def text_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Returns the logprobs of a text's tokens but the first, at temperature 1."""
        self._text_logprobs = None
        self.engine.add_text(TEXT, tokens)
        while self._text_logprobs is None:
            self._step()
        return self._text_logprobs

    # -- steps ------------------------------------------------------------------------------------

    def _problem(self, request: Request) -> str:
        """Queues a request in vLLM; returns why it can never run, or an empty text."""
        if len(request.prompt) >= self.settings.max_positions:
            most = self.settings.max_positions
            return f"a prompt of {len(request.prompt)} tokens leaves no room for a response within {most}"
        if request.sampling.stop and self.tokenizer is None:
            return "stop strings need a tokenizer.json in the policy's folder"
        try:
            self.engine.add(request)
        except RequestRefused as error:
            return str(error)
        return ""

    def settle(self) -> None:
        """Finishes the steps that vLLM began ahead; their tokens belong to the weights that sampled them."""
        for progress, step in self.engine.settle():
            self._take_in(progress, step)

    def _step(self) -> None:
        self._take_in(*self.engine.step())

    def _take_in(self, progress: Sequence[Progress], step: StepStats | None) -> None:
        """Records a step in its requests and in the statistics."""
        running = tokens = 0
        for part in progress:
            if part.id == TEXT:
                self._text_logprobs = part.prompt_logprobs or self._text_logprobs
            elif part.id in self.records:
                running += 1
                tokens += self._absorb(self.records[part.id], part)
        if step is not None and running:
            self._count(step, running, tokens)

    def _absorb(self, record: Record, part: Progress) -> int:
        """Records a request's new tokens, which may end it; returns their number."""
        checked = len(record.tokens)
        record.add(part, self.version)
        end = first_stop(self.tokenizer, record.tokens, record.request.sampling.stop, checked)
        if end is not None:
            record.cut(end)
            if not part.finish_reason:
                self.engine.abort([record.request.id])
            self._finish(record, FinishReason.STOP)
        elif part.finish_reason:
            self._finish(record, FinishReason(part.finish_reason))
        return len(record.tokens) - checked

    def _finish(self, record: Record, reason: FinishReason) -> None:
        del self.records[record.request.id]
        self.stats.note_request(record.trace(reason))
        self.finished.append(record.completion(reason))

    def _count(self, step: StepStats, running: int, tokens: int) -> None:
        self.stats.generated_tokens += tokens
        self.stats.prefill_tokens += step.prompt_tokens
        self.stats.step_seconds.append(step.seconds)
        self.stats.note(
            Observation(
                self._decision,
                running=running,
                context=0.0,
                draft_seconds=0.0,
                verify_seconds=step.seconds,
                tokens=tokens,
                drafts=step.drafts,
                accepted_at=tuple(step.accepted_at),
                proposed=step.proposed,
                disturbed=step.prompt_tokens > 0,
                begun=step.drafts,
            )
        )


class VllmSpeculation(Speculation):
    """vLLM's drafter: it can be trained, and the trained head can be saved. Its pacing is vLLM's own."""

    def __init__(self, backend: VllmBackend) -> None:
        self.backend = backend
        self._published: dict[str, torch.Tensor] = {}
        self._is_late = False  # a published head has not been loaded yet

    @property
    def keeps_tokens(self) -> bool:
        """False: vLLM draws with noise of its own, and verifies by rejection."""
        return False

    def publish_drafter(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces the head that drafts; tensors have the names of an eagle head's folder.

        While vLLM sleeps its weights are elsewhere, so it is replaced on waking.
        """
        self._published = dict(weights)
        self._is_late = True
        if not self.backend.asleep:
            self.backend.settle()
            self.load_late()

    def load_late(self) -> None:
        """Loads what was published while vLLM slept."""
        if self._is_late:
            self._is_late = False
            self.backend.engine.load_drafter(self._published.items())

    def drafter_state(self) -> dict[str, torch.Tensor]:
        """Returns the head that was published last; nothing where none was."""
        return dict(self._published)

    def load_drafter_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Publishes a head that `drafter_state` returned."""
        if tensors:
            self.publish_drafter(0, tensors)


def hosted_backend(settings: str) -> VllmBackend:
    """Makes the backend in the process that hosts it."""
    parsed = VllmSettings.load(settings)
    file = Path(parsed.folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
    return VllmBackend(VllmEngine(parsed), parsed, tokenizer)


def _most_likely(top: dict[int, float], count: int) -> dict[int, float]:
    """Returns the most likely tokens; vLLM adds the sampled one."""
    return dict(sorted(top.items(), key=lambda item: -item[1])[:count])
