"""Stop strings against a search that decodes the whole response after every token."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.engine.stop_strings import first_stop


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("E", "N"), ("EN", "D"), ("a", "b")]
    vocabulary = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<pad>"])
    return tokenizer


def searched(tokenizer: Tokenizer, tokens: list[int], stops: list[str], checked: int) -> int | None:
    return next(
        (
            end
            for end in range(checked + 1, len(tokens) + 1)
            if any(stop in tokenizer.decode(tokens[:end]) for stop in stops)
        ),
        None,
    )


@pytest.mark.parametrize("special", [30, 500])
@pytest.mark.parametrize("checked", [0, 2, 20])
def test_first_stop_finds_a_match_across_special_tokens(special, checked):
    tokenizer = byte_tokenizer()
    pad, beyond = tokenizer.token_to_id("<pad>"), 10_000
    letter = {character: tokenizer.token_to_id(character) for character in "xEND"}
    between = [pad, beyond] * special
    tokens = [letter["x"], letter["E"], *between, letter["N"], *between, letter["D"], letter["x"]]
    assert first_stop(tokenizer, tokens, ["END"], checked) == len(tokens) - 1
    assert first_stop(tokenizer, tokens[:-2], ["END"], checked) is None


def test_first_stop_finds_the_same_token_when_responses_are_read_in_pieces():
    tokenizer = byte_tokenizer()
    draw = random.Random(0)
    pool = [*tokenizer.encode("END ab é中 E N D").ids, tokenizer.token_to_id("<pad>"), 10_000]
    found = 0
    for _ in range(300):
        tokens = [draw.choice(pool) for _ in range(draw.randint(1, 120))]
        stops = draw.sample(["END", "ab", "é", "中E", "D D", "N  N", "zz"], 2)
        expected = searched(tokenizer, tokens, stops, 0)
        found += expected is not None
        read = 0
        while read < len(tokens):
            size = min(len(tokens), read + draw.randint(1, 9))
            end = first_stop(tokenizer, tokens[:size], stops, read)
            if end is not None or size == len(tokens):
                assert end == expected
                break
            read = size
    assert 50 < found < 300
