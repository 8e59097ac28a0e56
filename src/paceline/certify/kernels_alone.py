"""The native sampler and verifier by themselves, on logits that no policy would give.

A small vocabulary and a trained policy leave much of a sampler unused: rows longer than one chunk, ties,
masked tokens, distributions that are nearly flat. Here its functions get those directly, and every row is
judged by the oracle.
"""

import random

import torch

from paceline.certify.certificate import Check
from paceline.certify.oracle.choice import rejection_choice, shared_noise_choice
from paceline.certify.oracle.noise import ACCEPT, RECOVER, SAMPLE, gumbel, gumbel_error, noise_bits
from paceline.certify.oracle.seeds import seed_of
from paceline.certify.oracle.truncation import distribution, scores_of
from paceline.certify.power import Power, found_by_equality
from paceline.certify.requests import ODD_SEEDS, SETTINGS, between, drawn_settings
from paceline.kernels.noise import draw_gumbel
from paceline.kernels.rejection import Truncation, verify_by_rejection
from paceline.kernels.sampler import sample, sample_truncated, top_logprobs
from paceline.types import Purpose, SamplingParams, request_seed

# Vocabularies (not a multiple of four, longer than a chunk of the sampler) and the share of rows each has.
VOCABULARIES = {51: 1.0, 5003: 0.1}

# Vocabularies that are drawn at random besides, of sizes between these, each with so many rows and settings.
DRAWN_VOCABULARIES = 8
DRAWN_SIZES = (4, 2500)
DRAWN_ROWS = 40
DRAWN_SETTINGS = 17

# How far float32 may be off in these logits.
TOLERANCE = 2e-5

# How far a logprob may be off.
LOGPROB_LIMIT = 1e-4


def kernel_checks(rows: int, device: torch.device, seed: int) -> list[Check]:
    """Runs all of them on so many rows a setting."""
    return [
        _noise(rows, device, seed),
        _seeds(seed),
        _sampler(rows, device, seed),
        _ties(device),
        _rejection(rows, device, seed),
    ]


def _case(rows: int, vocab_size: int, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """Returns logits of every sharpness, some tokens masked, seeds and positions."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(rows, vocab_size, generator=generator)
    logits_RV *= torch.logspace(-2, 1, rows).unsqueeze(1)[torch.randperm(rows, generator=generator)]
    logits_RV[::7, ::5] = -torch.inf
    seeds_R = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator)
    seeds_R[: len(ODD_SEEDS)] = torch.tensor(ODD_SEEDS)[:rows]
    positions_R = torch.randint(0, 1 << 20, (rows,), generator=generator)
    return logits_RV.to(device), seeds_R.to(device), positions_R.to(device)


def _noise(rows: int, device: torch.device, seed: int) -> Check:
    """Compares the noise of all streams with the published definition."""
    worst = 0.0
    draws = 0
    for vocab_size, share in VOCABULARIES.items():
        _, seeds_R, positions_R = _case(max(len(ODD_SEEDS), int(share * rows)), 4, device, seed)
        draws += 3 * len(seeds_R) * vocab_size
        for stream in (SAMPLE, ACCEPT, RECOVER):
            bits_RV = noise_bits(seeds_R, positions_R, vocab_size, stream)
            own_RV = draw_gumbel(seeds_R, positions_R, vocab_size, stream).double()
            off_RV = (own_RV - gumbel(bits_RV)).abs() / gumbel_error(bits_RV)
            worst = max(worst, float(off_RV.max()))
    detail = f"off by {worst:.2f} of what float32 may be, over {draws} draws"
    return Check("alone: noise as published", worst <= 1, detail)


def _seeds(seed: int) -> Check:
    """Compares the seeds of requests with the published definition; all must differ."""
    cases = [
        (purpose, seed + run, step, prompt, occurrence, sample)
        for purpose in Purpose
        for run in range(2)
        for step in range(4)
        for prompt in ("7", "77", "seven")
        for occurrence in range(2)
        for sample in range(8)
    ]
    own = [request_seed(*case) for case in cases]
    wrong = sum(a != seed_of(*case) for a, case in zip(own, cases, strict=True))
    detail = f"{wrong} of {len(cases)} differ from the definition, {len(set(own))} are different"
    return Check("alone: seeds as published", wrong == 0 and len(set(own)) == len(own), detail)


def _sampler(rows: int, device: torch.device, seed: int) -> Check:
    """Judges tokens and logprobs of `sample` and `sample_truncated`."""
    wrong = decided = 0
    largest = 0.0
    cases = [(size, int(share * rows), list(SETTINGS)) for size, share in VOCABULARIES.items()]
    rng = random.Random(f"certify kernels {seed}")
    for _ in range(DRAWN_VOCABULARIES):
        size = round(between(rng, *DRAWN_SIZES))
        cases.append((size, DRAWN_ROWS, drawn_settings(rng, DRAWN_SETTINGS, size)))
    for index, (vocab_size, number, settings) in enumerate(cases):
        number = max(len(ODD_SEEDS), number)
        logits_RV, seeds_R, positions_R = _case(number, vocab_size, device, seed + 100 * index + 1)
        top = min(5, vocab_size)
        for setting in settings:
            tokens_R, logprobs_R = _sampled(logits_RV, setting, seeds_R, positions_R)
            tolerance_R = torch.full_like(logits_RV[:, 0], TOLERANCE, dtype=torch.float64)
            choice = shared_noise_choice(logits_RV, setting, seeds_R, positions_R, tolerance_R)
            wrong += int((~choice.explains(tokens_R)).sum())
            decided += int(choice.decided_N.sum())
            expected_RV = scores_of(logits_RV, setting.temperature).log_softmax(-1)
            own_R = expected_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
            off_R = (logprobs_R.double() - own_R).abs() / (1 + own_R.abs())
            values_R5, ids_R5 = top_logprobs(
                logits_RV, torch.full_like(off_R, setting.temperature).float(), top
            )
            top_off = (values_R5.double() - expected_RV.topk(top).values).abs() / (1 + values_R5.abs())
            at_ids = (values_R5.double() - expected_RV.gather(1, ids_R5)).abs() / (1 + values_R5.abs())
            largest = max(largest, float(off_R.max()), float(top_off.max()), float(at_ids.max()))
    detail = f"{wrong} of {decided} tokens wrong; logprobs off by {largest:.0e} (allowed: {LOGPROB_LIMIT:g})"
    return Check("alone: sampler", wrong == 0 and largest <= LOGPROB_LIMIT, detail, power=_power(decided))


def _sampled(
    logits_RV: torch.Tensor, setting: SamplingParams, seeds_R: torch.Tensor, positions_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples as an engine does: rows that truncate run beside rows that do not."""
    temperature_R = torch.full_like(logits_RV[:, 0], setting.temperature)
    if not setting.truncates:
        return sample(logits_RV, temperature_R, seeds_R, positions_R)
    cut = _truncation(setting, len(logits_RV), logits_RV.device)
    # The same rows once more, untruncated, in between: a row's parameters must be its own.
    both = [x.repeat_interleave(2, 0) for x in (logits_RV, temperature_R, seeds_R, positions_R)]
    cuts = [x.repeat_interleave(2) for x in (cut.top_k_R, cut.top_p_R, cut.min_p_R)]
    for values, off in zip(cuts, (0, 1.0, 0.0), strict=True):
        values[1::2] = off
    tokens_R, logprobs_R, _ = sample_truncated(*both, *cuts)
    return tokens_R[::2], logprobs_R[::2]


def _truncation(setting: SamplingParams, rows: int, device: torch.device) -> Truncation:
    return Truncation(
        torch.full((rows,), setting.top_k, device=device),
        torch.full((rows,), setting.top_p, device=device),
        torch.full((rows,), setting.min_p, device=device),
    )


def _ties(device: torch.device) -> Check:
    """Checks that the lower id wins: greedily, and where top-k or top-p cuts among equals."""
    levels = torch.tensor([0.0, 2.0, 2.0, 1.0, 1.0, 1.0, -1.0, -1.0]).repeat(8).to(device)
    rows = 400
    logits_RV = levels.repeat(rows, 1)
    seeds_R = torch.arange(rows, device=device) * 977
    positions_R = torch.arange(rows, device=device) % 50
    wrong = 0
    for setting in (
        SamplingParams(0.0),
        SamplingParams(0.0, top_k=1),
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.0, top_k=3),
        SamplingParams(1.0, top_k=20),
        SamplingParams(2.0, top_p=0.17),
    ):
        tokens_R, _ = _sampled(logits_RV, setting, seeds_R, positions_R)
        none_R = torch.zeros(rows, dtype=torch.float64, device=device)
        expected_R = shared_noise_choice(logits_RV, setting, seeds_R, positions_R, none_R).token_N
        wrong += int((tokens_R != expected_R).sum())
    return Check("alone: of equal logits the lower id", wrong == 0, f"{wrong} of {6 * rows} wrong")


def _rejection(rows: int, device: torch.device, seed: int) -> Check:
    """Judges `verify_by_rejection`: proposals of a drafter, certain ones, none, and the token after them."""
    wrong = decided = 0
    rng = random.Random(f"certify rejection {seed}")
    cases = [(37, 3, setting) for setting in SETTINGS]
    cases += [(37, rng.randint(1, 9), setting) for setting in drawn_settings(rng, DRAWN_SETTINGS, 37)]
    for round_, (vocab_size, proposals, setting) in enumerate(cases):
        queries = proposals + 1
        logits_TV, seeds_T, _ = _case(rows * queries, vocab_size, device, seed + 2 + round_)
        # Mostly near the policy: otherwise hardly anything is accepted.
        generator = torch.Generator().manual_seed(seed + 50 + round_)
        draft_TV = logits_TV + 0.5 * torch.randn(logits_TV.shape, generator=generator).to(device)
        logits_RQV, draft_RQV = (x.unflatten(0, (rows, queries)) for x in (logits_TV, draft_TV))
        seeds_RQ = seeds_T.unflatten(0, (rows, queries))[:, :1].expand(-1, queries)
        positions_RQ = torch.arange(queries, device=device).expand(rows, -1) + 11
        known = round_ % 2 == 0
        facts = setting, seeds_RQ[:, :-1].flatten(), positions_RQ[:, :-1].flatten()
        tolerance_T = torch.full((rows * proposals,), TOLERANCE, dtype=torch.float64, device=device)
        flat, flat_draft = (x[:, :-1].flatten(0, 1) for x in (logits_RQV, draft_RQV))
        drafted_T = shared_noise_choice(flat_draft, *facts, tolerance_T).token_N
        q_TV = distribution(flat_draft, setting)
        cut = _truncation(setting, rows, device) if setting.truncates else None
        drafted_RK = drafted_T.unflatten(0, (rows, proposals))
        tokens_RQ, _ = verify_by_rejection(
            logits_RQV,
            torch.full((rows, queries), setting.temperature, device=device),
            seeds_RQ.contiguous(),
            positions_RQ.contiguous(),
            cut,
            drafted_RK,
            q_TV.float().unflatten(0, (rows, proposals)) if known else None,
            torch.arange(rows, device=device),
        )
        # Behind the first token that is not its proposal there is nothing to judge.
        reached_RQ = torch.ones_like(tokens_RQ, dtype=torch.bool)
        reached_RQ[:, 1:] = (tokens_RQ[:, :-1] == drafted_RK).cumprod(1).bool()
        choice = rejection_choice(
            flat, flat_draft if known else None, None if known else drafted_T, *facts, tolerance_T
        )
        last = setting, seeds_RQ[:, -1], positions_RQ[:, -1], tolerance_T[:rows]
        bonus = shared_noise_choice(logits_RQV[:, -1], *last)
        for own, part in ((choice, slice(0, proposals)), (bonus, slice(proposals, queries))):
            judged_N = own.decided_N & reached_RQ[:, part].flatten()
            wrong += int((judged_N & (own.token_N != tokens_RQ[:, part].flatten())).sum())
            decided += int(judged_N.sum())
    detail = f"{wrong} of {decided} tokens wrong"
    return Check("alone: rejection", wrong == 0, detail, power=_power(decided))


def _power(decided: int) -> tuple[Power, ...]:
    return (Power("alone", "every row", decided, found_by_equality(decided)),)
