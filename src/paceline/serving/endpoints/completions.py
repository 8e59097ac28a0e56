"""`/v1/completions`: a text or tokens, continued."""

from collections.abc import AsyncIterator

from paceline.serving.endpoints.base import DONE, LOWEST_LOGPROB, Endpoint, TokenTexts, event, now, of_tokens
from paceline.serving.schemas.base import stops
from paceline.serving.schemas.completions import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from paceline.serving.service import Batch, Call, Choice, Piece, Prompt, seeds_of


class Completions(Endpoint):
    """OpenAI's completions."""

    path = "/v1/completions"
    body = CompletionRequest
    answer = CompletionAnswer
    summary = "Continues a text or tokens."

    async def handle(self, body: CompletionRequest, call: Call) -> CompletionAnswer | AsyncIterator[str]:
        self.service.check_model(body.model)
        prompts = await self._prompts(body)
        for number, prompt in enumerate(prompts):
            single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
            self.service.check_prompt(prompt.tokens, "prompt" if single else f"prompt[{number}]")
        sampling = body.sampling(body.max_tokens, stops(body.stop), body.logprobs or 0)
        batch = self.service.open(call, prompts, sampling, seeds_of(body.seed, prompts, body.n), body.stream)
        writer = _Writer(self, body, call, batch)
        return writer.events() if body.stream else await writer.whole()

    async def _prompts(self, body: CompletionRequest) -> list[Prompt]:
        several = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if isinstance(several[0], int):
            several = [several]
        return [
            await self.service.encode(one, body.add_special_tokens)
            if isinstance(one, str)
            else Prompt(tuple(one), str(one))
            for one in several
        ]


class _Writer:
    """Writes one request's answer."""

    def __init__(self, endpoint: Completions, body: CompletionRequest, call: Call, batch: Batch) -> None:
        self.body = body
        self.batch = batch
        self.texts = TokenTexts(endpoint.service, body.return_tokens_as_token_ids)
        self.head = {
            "id": f"cmpl-{call.id}",
            "object": "text_completion",
            "created": now(),
            "model": endpoint.service.model,
        }
        self.offsets = [0] * len(batch.choices)

    async def whole(self) -> CompletionAnswer:
        parts: dict[int, list[CompletionChoice]] = {choice.index: [] for choice in self.batch.choices}
        async for choice, piece in self.batch.pieces():
            parts[choice.index].append(self._choice(choice, piece))
        choices = [own[0] for own in parts.values()]  # without a stream all comes at once
        return CompletionAnswer(**self.head, choices=choices, usage=self.batch.usage)

    async def events(self) -> AsyncIterator[str]:
        options = self.body.stream_options
        async for choice, piece in self.batch.pieces():
            if piece.text or piece.ended or self.body.logprobs is not None or self.body.return_token_ids:
                part = self._choice(choice, piece)
                yield event(CompletionAnswer(**self.head, choices=[part]))
        if options is not None and options.include_usage:
            yield event(CompletionAnswer(**self.head, choices=[], usage=self.batch.usage))
        yield DONE

    def _choice(self, choice: Choice, piece: Piece) -> CompletionChoice:
        part = CompletionChoice(
            index=choice.index,
            text=piece.text,
            logprobs=None,
            finish_reason=choice.finish if piece.ended else None,
        )
        if self.body.logprobs is not None:
            part.logprobs = self._logprobs(choice, piece)
        if self.body.return_token_ids:
            part.token_ids = piece.tokens
            part.prompt_token_ids = list(choice.generation.request.prompt)
        if piece.ended:
            part.weight_versions = choice.weight_versions
        return part

    def _logprobs(self, choice: Choice, piece: Piece) -> CompletionLogprobs:
        texts = [self.texts.text(token) for token in piece.tokens]
        offsets = []
        for text in texts:
            offsets.append(self.offsets[choice.index])
            self.offsets[choice.index] += len(text)
        tops = [
            {self.texts.text(t): max(score, LOWEST_LOGPROB) for t, score in top.items()}
            for _, _, top in of_tokens(piece)
        ]
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=piece.logprobs,
            top_logprobs=tops if self.body.logprobs else None,
            text_offset=offsets,
        )
