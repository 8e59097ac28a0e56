"""The eagle head's small kernels against their references."""

import pytest
import torch

from paceline.kernels import eagle_step
from paceline.kernels.fp8_quantise import quantise_rows_triton


def check(device: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(device, dtype)

    for tokens, width in ((1, 64), (5, 96), (12, 576)):
        ids = torch.randint(0, 30, (tokens,), generator=g).to(device)
        args = ids, random(30, width), random(tokens, width), random(width), random(width), 1e-5
        ours, theirs = eagle_step.eagle_inputs_triton(*args), eagle_step.eagle_inputs.reference(*args)
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for tokens, width in ((1, 128), (5, 384), (3, 512)):
        ids = torch.randint(0, 30, (tokens,), generator=g).to(device)
        args = ids, random(30, width), random(tokens, width), random(width), random(width), 1e-5
        ours = eagle_step.eagle_inputs_triton(*args, quantise=True)
        theirs = quantise_rows_triton(eagle_step.eagle_inputs_triton(*args))
        values = (x.values_MK[:tokens].view(torch.uint8) for x in (ours, theirs))
        assert torch.equal(*values)
        assert torch.equal(*(x.scales_GM[:, :tokens] for x in (ours, theirs)))
    for rows, queries in ((1, 1), (4, 1), (4, 3), (3, 8)):
        features, slots = random(rows * queries, 96), torch.randperm(9, generator=g)[:rows].to(device)
        context = torch.randint(0, 20, (rows,), generator=g).to(device)
        lengths = torch.zeros(9, dtype=torch.int64, device=device)
        # From none to all kept.
        lengths[slots] = context + 1 + torch.randint(0, queries + 1, (rows,), generator=g).to(device)
        context[0] = -1  # not active
        kept = [torch.zeros(9, 96, dtype=dtype, device=device) for _ in range(2)]
        for run, out in zip((eagle_step.keep_last_triton, eagle_step.keep_last.reference), kept, strict=True):
            run(features, slots, context, lengths, out)
        assert torch.equal(*kept)


def test_eagle_step_kernels_equal_the_references_interpreted():
    pytest.importorskip("triton")
    check("cpu", torch.float32)


@pytest.mark.gpu
def test_eagle_step_kernels_equal_the_references_on_the_gpu():
    check("cuda", torch.bfloat16)
