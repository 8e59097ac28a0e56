"""Examples to imitate, as tokens: rows of a file, or a task's demonstrations asked exactly as in RL.

    messages [, tools]             the assistant's turns (tasks/assistant_turns.py)
    prompt, completion|response    as texts the response and an end token, as messages its assistant's turns
    text                           every token but the first; cut into pieces where it is too long

The columns that a row has decide which it is.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer, processors

from paceline.config import ConfigError
from paceline.learning.batch import TrainingSequence
from paceline.learning.supervised import supervised_sequence
from paceline.tasks.assistant_turns import Chat, RenderedChat, render_chats
from paceline.tasks.base import Message
from paceline.tasks.chat import ChatTemplate
from paceline.tasks.data import Row, read_rows
from paceline.tasks.task import Task

# Rows that are rendered and tokenised at once, the latter on all cores.
TOGETHER = 256


@dataclass
class Examples:
    """Examples, and how many were too long."""

    sequences: list[TrainingSequence] = field(default_factory=list)
    too_long: int = 0
    endless: int = 0  # whose last learned token does not end a response of the policy

    @property
    def tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)


@dataclass
class Reader:
    """What turns rows into tokens: the policy's tokenizer, template and end tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    ends: tuple[int, ...]
    most_tokens: int  # of an example

    def read(self, path: Path, key: str) -> Examples:
        """Reads all examples of a file; errors name the recipe's `key`, or the row."""
        found = Examples()
        rows = iter(read_rows(path, key))
        while some := list(islice(rows, TOGETHER)):
            for tokens, learned in self._encode(some):
                self._add(found, tokens, learned)
        if not found.sequences:
            what = f"all {found.too_long} are too long" if found.too_long else "it holds none"
            raise ConfigError(
                f"{key} = {str(path)!r}: no example to learn from, {what} (at most {self.most_tokens} tokens)"
            )
        return found

    def demonstrations(self, task: Task, count: int, seed: int, most_response: int) -> Examples:
        """Returns a task's demonstrations; those whose response RL would cut off are left out."""
        assert task.demonstrations is not None
        found = Examples()
        made = list(task.demonstrations(count, seed))
        shortest = None
        for start in range(0, len(made), TOGETHER):
            some = made[start : start + TOGETHER]
            prompts = task.prompts.encode_all([one.problem for one in some])
            responses = self._encoded([one.response for one in some])
            for prompt, response in zip(prompts, responses, strict=True):
                answer = [*response.ids, self._end]
                shortest = min(len(answer), shortest or len(answer))
                if len(answer) > most_response:
                    found.too_long += 1
                else:
                    self._add(found, [*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
        if not found.sequences:
            raise ConfigError(
                f"all {len(made)} demonstrations are too long: rollout.max_tokens = {most_response}, an "
                f"example has at most {self.most_tokens} tokens, and the shortest response takes {shortest}; "
                "raise the first, or make task.options easier"
            )
        return found

    def _add(self, found: Examples, tokens: Iterable[int], learned: Iterable[bool]) -> None:
        tokens_T = np.asarray(tokens, np.int32)
        learned_T = np.array(learned, np.bool_)
        learned_T[:1] = False  # nothing predicts it
        if len(tokens_T) > self.most_tokens:
            found.too_long += 1
        elif learned_T.any():
            found.sequences.append(supervised_sequence(tokens_T, learned_T))
            found.endless += not np.isin(tokens_T[learned_T], self.ends).any()

    @cached_property
    def _with_offsets(self) -> Tokenizer:
        """The tokenizer with offsets that count every character: many leave out spaces."""
        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer

    @property
    def _end(self) -> int:
        if not self.ends:
            raise ConfigError(
                "the policy's config.json names no eos_token_id, so a response has no end to learn"
            )
        return self.ends[0]

    def _encode(self, rows: list[tuple[str, Row]]) -> Iterator[tuple[Iterable[int], Iterable[bool]]]:
        """Yields tokens and what of them is learned, in the rows' order."""
        kinds = [_kind(row, where) for where, row in rows]
        chats = iter(self._chats([row for row, kind in zip(rows, kinds, strict=True) if kind == "chat"]))
        for (where, row), kind in zip(rows, kinds, strict=True):
            if kind == "chat":
                yield next(chats)
            elif kind == "text":
                yield from self._pieces([*self._text(row["text"], where, specials=True), self._end])
            else:
                prompt = self._text(row["prompt"], where, specials=True)
                if not prompt:
                    raise ConfigError(
                        f"{where}: `prompt` has no tokens, and this tokenizer begins no text by itself, so "
                        "nothing predicts the first token of the response; move the beginning of the text "
                        "into `prompt`, or give it as `text`"
                    )
                answer = [*self._text(_response(row), where, specials=False), self._end]
                yield [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)

    def _pieces(self, tokens: list[int]) -> Iterator[tuple[list[int], list[bool]]]:
        for start in range(0, len(tokens), self.most_tokens):
            piece = tokens[start : start + self.most_tokens]
            yield piece, [True] * len(piece)

    def _chats(self, rows: list[tuple[str, Row]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if not rows:
            return
        if self.template is None:
            raise ConfigError(
                f"{rows[0][0]}: messages need a chat template, and the folder at policy.path has none; "
                "name one (sft.chat_template=FILE), or give `prompt` and `response`, or `text`"
            )
        rendered = render_chats(self.template, [_chat(row, where) for where, row in rows])
        texts = [one.text for one in rendered]
        encoded = self._with_offsets.encode_batch(texts, add_special_tokens=False)
        for one, encoding in zip(rendered, encoded, strict=True):
            yield np.asarray(encoding.ids), _learned(one, encoding)

    def _encoded(self, texts: list[str]) -> list[Encoding]:
        return self.tokenizer.encode_batch(texts, add_special_tokens=False)

    def _text(self, text: Any, where: str, specials: bool) -> list[int]:
        if not isinstance(text, str):
            raise ConfigError(f"{where}: must be text, not {text!r:.80}")
        return self.tokenizer.encode(text, add_special_tokens=specials).ids


def split_held_out(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Returns training and held-out examples, by a hash of their tokens: equal ones stay on one side."""
    sides = Examples(too_long=examples.too_long, endless=examples.endless), Examples()
    for sequence in examples.sequences:
        tokens = np.ascontiguousarray(sequence.tokens).tobytes()
        digest = hashlib.blake2b(tokens, digest_size=8, salt=str(seed).encode()[:16]).digest()
        sides[int.from_bytes(digest, "little") < share * 2**64].sequences.append(sequence)
    if not sides[0].sequences:
        raise ConfigError(f"sft.held_out_share = {share} leaves nothing to learn from; lower it")
    return sides


def _learned(chat: RenderedChat, encoding: Encoding) -> np.ndarray:
    """Returns which tokens begin within what the assistant wrote."""
    starts, stops = np.array(encoding.offsets).reshape(-1, 2).T
    learned_T = np.zeros(len(starts), np.bool_)
    for begin, end in chat.learned:
        learned_T |= (starts >= begin) & (starts < end) & (stops > starts)
    return learned_T


def _kind(row: Row, where: str) -> str:
    if row.get("messages") is not None:
        return "chat"
    if row.get("prompt") is not None and (response := _response(row)) is not None:
        return "chat" if isinstance(row["prompt"], list) and isinstance(response, list) else "pair"
    if row.get("text") is not None:
        return "text"
    hint = "; write `conversations` as messages with role and content" if "conversations" in row else ""
    raise ConfigError(
        f"{where}: has the columns {', '.join(row)}; an example is `messages`, `prompt` with `completion` or "
        f"`response`, or `text`{hint}"
    )


def _response(row: Row) -> Any:
    return row["completion"] if row.get("completion") is not None else row.get("response")


def _chat(row: Row, where: str) -> Chat:
    asked = [] if row.get("messages") is not None else _messages(row["prompt"], where)
    messages = [*asked, *_messages(row["messages"] if not asked else _response(row), where)]
    if not any(message.get("role") == "assistant" for message in messages[len(asked) :]):
        raise ConfigError(f"{where}: no message is the assistant's, so there is nothing to learn")
    return Chat(messages, row.get("tools"), len(asked), where)


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(one, dict) and "role" in one for one in value):
        raise ConfigError(f"{where}: messages must be a list of objects with `role`, not {value!r:.80}")
    # Parquet and Arrow give every message of a column the same keys; missing ones are None.
    return [{name: part for name, part in one.items() if part is not None} for one in value]
