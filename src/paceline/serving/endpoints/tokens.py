"""`/inference/v1/generate`: tokens in, tokens out, as vLLM has it."""

from collections.abc import AsyncIterator
from typing import Any

from paceline.serving.endpoints.base import DONE, Endpoint, TokenTexts, event, now
from paceline.serving.schemas.base import stops
from paceline.serving.schemas.tokens import GenerateAnswer, GenerateChoice, GenerateRequest, PromptLogprob
from paceline.serving.service import Batch, Call, Choice, Piece, Prompt, seeds_of


class Generate(Endpoint):
    """Continues tokens; nothing is decoded, rendered or encoded on the way."""

    path = "/inference/v1/generate"
    body = GenerateRequest
    answer = GenerateAnswer
    summary = "Continues tokens: ids in, ids out."

    async def handle(self, body: GenerateRequest, call: Call) -> GenerateAnswer | AsyncIterator[str]:
        service = self.service
        service.check_model(body.model)
        service.check_prompt(body.token_ids, "token_ids")
        asked = body.sampling_params
        prompt = Prompt(tuple(body.token_ids), str(body.token_ids))
        sampling = asked.sampling(
            asked.max_tokens or service.max_length - len(prompt.tokens),
            stops(asked.stop),
            asked.logprobs or 0,
        )
        seeds = seeds_of(asked.seed, [prompt], asked.n)
        if asked.seed is not None and asked.n == 1:
            seeds = [[asked.seed]]
        batch = service.open(call, [prompt], sampling, seeds, body.stream, salt=body.cache_salt or "")
        head: dict[str, Any] = {
            "request_id": body.request_id or call.id,
            "model": service.model,
            "created": now(),
            "output_mode": "tokens",
        }
        if body.return_token_ids:
            head["prompt_token_ids"] = body.token_ids
        if asked.prompt_logprobs is not None:
            scores = await service.engine.score(body.token_ids)
            pairs = zip(body.token_ids[1:], scores, strict=True)
            head["prompt_logprobs"] = [None, *({t: PromptLogprob(logprob=score)} for t, score in pairs)]
        if body.stream:
            return self._events(body, head, batch)
        choices = [self._choice(body, choice, piece) async for choice, piece in batch.pieces()]
        choices.sort(key=lambda choice: choice.index)
        return GenerateAnswer(**head, choices=choices, usage=batch.usage)

    async def _events(self, body: GenerateRequest, head: dict[str, Any], batch: Batch) -> AsyncIterator[str]:
        async for choice, piece in batch.pieces():
            yield event(GenerateAnswer(**head, choices=[self._choice(body, choice, piece)]))
            head.pop("prompt_logprobs", None)
            head.pop("prompt_token_ids", None)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(GenerateAnswer(**head, choices=[], usage=batch.usage))
        yield DONE

    def _choice(self, body: GenerateRequest, choice: Choice, piece: Piece) -> GenerateChoice:
        part = GenerateChoice(
            index=choice.index,
            token_ids=piece.tokens,
            logprobs=None,
            finish_reason=choice.finish if piece.ended else None,
        )
        if body.sampling_params.logprobs is not None:
            part.logprobs = TokenTexts(self.service, as_ids=True).chat(piece)
        if piece.ended:
            part.weight_versions = choice.weight_versions
        return part
