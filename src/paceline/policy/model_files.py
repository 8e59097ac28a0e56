"""Writing a model into a folder that may hold one already, so that no file of the old one stays behind.

    1. everything new is written into `.saving-*/new` within the folder: a full disk changes nothing
    2. `config.json` is set aside: from here to the end, no reader takes the folder for a model
    3. all files of the old model are set aside and the new ones are renamed into place
    4. `config.json` comes last, and what was set aside is removed

So a folder is the old model, the new one, or refused for lack of a `config.json`; never a mix of both. An
error puts the old files back; after a kill they lie in `.saving-*/old`. Files that belong to no model (a
README, notes) stay. A link is replaced, not written through: in a download cache it leads to a file that
other folders share.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

# Weights in every format, with what would be read along with them.
WEIGHT_FILES = (
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"),
    *("tf_model.h5", "flax_model.msgpack", "consolidated*.safetensors", "consolidated*.pth"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
    # transformers takes a folder with an adapter's configuration for an adapter, whatever else it holds.
    *("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
)
# What goes with a policy as its tokenizer; the second line is read before `tokenizer.json` by some programs.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "vocab.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


@contextmanager
def replaced_files(folder: Path, patterns: tuple[str, ...], last: str = "config.json") -> Iterator[Path]:
    """Yields an empty folder to write into; what is there at the end replaces the files of `patterns`.

    The file `last` is the first to be removed and the last to be added.
    """
    folder.mkdir(parents=True, exist_ok=True)
    leftovers = list(folder.glob(".saving-*"))
    scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    new, aside = scratch / "new", scratch / "old"
    new.mkdir()
    aside.mkdir()
    try:
        yield new
        names = sorted((path.name for path in new.iterdir()), key=lambda name: (name == last, name))
        found = (path for pattern in (last, *names, *patterns) for path in folder.glob(pattern))
        old = list(dict.fromkeys(path.name for path in found))
        blocked = next((folder / name for name in old if _is_folder(folder / name)), None)
        if blocked is not None:
            raise ValueError(f"{blocked} is a folder, where a file of the model must go; remove it")
        _swap(folder, old, aside, names, new)
    except BaseException:
        shutil.rmtree(new)
        if not any(aside.iterdir()):
            shutil.rmtree(scratch)
        raise
    for finished in (scratch, *leftovers):
        shutil.rmtree(finished, ignore_errors=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _swap(folder: Path, old: list[str], aside: Path, names: list[str], new: Path) -> None:
    moved: list[tuple[Path, Path]] = []
    try:
        for name in old:
            os.replace(folder / name, aside / name)
            moved.append((folder / name, aside / name))
        for name in names:
            os.replace(new / name, folder / name)
            moved.append((new / name, folder / name))
    except BaseException:
        for before, after in reversed(moved):
            os.replace(after, before)
        raise


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Writes safetensors with the rights that any other new file gets; the library makes them private."""
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)


def copy_files(source: Path, names: tuple[str, ...], target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
