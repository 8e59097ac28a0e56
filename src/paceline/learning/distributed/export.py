"""A sharded policy's tensors, whole again one parameter at a time, and a Hugging Face folder of them.

Every rank gathers every parameter in turn and keeps what belongs in its own files, so no host holds more of
the model than those, and all ranks write at once.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.learning.distributed.sharding import local, rows_of, whole
from paceline.policy.config import DecoderConfig, to_huggingface
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import SHARD_BYTES, Slice, layout, weight_reader
from paceline.policy.model_files import TOKENIZER_FILES, copy_files, save_tensors
from paceline.policy.weight_files import INDEX_FILE, SINGLE_FILE

# Below this size a folder's weights are one file, however many ranks there are.
SMALLEST_FILE_BYTES = 64 << 20


def whole_tensors(policy: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields views of whole parameters under their Hugging Face names, parameter by parameter.

    All ranks must iterate together; a tensor is valid only until the next one.
    """
    parameters = dict(policy.named_parameters())
    for parameter, pieces in _by_parameter(policy.config).items():
        full = whole(parameters[parameter])
        for name, piece in pieces:
            yield name, piece.of(full)


@torch.no_grad()
def fill_shards(policy: Decoder, folder: Path, rank: int, count: int) -> None:
    read = weight_reader(folder)
    parameters = dict(policy.named_parameters())
    for name, piece in layout(policy.config).items():
        parameter = parameters[piece.parameter]
        rows = rows_of(parameter, rank, count)
        own = local(parameter)
        if piece.expert is not None:
            if piece.expert in rows:
                own[piece.expert - rows.start][piece.start : piece.stop].copy_(read(name))
            continue
        start, stop = max(rows.start, piece.start), min(rows.stop, piece.stop)
        if start < stop:
            tensor = read(name)[start - piece.start : stop - piece.start]
            own[start - rows.start : stop - rows.start].copy_(tensor)


class PolicyFiles:
    """What one rank writes of a Hugging Face folder; `collect` is for all ranks at once, `write` is not."""

    def __init__(self, policy: Decoder, rank: int, count: int) -> None:
        self.policy = policy
        self.rank = rank
        self.dtype = policy.dtype
        self.total_bytes = policy.config.num_parameters * self.dtype.itemsize
        even = max(SMALLEST_FILE_BYTES, -(-self.total_bytes // count))
        files = _plan(policy.config, self.dtype, min(SHARD_BYTES, even))
        names = [
            SINGLE_FILE if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
            for i in range(1, len(files) + 1)
        ]
        self.file_of = {
            tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors
        }
        self.own_files = names[rank::count]
        self.tensors: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.own_files}

    def collect(self) -> None:
        """Keeps, in host memory, the tensors of this rank's files."""
        for name, tensor in whole_tensors(self.policy):
            file = self.file_of[name]
            if file in self.tensors:
                self.tensors[file][name] = tensor.to("cpu", self.dtype).contiguous().clone()

    def write(self, folder: Path, tokenizer_from: Path | None) -> list[Path]:
        """Writes this rank's files into a folder that all ranks share, and returns them."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for file, tensors in self.tensors.items():
            save_tensors(tensors, folder / file)
            written.append(folder / file)
        if self.rank == 0:
            written += self._write_rest(folder, tokenizer_from)
        return written

    def _write_rest(self, folder: Path, tokenizer_from: Path | None) -> list[Path]:
        kind = str(self.dtype).removeprefix("torch.")
        texts = {"config.json": to_huggingface(self.policy.config, kind)}
        if len(set(self.file_of.values())) > 1:
            texts[INDEX_FILE] = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": self.file_of,
            }
        for name, content in texts.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        if tokenizer_from is not None:
            copy_files(tokenizer_from, TOKENIZER_FILES, folder)
        copied = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        return [folder / name for name in texts] + copied


def _by_parameter(config: DecoderConfig) -> dict[str, list[tuple[str, Slice]]]:
    found: dict[str, list[tuple[str, Slice]]] = {}
    for name, piece in layout(config).items():
        found.setdefault(piece.parameter, []).append((name, piece))
    return found


def _plan(config: DecoderConfig, dtype: torch.dtype, shard_bytes: int) -> list[list[str]]:
    """Returns the names of each file's tensors, in the order in which they are gathered."""
    with torch.device("meta"):
        shapes = dict(Decoder(config, dtype, "meta").named_parameters())
    files: list[list[str]] = [[]]
    size = 0
    for parameter, pieces in _by_parameter(config).items():
        for name, piece in pieces:
            nbytes = piece.of(shapes[parameter]).nbytes
            if size and size + nbytes > shard_bytes:
                files.append([])
                size = 0
            files[-1].append(name)
            size += nbytes
    return files
