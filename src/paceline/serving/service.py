"""What all endpoints stand on: prompts in, and for each choice the pieces of its response as they come."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from paceline.config import ConfigError
from paceline.config.extras import needs_package
from paceline.engine.grammars import Grammars
from paceline.serving.engine_client import EngineClient, EngineLost, Generation
from paceline.serving.errors import ApiError, invalid
from paceline.serving.limits import Limits
from paceline.serving.metrics import Metrics
from paceline.serving.schemas.base import PromptTokensDetails, Usage, WeightVersion
from paceline.serving.text import StopFilter, TextStream
from paceline.tasks.chat import ChatTemplate
from paceline.types import FinishReason, Purpose, Request, SamplingParams, request_seed


@dataclass(frozen=True)
class Piece:
    """What a choice has gained since its last piece."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    ended: bool


@dataclass
class Choice:
    """One response: its tokens, and its text without what ended it."""

    index: int
    generation: Generation
    decoder: TextStream
    stop: StopFilter
    end_ids: frozenset[int]
    text: str = ""
    ended: bool = False
    _read: int = 0

    def take(self) -> Piece | None:
        """Returns what is new; None if nothing is."""
        generation = self.generation
        start, stop = self._read, len(generation.tokens)
        ended = generation.reason is not None
        if self.ended or (start == stop and not ended):
            return None
        if generation.error:
            refused = generation.reason is FinishReason.REFUSED
            raise ApiError(400 if refused else 500, generation.error)
        self._read = stop
        tokens = generation.tokens[start:stop]
        spoken = tokens
        if ended and generation.reason is FinishReason.STOP and tokens and tokens[-1] in self.end_ids:
            spoken = tokens[:-1]
        text = self.stop.push(self.decoder.push(spoken))
        if ended:
            text += self.stop.push(self.decoder.finish()) + self.stop.finish()
        self.text += text
        self.ended = ended
        scores = generation.logprobs[start:stop], generation.top_logprobs[start:stop]
        return Piece(text, tokens, *scores, ended)

    @property
    def finish(self) -> str:
        """OpenAI's word for why it ended."""
        return "length" if self.generation.reason is FinishReason.LENGTH else "stop"

    @property
    def weight_versions(self) -> list[WeightVersion]:
        return [
            WeightVersion(version=str(s.weight_version), start=s.start, end=s.stop)
            for s in self.generation.segments
        ]


@dataclass
class Batch:
    """The choices of one HTTP request."""

    engine: EngineClient
    metrics: Metrics
    choices: list[Choice]
    changed: asyncio.Event
    began: float  # when its HTTP request came
    stream: bool

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """Yields what is new of any choice, until all have ended; a slow reader gets larger pieces."""
        while not all(choice.ended for choice in self.choices):
            await self.changed.wait()
            self.changed.clear()
            for choice in self.choices:
                piece = choice.take()
                if piece is None:
                    continue
                if self.stream and piece.tokens and self.began:
                    self.metrics.first_token.note(time.monotonic() - self.began)
                    self.began = 0.0
                yield choice, piece

    async def finish(self) -> None:
        """Waits until all choices have ended."""
        async for _ in self.pieces():
            pass

    def close(self) -> None:
        """Aborts what has not ended."""
        self.engine.abort(choice.generation for choice in self.choices)

    @property
    def usage(self) -> Usage:
        prompts = {c.generation.request.group: len(c.generation.request.prompt) for c in self.choices}
        sampled = sum(len(choice.generation.tokens) for choice in self.choices)
        reused = max((choice.generation.reused_tokens for choice in self.choices), default=0)
        return Usage(
            prompt_tokens=sum(prompts.values()),
            completion_tokens=sampled,
            total_tokens=sum(prompts.values()) + sampled,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=reused),
        )


@dataclass
class Call:
    """One HTTP request while it is served: whose it is, and what it has running."""

    scope: str  # prefixes in the cache are shared within it
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    began: float = field(default_factory=time.monotonic)
    batches: list[Batch] = field(default_factory=list)

    def close(self) -> None:
        for batch in self.batches:
            batch.close()


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and what its seeds are made from: the text, where there is one."""

    tokens: tuple[int, ...]
    source: str


@dataclass
class Service:
    """The engine, the policy's tokenizer and chat template, and the limits."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model: str
    limits: Limits
    metrics: Metrics
    # Rendering and tokenizing long prompts would hold back all streams.
    encoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "encode"))

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its response."""
        return int(self.engine.description["max_length"])

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404, f"there is no model {name!r}; this server has {self.model!r}", "model", "model_not_found"
            )

    async def encode(self, text: str, special: bool = True) -> Prompt:
        """Returns a text's tokens; `special`: with those that the tokenizer puts around it."""
        loop = asyncio.get_running_loop()

        def encoded() -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(text, add_special_tokens=special).ids)

        return Prompt(await loop.run_in_executor(self.encoder, encoded), text)

    async def render(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> Prompt:
        """Returns a conversation's tokens, by the policy's chat template."""
        template = self.template
        if template is None:
            raise invalid("messages", "this model's folder has no chat template; use /v1/completions")
        loop = asyncio.get_running_loop()
        known = ChatTemplate(template.source, template.variables, variables)
        try:
            text = await loop.run_in_executor(self.encoder, known.render, messages)
        except ConfigError as error:
            raise invalid("messages", str(error)) from None
        return await self.encode(text, special=False)

    async def check_grammar(self, grammar: str, field_: str) -> None:
        """Raises where no response can be held to a grammar."""
        loop = asyncio.get_running_loop()
        if problem := await loop.run_in_executor(self.encoder, self._grammar_problem, grammar):
            raise invalid(field_, problem)

    def _grammar_problem(self, grammar: str) -> str:
        try:
            return self._grammars.problem(grammar)
        except ImportError:
            return f"a grammar {needs_package('llguidance', 'serve')}"

    @cached_property
    def _grammars(self) -> Grammars:
        known = self.engine.description
        return Grammars(self.tokenizer, known["vocab_size"], known["eos_token_ids"])

    def check_prompt(self, prompt: Sequence[int], field_: str) -> None:
        """Raises where no request can have this prompt."""
        if not prompt:
            raise invalid(field_, "it has no tokens")
        if len(prompt) >= self.max_length:
            raise invalid(
                field_,
                f"{len(prompt)} tokens; with at least one of the response this model takes {self.max_length}",
                "context_length_exceeded",
            )
        largest = self.engine.description["vocab_size"] - 1
        if max(prompt) > largest:
            raise invalid(field_, f"it has token {max(prompt)}; this model's largest is {largest}")

    def open(
        self,
        call: Call,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        seeds: Sequence[Sequence[int]],
        stream: bool,
        *,
        salt: str = "",
        keep: frozenset[str] = frozenset(),
        grammar: str = "",
    ) -> Batch:
        """Starts a response for every seed of every prompt; `keep` are special tokens that its text has."""
        self.limits.check_queue(len(self.engine.outstanding), sum(map(len, seeds)))
        requests = [
            Request(
                self.engine.new_id(),
                prompt.tokens,
                seed,
                sampling,
                group=f"{call.id}/{p}",
                scope=f"{call.scope}/{salt}",
                grammar=grammar,
            )
            for p, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
            for seed in own
        ]
        changed = asyncio.Event()
        try:
            generations = self.engine.submit(requests, stream, changed)
        except EngineLost as error:
            raise ApiError(503, str(error)) from None
        end_ids = frozenset([*sampling.stop_token_ids, *self.engine.description["eos_token_ids"]])
        choices = [
            Choice(i, g, TextStream(self.tokenizer, keep), StopFilter(sampling.stop), end_ids)
            for i, g in enumerate(generations)
        ]
        batch = Batch(self.engine, self.metrics, choices, changed, call.began, stream)
        call.batches.append(batch)
        return batch


def seeds_of(seed: int | None, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
    """Returns the seeds of `count` choices for each prompt: those of `paceline.load(...).generate`.

    Without a seed they are random.
    """
    if seed is None:
        return [[secrets.randbits(63) for _ in range(count)] for _ in prompts]
    return [
        [request_seed(Purpose.EVAL, seed, 0, prompt.source, p, sample) for sample in range(count)]
        for p, prompt in enumerate(prompts)
    ]
