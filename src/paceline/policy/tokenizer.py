"""Text to tokens and back, through the `tokenizer.json` of a Hugging Face folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from paceline.policy.files import DamagedFile

# The end-of-sequence token of `character_tokenizer`.
EOS = "<eos>"


def load_tokenizer(folder: str | Path) -> Tokenizer:
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DamagedFile(f"{path} is not a tokenizer: {error}") from None


def differing_tokens(ours: Tokenizer, theirs: Tokenizer) -> dict[int, tuple[str | None, str | None]]:
    """Returns the ids that stand for different texts, with both texts.

    Added tokens are left out: a chat model renames reserved ones, with the same tokenizer.
    """
    added = {*ours.get_added_tokens_decoder(), *theirs.get_added_tokens_decoder()}
    a, b = (
        {number: token for token, number in tokenizer.get_vocab(with_added_tokens=False).items()}
        for tokenizer in (ours, theirs)
    )
    return {
        number: (a.get(number), b.get(number))
        for number in sorted((a.keys() | b.keys()) - added)
        if a.get(number) != b.get(number)
    }


def character_tokenizer(alphabet: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with one token per character of `alphabet`; id 0 ends a sequence.

    Where the alphabet has numbers of several digits, digits that stand together are one token.
    """
    vocabulary = {EOS: 0} | {entry: index for index, entry in enumerate(alphabet, start=1)}
    pattern = "[0-9]+|." if any(len(entry) > 1 for entry in alphabet) else "."
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
