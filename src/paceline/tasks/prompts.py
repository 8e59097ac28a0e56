"""Encodes a problem's prompt, and a tool's observation."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from paceline.config import ConfigError
from paceline.tasks.base import Message, Observation, Problem
from paceline.tasks.chat import ChatTemplate

logger = logging.getLogger(__name__)

# Chats in one request to the process that renders them.
RENDERED_TOGETHER = 64


@dataclass(frozen=True)
class PromptEncoder:
    """Renders prompts by the recipe's `task` section and encodes them with the policy's tokenizer."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    prompt_format: str = "{prompt}"
    chat: bool = False  # texts become a user message
    system_prompt: str = ""

    def encode(self, problem: Problem) -> tuple[int, ...]:
        return self._tokens(problem, self._text(problem))

    def check(self, problems: Sequence[Problem]) -> None:
        """Raises ConfigError where a prompt cannot be rendered; the error names the problem's source."""
        for _ in self._texts(problems):
            pass

    def encode_all(self, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
        texts = self._texts(problems)
        return [self._tokens(problem, text) for problem, text in zip(problems, texts, strict=True)]

    def _tokens(self, problem: Problem, text: str) -> tuple[int, ...]:
        # A template writes the special tokens itself; the tokenizer must not add them again.
        plain = isinstance(problem.prompt, str) and not self.chat
        return tuple(self.tokenizer.encode(text, add_special_tokens=plain).ids)

    def _texts(self, problems: Sequence[Problem]) -> Iterator[str]:
        """Yields the text of each prompt; chats are rendered many at a time."""
        for start in range(0, len(problems), RENDERED_TOGETHER):
            batch = problems[start : start + RENDERED_TOGETHER]
            if len(batch) == 1:
                yield self._text(batch[0])
                continue
            try:
                asked = [self._messages(problem) for problem in batch]
                chats = [messages for messages in asked if not isinstance(messages, str)]
                rendered = iter(self._template().render_all(chats) if chats else ())
                texts = [one if isinstance(one, str) else next(rendered) for one in asked]
            except ConfigError:
                texts = [""]
            # On an error render one by one, so that it names the problem.
            yield from texts if all(texts) else (self._text(problem) for problem in batch)

    def _text(self, problem: Problem) -> str:
        try:
            asked = self._messages(problem)
            text = asked if isinstance(asked, str) else self._template().render(asked)
        except ConfigError as error:
            raise ConfigError(f"{problem.source}: {error}" if problem.source else str(error)) from None
        if not text:
            raise ConfigError(f"{problem.source or 'a problem'}: its prompt is an empty text")
        return text

    def _messages(self, problem: Problem) -> str | tuple[Message, ...]:
        prompt = problem.prompt
        if isinstance(prompt, str):
            prompt = self.prompt_format.replace("{prompt}", prompt)
            if not self.chat:
                if self.system_prompt:
                    raise ConfigError(
                        "task.system_prompt needs a chat, and the prompts are plain text; set task.chat=true"
                    )
                return prompt
            prompt = ({"role": "user", "content": prompt},)
        if self.system_prompt and prompt[0].get("role") != "system":
            prompt = ({"role": "system", "content": self.system_prompt}, *prompt)
        return prompt

    def encode_observation(self, observation: Observation, last_token: int) -> tuple[int, ...]:
        """Returns the tokens of an observation.

        `last_token` ended the response: if it is the end token that the template would write next, that is
        left out, because the response already has it.
        """
        if isinstance(observation.content, str):
            return tuple(self.tokenizer.encode(observation.content, add_special_tokens=False).ids)
        messages: tuple[Message, ...] = observation.content
        tokens = tuple(
            self.tokenizer.encode(self._template().follow_up(messages), add_special_tokens=False).ids
        )
        return tokens[1:] if tokens and tokens[0] == last_token else tokens

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise ConfigError(
                "the task asks with chat messages, but the folder at policy.path has no chat template "
                "(`chat_template` in tokenizer_config.json, or chat_template.jinja); "
                "add one, or ask with plain text (task.chat=false)"
            )
        return self.template


def filter_overlong_prompts(
    problems: Sequence[Problem], encoder: PromptEncoder, limit: int, what: str
) -> list[Problem]:
    """Returns the problems whose prompt has at most `limit` tokens; `what` names them in messages."""
    lengths = [len(tokens) for tokens in encoder.encode_all(problems)]
    kept = [problem for problem, length in zip(problems, lengths, strict=True) if length <= limit]
    if not kept:
        raise ConfigError(
            f"task.max_prompt_tokens = {limit} leaves no {what} prompts: "
            f"the shortest has {min(lengths)} tokens; allow more"
        )
    if len(kept) < len(problems):
        dropped = len(problems) - len(kept)
        logger.warning(
            "task.max_prompt_tokens = %d: %d of %d %s prompts are longer and were dropped",
            limit,
            dropped,
            len(problems),
            what,
        )
    return kept
