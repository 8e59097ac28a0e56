"""The kernels decide as an oracle in float64 does, wherever rounding does not, and as the torch reference."""

from dataclasses import dataclass

import pytest
import torch
from scipy import stats

from paceline.certify.oracle.choice import rejection_choice, shared_noise_choice
from paceline.certify.oracle.noise import ACCEPT, noise_bits, uniform
from paceline.certify.oracle.truncation import distribution
from paceline.kernels import rejection_launch, sampler
from paceline.kernels.rejection import (
    keep_distribution,
    sampled_distribution,
    verify_by_rejection,
    verify_by_rejection_reference,
)
from paceline.kernels.rejection_launch import keep_distribution_triton, verify_by_rejection_triton
from paceline.kernels.sampler import sample_reference, sample_triton
from paceline.types import SamplingParams

# How far float32 may be off in these logits.
TOLERANCE = 2e-5
TEMPERATURES = (1.0, 0.0, 0.7, 1.6)


@dataclass
class Case:
    """Rows of every temperature in turn, with proposals that a drafter near the policy drew."""

    logits_RQV: torch.Tensor
    draft_RKV: torch.Tensor
    temperature_RQ: torch.Tensor
    seed_RQ: torch.Tensor
    position_RQ: torch.Tensor
    proposals_RK: torch.Tensor
    known: bool

    @staticmethod
    def random(rows: int, proposals: int, vocab_size: int, known: bool, device: str, dtype=torch.float32):
        queries = proposals + 1
        logits_RQV = (torch.randn(rows, queries, vocab_size, device=device) * 3).to(dtype)
        # Some tokens are masked, and whole chunks of long rows.
        logits_RQV[::3, :, : vocab_size // 2] = -torch.inf
        draft_RKV = logits_RQV[:, :-1] + 0.4 * torch.randn(rows, proposals, vocab_size, device=device)
        # A drafter of fewer tokens than the policy has.
        draft_RKV[1::3, :, vocab_size - vocab_size // 4 :] = -torch.inf
        heat_R = torch.tensor(TEMPERATURES, device=device).repeat(-(-rows // 4))[:rows]
        case = Case(
            logits_RQV,
            draft_RKV,
            heat_R.unsqueeze(1).expand(-1, queries).contiguous(),
            torch.randint(-(2**62), 2**62, (rows, 1), device=device).expand(-1, queries).contiguous(),
            (torch.randint(0, 9999, (rows, 1), device=device) + torch.arange(queries, device=device)),
            torch.zeros(rows, proposals, dtype=torch.int64, device=device),
            known,
        )
        for rows_N, *facts in case.by_temperature(proposals):
            drawn = shared_noise_choice(case.draft_RKV[rows_N].flatten(0, 1), *facts)
            case.proposals_RK[rows_N] = drawn.token_N.unflatten(0, (-1, proposals))
        return case

    def by_temperature(self, columns: int):
        """Yields the rows of a temperature, and what the oracle asks of their columns besides logits."""
        for heat in TEMPERATURES:
            rows_N = (self.temperature_RQ[:, 0] == heat).nonzero().squeeze(1)
            if len(rows_N):
                noise = (x[rows_N, :columns].flatten() for x in (self.seed_RQ, self.position_RQ))
                slack = torch.full((columns * len(rows_N),), TOLERANCE, dtype=torch.float64)
                yield rows_N, SamplingParams(heat), *noise, slack.to(rows_N.device)

    def probabilities(self) -> torch.Tensor | None:
        """What proposals were drawn from, where it is known."""
        if not self.known:
            return None
        q_RKV = torch.zeros(self.draft_RKV.shape, device=self.draft_RKV.device)
        for rows_N, sampling, *_ in self.by_temperature(1):
            flat = distribution(self.draft_RKV[rows_N].flatten(0, 1), sampling)
            q_RKV[rows_N] = flat.float().unflatten(0, q_RKV[rows_N].shape[:2])
        return q_RKV

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What both implementations take before proposals and probabilities."""
        return self.logits_RQV, self.temperature_RQ, self.seed_RQ, self.position_RQ

    def choices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's tokens, as if all positions were reached, and which of them rounding cannot change."""
        tokens_RQ, decided_RQ = torch.zeros_like(self.seed_RQ), torch.zeros_like(self.seed_RQ)
        num_queries = tokens_RQ.shape[1]
        last_RQ = torch.nn.functional.pad(self.proposals_RK, (0, 1), value=-2)
        for (rows_N, *facts), (_, *before) in zip(
            self.by_temperature(num_queries), self.by_temperature(num_queries - 1), strict=True
        ):
            logits = self.logits_RQV[rows_N]
            sampled, drawn = (
                shared_noise_choice(logits.flatten(0, 1), *facts, recovers=recovers)
                for recovers in (False, True)
            )
            verified = rejection_choice(
                logits[:, :-1].flatten(0, 1),
                self.draft_RKV[rows_N].flatten(0, 1) if self.known else None,
                None if self.known else self.proposals_RK[rows_N].flatten().clamp(min=0),
                *before,
            )
            for name, out in (("token_N", tokens_RQ), ("decided_N", decided_RQ)):
                own, none = (getattr(x, name).unflatten(0, (-1, num_queries)) for x in (sampled, drawn))
                own = own.long()
                own[:, :-1] = getattr(verified, name).unflatten(0, (-1, num_queries - 1))
                out[rows_N] = torch.where(last_RQ[rows_N] == -1, none.long(), own)
        return tokens_RQ, decided_RQ.bool()


def by_kernels(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the kernels, with the probabilities in slots of their own as an engine keeps them."""
    rows, proposals, vocab_size = case.draft_RKV.shape
    probabilities = case.probabilities()
    slots_R = torch.randperm(rows + 3, device=case.seed_RQ.device)[:rows]
    if probabilities is not None:
        kept = probabilities.new_full((rows + 3, proposals + 2, vocab_size), torch.nan)
        kept[slots_R, :proposals] = probabilities
        probabilities = kept
    return verify_by_rejection_triton(*case.inputs(), case.proposals_RK, probabilities, slots_R)


def stops_of(tokens_RQ: torch.Tensor, proposals_RK: torch.Tensor) -> torch.Tensor:
    """The position of each row's last token that is kept."""
    return (tokens_RQ[:, :-1] == proposals_RK).cumprod(1).sum(1)


def judge(case: Case, tokens_RQ: torch.Tensor, logprobs_RQ: torch.Tensor) -> torch.Tensor:
    """Asserts what the oracle has decided; returns which rows it has decided as far as they go."""
    queries = torch.arange(tokens_RQ.shape[1], device=tokens_RQ.device)
    kept_RQ = queries <= stops_of(tokens_RQ, case.proposals_RK).unsqueeze(1)
    expected_RQ, decided_RQ = case.choices()
    # Rounding may decide a token, and then what follows it.
    surely_RQ = kept_RQ & decided_RQ.cumprod(1).bool()
    assert torch.equal(tokens_RQ[surely_RQ], expected_RQ[surely_RQ])
    # The best two of logits in bfloat16 are often equal.
    share = 0.5 if case.logits_RQV.dtype == torch.bfloat16 else 0.8
    assert int(surely_RQ.sum()) >= share * int(kept_RQ.sum()) - 1, "hardly anything was judged"
    heat_RQ1 = torch.where(case.temperature_RQ > 0, case.temperature_RQ, 1.0).unsqueeze(-1)
    full_RQV = (case.logits_RQV.double() / heat_RQ1).log_softmax(-1)
    own_RQ = full_RQV.gather(-1, tokens_RQ.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs_RQ[kept_RQ].double(), own_RQ[kept_RQ], rtol=1e-5, atol=2e-5)
    return (surely_RQ == kept_RQ).all(1)


def check(case: Case) -> None:
    """Judges the kernels by the oracle, and the reference by the kernels."""
    tokens_RQ, logprobs_RQ = by_kernels(case)
    surely_R = judge(case, tokens_RQ, logprobs_RQ)
    expected_RQ, _ = verify_by_rejection_reference(
        *case.inputs(), None, case.proposals_RK, case.probabilities()
    )
    queries = torch.arange(tokens_RQ.shape[1], device=tokens_RQ.device)
    behind_RQ = queries > stops_of(tokens_RQ, case.proposals_RK).unsqueeze(1)
    assert ((tokens_RQ == expected_RQ) | behind_RQ)[surely_R].all()


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["probabilities", "certain"])
@pytest.mark.parametrize(
    "vocab_size, dtype",
    [(130, torch.float32), (2501, torch.bfloat16), pytest.param(6003, torch.float32, marks=pytest.mark.slow)],
)
def test_kernels_decide_as_the_oracle(device, known, vocab_size, dtype):
    check(Case.random(8, 3, vocab_size, known, device, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("proposals", [1, 2, 7, 15])
def test_any_number_of_proposals(device, proposals):
    check(Case.random(8, proposals, 300, True, device))


def test_no_proposal_means_the_policys_own_draw(device):
    case = Case.random(8, 2, 130, True, device)
    case.proposals_RK[:4, 0] = -1
    case.proposals_RK[4:, 1] = -1
    tokens_RQ, logprobs_RQ = by_kernels(case)
    assert (stops_of(tokens_RQ, case.proposals_RK)[:4] == 0).all()
    judge(case, tokens_RQ, logprobs_RQ)


def test_greedy_takes_the_lowest_of_equal_logits(device):
    logits = torch.zeros(1, 3, 5000, device=device)
    logits[:, :, [4999, 4000, 700, 701]] = 5.0
    zeros = torch.zeros(1, 3, dtype=torch.int64, device=device)
    proposals = torch.tensor([[700, 701]], device=device)
    inputs = logits, zeros.float(), zeros, zeros, proposals, None, zeros[:, 0]
    assert verify_by_rejection_triton(*inputs)[0][0, :2].tolist() == [700, 700]


def test_the_last_position_is_the_samplers(device, monkeypatch):
    if device == "cpu":  # a chunk's winner is found token by token in the interpreter
        monkeypatch.setattr(rejection_launch, "CHUNK", 64)
        monkeypatch.setattr(sampler, "CHUNK", 64)
    case = Case.random(4, 1, 230, False, device)
    case.logits_RQV[:, 0] = -100.0
    case.logits_RQV[torch.arange(4), 0, case.proposals_RK[:, 0]] = 100.0  # certain, and accepted
    tokens_RQ, logprobs_RQ = by_kernels(case)
    expected = sample_triton(*(x[:, 1].contiguous() for x in case.inputs()))
    assert torch.equal(tokens_RQ[:, 0], case.proposals_RK[:, 0])
    assert torch.equal(tokens_RQ[:, 1], expected[0])
    # A compiler may deal the terms of a sum to other lanes.
    slack = 0.0 if device == "cpu" else 1e-5
    torch.testing.assert_close(logprobs_RQ[:, 1], expected[1], rtol=slack, atol=slack)


def test_rows_are_invariant(device):
    case = Case.random(3, 2, 2300, True, device)
    inputs, probabilities = (*case.inputs(), case.proposals_RK), case.probabilities()
    whole = verify_by_rejection_triton(*inputs, probabilities, torch.arange(3, device=device))
    for row in range(3):
        alone = verify_by_rejection_triton(
            *(x[row : row + 1] for x in inputs), probabilities, torch.tensor([row], device=device)
        )
        assert all(torch.equal(a, w[row : row + 1]) for a, w in zip(alone, whole, strict=True))


@pytest.mark.parametrize("vocab_size", [40, pytest.param(4200, marks=pytest.mark.slow)])
def test_where_nothing_is_left_of_p_the_row_ends_in_another_token(device, vocab_size):
    """As if rounding had made q at least p everywhere: the drawn token must not pass for its proposal.

    What followed it was not verified. The draw comes from p without the proposal, in the reference too.
    """
    rows = 24
    case = Case.random(rows, 2, vocab_size, True, device)
    # Three tokens have nearly all of p, one of them proposed: a draw from all of p would often be it.
    case.logits_RQV[:, :2, [3, 7, vocab_size - 2]] = 20.0
    case.proposals_RK[:] = 3
    every_R = torch.arange(rows, device=device)
    q = torch.ones(rows, 2, vocab_size, device=device)
    args = *case.inputs(), case.proposals_RK, q, every_R
    tokens_RQ, logprobs_RQ = verify_by_rejection_triton(*args)
    expected_RQ, _ = verify_by_rejection_reference(*case.inputs(), None, case.proposals_RK, q)
    heats = case.temperature_RQ[:, 0].tolist()
    p_RV = torch.cat(
        [distribution(case.logits_RQV[i, :1], SamplingParams(heat)) for i, heat in enumerate(heats)]
    )
    u_R = uniform(noise_bits(case.seed_RQ[:, 0], case.position_RQ[:, 0], 1, ACCEPT)).squeeze(1)
    rejected_R = u_R > p_RV[:, 3] + 1e-4
    assert rejected_R.sum() >= 3, "rows that show nothing"
    assert (tokens_RQ[rejected_R, 0] != 3).all()
    drawn_R = p_RV.gather(1, tokens_RQ[:, :1]).squeeze(1)
    assert (drawn_R > 0).all() and torch.isfinite(logprobs_RQ).all()
    assert torch.equal(tokens_RQ[rejected_R, 0], expected_RQ[rejected_R, 0])


def test_chunks_of_which_q_left_nothing_wait_for_those_with_something(device, monkeypatch):
    """q covers p where p is large; what is left lies in another chunk."""
    monkeypatch.setattr(rejection_launch, "CHUNK", 8)
    rows = 4
    logits = torch.full((rows, 2, 20), -torch.inf, device=device)
    logits[:, :, [0, 1, 9]] = torch.tensor([3.0, 3.0, 0.0], device=device)
    q = torch.full((rows, 1, 20), 0.0, device=device)
    q[:, :, :3] = 0.6
    every_R = torch.arange(rows, device=device)
    seed = every_R.unsqueeze(1).expand(-1, 2).contiguous()
    proposals = torch.full((rows, 1), 2, device=device)  # which the policy never draws
    args = logits, torch.ones(rows, 2, device=device), seed, seed, proposals, q, every_R
    assert verify_by_rejection_triton(*args)[0][:, 0].tolist() == [9] * rows


def test_a_certain_token_is_accepted_whatever_q_says(device):
    """Else there would be nothing to draw in its place. q is above 1 by rounding."""
    rows = 8
    logits = torch.full((rows, 2, 7), -200.0, device=device)
    logits[:, :, 2] = 0.0
    shape = rows, 2
    seed = torch.arange(rows, device=device).unsqueeze(1).expand(shape).contiguous()
    proposals = torch.full((rows, 1), 2, device=device)
    q = torch.full((rows, 1, 7), 4.0, device=device)
    heat, every_R = torch.ones(shape, device=device), torch.arange(rows, device=device)
    args = logits, heat, seed, seed, proposals, q, every_R
    assert (verify_by_rejection_triton(*args)[0] == 2).all()
    assert (verify_by_rejection_reference(*args[:4], None, proposals, q)[0] == 2).all()


def test_a_row_of_nan_gives_tokens_that_exist_and_no_logprob(device):
    case = Case.random(3, 2, 2100, True, device)
    case.logits_RQV[1, 0] = torch.nan
    tokens_RQ, logprobs_RQ = by_kernels(case)
    assert ((tokens_RQ >= 0) & (tokens_RQ < 2100)).all()
    assert logprobs_RQ[:, 0].isnan().tolist() == [False, True, False]


P = torch.tensor([0.6, 0.2, 0.1, 0.06, 0.04])
Q = torch.tensor([0.4, 0.05, 0.35, 0.1, 0.1])


def frequencies(rows: int, known: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and proposals of rows that all have p and q, proposals drawn with shared noise."""
    shape = rows, 2
    seed = (torch.arange(rows) * 7919 + 5).unsqueeze(1).expand(shape).contiguous().to(device)
    position = torch.tensor([10, 11]).expand(shape).contiguous().to(device)
    noise = torch.ones(shape, device=device), seed, position
    drawn = sample_reference(*(x.cpu() for x in (Q.log().expand(rows, -1), *(y[:, 0] for y in noise))))
    drafted = drawn[0].to(device).unsqueeze(1)
    q = Q.expand(rows, 1, -1).contiguous().to(device) if known else None
    logits = P.log().to(device).expand(rows, 2, -1).contiguous()
    slots = torch.arange(rows, device=device)
    return verify_by_rejection_triton(logits, *noise, drafted, q, slots)[0], drafted


@pytest.mark.parametrize("known", [True, False], ids=["probabilities", "certain"])
@pytest.mark.slow
def test_every_position_has_the_policys_distribution(device, known, monkeypatch):
    monkeypatch.setattr(rejection_launch, "CHUNK", 8)  # little to interpret
    tokens, drafted = frequencies(400 if device == "cpu" else 40_000, known, device)
    reached = tokens[:, 0] == drafted[:, 0]
    for kept in (tokens[:, 0], tokens[reached, 1]):
        counts = torch.bincount(kept.cpu(), minlength=5).double()
        assert stats.chisquare(counts, P.double() / P.double().sum() * counts.sum()).pvalue > 1e-5
    accepts = 1 - 0.5 * float((P - Q).abs().sum()) if known else float((P * Q).sum())
    assert float(reached.double().mean()) == pytest.approx(accepts, abs=5 * (0.25 / len(tokens)) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafters_distribution_goes_to_its_slots(device, dtype):
    logits = (torch.randn(4, 4500, device=device) * 3).to(dtype)
    logits[1, 2000:4400] = -torch.inf
    heat = torch.tensor([1.0, 0.7, 0.0, 1.5], device=device)
    slots = torch.tensor([5, 0, 3, 2], device=device)
    kept, expected = torch.full((2, 6, 3, 4500), -1.0, device=device)
    keep_distribution_triton(logits, heat, kept, slots, 1)
    expected[slots, 1] = sampled_distribution(logits, heat)
    torch.testing.assert_close(kept, expected, rtol=3e-5, atol=1e-9)


# -- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("known", [True, False], ids=["probabilities", "certain"])
@pytest.mark.parametrize("proposals", [1, 3, 7])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("vocab_size", [49152, 151936])
def test_real_sizes(vocab_size, rows, proposals, known):
    check(Case.random(rows, proposals, vocab_size, known, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("known", [True, False], ids=["probabilities", "certain"])
def test_a_graph_decides_anew(known):
    """Captured once, and replayed with other logits, seeds, proposals and probabilities in its memory."""
    vocab_size, device = 49152, "cuda"
    first, second = (Case.random(16, 3, vocab_size, known, device) for _ in range(2))
    slots = torch.arange(16, device=device)
    held = [x.clone() for x in (*first.inputs(), first.proposals_RK)]
    probabilities = first.probabilities()
    verify_by_rejection(*held[:4], None, held[4], probabilities, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = verify_by_rejection(*held[:4], None, held[4], probabilities, slots)
    for case in (first, second, first):
        for own, new in zip(held, (*case.inputs(), case.proposals_RK), strict=True):
            own.copy_(new)
        if known:
            probabilities.copy_(case.probabilities())
        graph.replay()
        expected = verify_by_rejection(*held[:4], None, held[4], probabilities, slots)
        assert all(torch.equal(c, e) for c, e in zip(captured, expected, strict=True))


@pytest.mark.gpu
def test_a_drafters_distribution_at_real_sizes():
    logits = torch.randn(64, 151936, device="cuda") * 3
    heat = torch.tensor(TEMPERATURES, device="cuda").repeat(16)
    slots = torch.randperm(64, device="cuda")
    kept = torch.zeros(64, 2, 151936, device="cuda")
    keep_distribution(logits, heat, None, kept, slots, 1)
    expected = sampled_distribution(logits.double(), heat)
    torch.testing.assert_close(kept[slots, 1].double(), expected, rtol=3e-5, atol=1e-12)
    assert not kept[:, 0].any()
