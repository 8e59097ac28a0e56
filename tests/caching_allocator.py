"""torch's caching allocator for one pool and one stream, by its rules (c10/cuda/CUDACachingAllocator.cpp):
sizes are multiples of 512 bytes; up to 1 MiB comes from segments of 2 MiB, the rest from segments of its
own size in multiples of 2 MiB, or of 20 MiB below 10; the smallest free block that is large enough is
taken, split if it pays, and joined again with its free neighbours; no segment is ever given back.
"""

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(eq=False)
class Block:
    size: int
    free: bool = True


@dataclass(eq=False)
class Segment:
    size: int
    small: bool
    blocks: list[Block] = field(default_factory=list)


class CachingAllocator:
    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._where: dict[object, tuple[Segment, Block]] = {}

    @property
    def taken(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def large_segments(self) -> list[int]:
        return [segment.size for segment in self.segments if not segment.small]

    def allocate(self, key: object, size: int) -> None:
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        fitting = [
            (b.size, s, b)
            for s in self.segments
            if s.small == small
            for b in s.blocks
            if b.free and b.size >= size
        ]
        if not fitting:
            segment = Segment(
                2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB, small
            )
            segment.blocks.append(Block(segment.size))
            self.segments.append(segment)
            fitting = [(segment.size, segment, segment.blocks[0])]
        _, segment, block = min(fitting, key=lambda entry: entry[0])
        rest = block.size - size
        if rest >= 512 if small else rest > MIB:
            segment.blocks.insert(segment.blocks.index(block) + 1, Block(rest))
            block.size = size
        block.free = False
        self._where[key] = segment, block

    def release(self, key: object) -> None:
        segment, block = self._where.pop(key)
        block.free = True
        at = segment.blocks.index(block)
        if at + 1 < len(segment.blocks) and segment.blocks[at + 1].free:
            block.size += segment.blocks.pop(at + 1).size
        if at > 0 and segment.blocks[at - 1].free:
            segment.blocks[at - 1].size += segment.blocks.pop(at).size

    def replay(self, name: object, events: list[tuple[int, int]]) -> None:
        """What `tests/gpu_path.py` recorded."""
        for key, size in events:
            if size > 0:
                self.allocate((name, key), size)
            else:
                self.release((name, key))
