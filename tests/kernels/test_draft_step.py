"""The gather of a draft's queries: the kernel against its reference, that against a loop over rows."""

import pytest
import torch

from paceline.kernels import draft_step
from tests.kernels.test_row_step import BLOCK_SIZE, make_rows


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_gather_draft_reference_equals_a_loop_over_rows(columns):
    for seed in range(20):
        rows, slots, _ = make_rows(seed)
        rows.length[3] = 1  # a row of one token has no position before its last
        walk = draft_step.gather_draft.reference(rows, slots, columns, max_position=15, block_size=BLOCK_SIZE)
        for i, slot in enumerate(slots.tolist()):
            length, active = int(rows.length[slot]), bool(rows.active[slot])
            assert walk.tokens_2R[1, i] == rows.tokens[slot, length - 1]
            assert walk.tokens_2R[0, i] == (rows.tokens[slot, length - 2] if length > 1 else 0)
            for c in range(columns):
                position = length - 2 + c
                runs = active and position >= 0
                block = int(rows.block_table[slot, max(position, 0) // BLOCK_SIZE])
                stored = (
                    block * BLOCK_SIZE + position % BLOCK_SIZE if runs and position < rows.limit[slot] else -1
                )
                assert walk.positions_CR[c, i] == min(max(position, 0), 15)
                assert walk.cache_slots_CR[c, i] == stored
                assert walk.context_CR[c, i] == (position if runs else -1)
                assert walk.sample_positions_CR[c, i] == length + c


def check_kernel(device: str) -> None:
    for seed in range(8):
        for columns in (1, 3, 8):
            rows, slots, _ = make_rows(seed, device)
            rows.length[3] = 1
            args = (rows, slots, columns, 15, BLOCK_SIZE)
            ours, theirs = draft_step.gather_draft_triton(*args), draft_step.gather_draft.reference(*args)
            for name, tensor in theirs._asdict().items():
                assert torch.equal(getattr(ours, name), tensor), name


def test_gather_draft_kernel_equals_the_reference_interpreted():
    pytest.importorskip("triton")
    check_kernel("cpu")


@pytest.mark.gpu
def test_gather_draft_kernel_equals_the_reference_on_the_gpu():
    check_kernel("cuda")
