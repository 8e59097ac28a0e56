"""The seed of a request by its published definition.

BLAKE2b (RFC 7693) with 8 bytes of output over the JSON list [purpose, run seed, step, prompt id, occurrence
of that prompt, sample index], read as a signed little-endian integer.
"""

import hashlib
import json
import struct


def seed_of(
    purpose: str, run_seed: int, step: int, prompt_id: str, occurrence: int, sample_index: int
) -> int:
    """Returns the seed that a request for this must have."""
    text = json.dumps([str(purpose), run_seed, step, prompt_id, occurrence, sample_index])
    (seed,) = struct.unpack("<q", hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())
    return seed
