"""Judges every token of a completion: is it the one that the oracle's noise and the policy's logits give?

    completion ──▶ forward pass over its text in float64 ──▶ the oracle's choice at each position ──▶ verdicts

The text is the backend's own, so a token that rounding decided otherwise does not make those after it
differ. Tokens of one weight version are judged with that version's policy. In a narrow type (bf16, FP8),
perturbed copies of the policy bound how far logits may be off in each context, and how often they
would choose what the oracle does not explain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.certify.distribution import spread_factor
from paceline.certify.oracle.choice import Choice, rejection_choice, shared_noise_choice
from paceline.certify.oracle.truncation import scores_of
from paceline.certify.subject import OpenedBackend, Policy, Snapshot, Subject, rounded_copies
from paceline.policy.attention import PackedAttention
from paceline.types import Completion, SamplingParams

# Tokens of a forward pass, and logits that it holds at once.
PASS_TOKENS = 4096
PASS_LOGITS = 1 << 24


@dataclass
class Verdicts:
    """The verdicts on one completion's tokens, in their order."""

    explained: list[bool]  # it is the oracle's choice, or rounding may have made it another
    decided: list[bool]  # rounding cannot
    random: list[bool]  # the choice is not the most likely token
    expected: list[int]
    logprob_error: list[float]  # below temperature 1, which magnifies it, that of the logits
    top_error: list[float]  # of the most likely tokens' logprobs, where they were requested
    copies_unexplained: list[int]  # copies of the policy whose own choice is not explained

    @staticmethod
    def empty(count: int) -> "Verdicts":
        """Returns verdicts to be filled in."""
        return Verdicts(*([None] * count for _ in range(7)))


@dataclass(frozen=True)
class Step:
    """A token's place in the step that made it."""

    depth: int  # tokens of the step before it
    proposed: int | None = None  # what was proposed there; None: not known


def steps_of(completion: Completion, opened: OpenedBackend) -> list[Step]:
    """Returns each token's place in its step; depth 0 where the backend does not report where steps began."""
    name = completion.request.id
    starts = set(opened.step_starts.get(name, ()))
    first = len(completion.request.prompt)
    steps = []
    start = first
    for position in range(first, first + len(completion.tokens)):
        if position in starts or not starts:
            start = position
        proposals = opened.proposals.get((name, start), [])
        depth = position - start
        steps.append(Step(depth, proposals[depth] if depth < len(proposals) else None))
    return steps


@dataclass
class Judge:
    """Judges completions of one subject, each different one once."""

    subject: Subject
    tolerance: float  # how far logits may be off anywhere
    versions: dict[int, Snapshot] = field(default_factory=dict)  # of the weights; missing: the subject's own
    _known: dict[tuple, Verdicts] = field(default_factory=dict)

    def shared_noise(self, completions: Sequence[Completion]) -> list[Verdicts]:
        """Judges tokens that were drawn with the published noise."""
        keys = [_key(completion) for completion in completions]
        new = {key: c for key, c in zip(keys, completions, strict=True) if key not in self._known}
        for completion, verdicts in zip(new.values(), self._judged(list(new.values()), None), strict=True):
            self._known[_key(completion)] = verdicts
        return [self._known[key] for key in keys]

    def rejection(
        self, completions: Sequence[Completion], steps: Sequence[list[Step]], proposed: int
    ) -> list[Verdicts]:
        """Judges tokens of steps that proposed so many tokens and verified them by rejection."""
        return self._judged(completions, [[step.depth for step in own] for own in steps], steps, proposed)

    @torch.inference_mode()
    def _judged(
        self,
        completions: Sequence[Completion],
        depths: list[list[int]] | None,
        steps: Sequence[list[Step]] = (),
        proposed: int = 0,
    ) -> list[Verdicts]:
        verdicts = [Verdicts.empty(len(completion.tokens)) for completion in completions]
        versions = {s.weight_version for completion in completions for s in completion.segments}
        for version in sorted(versions):
            own_weights = Snapshot(self.subject.exact_policy, rounded_copies(self.subject))
            weights = self.versions.get(version, own_weights)
            own = [
                i for i, c in enumerate(completions) if any(s.weight_version == version for s in c.segments)
            ]
            for part in _parts(own, completions, weights.exact.config.vocab_size):
                rows = _rows(part, completions, version)
                self._judge_part(weights, part, rows, completions, verdicts, depths, steps, proposed)
        return verdicts

    def _judge_part(
        self, weights: Snapshot, part, rows, completions, verdicts, depths, steps, proposed
    ) -> None:
        logits_NV = _logits(weights.exact, part, rows, completions)
        draft_NV = None
        if depths is not None and self.subject.draft_policy is not None:
            draft_NV = _logits(self.subject.draft_policy, part, rows, completions)
        copies_SNV = [_logits(copy, part, rows, completions).to(logits_NV) for copy in weights.copies]
        tolerance_N = torch.full_like(logits_NV[:, 0], self.tolerance)
        for copy_NV in copies_SNV:
            spread_N = spread_factor(len(copies_SNV)) * (copy_NV - logits_NV).std(-1)
            tolerance_N = torch.maximum(tolerance_N, spread_N)
        groups: dict[tuple, list[int]] = {}
        for n, row in enumerate(rows):
            by = completions[row.completion].request.sampling
            verified = depths is not None and depths[row.completion][row.place] < proposed
            known = steps[row.completion][row.place].proposed if verified else None
            has_proposal = verified and (draft_NV is not None or (known is not None and known >= 0))
            groups.setdefault((_cut(by), verified, has_proposal), []).append(n)
        for (cut, verified, has_proposal), members in groups.items():
            index = torch.tensor(members, device=logits_NV.device)
            chosen = [rows[n] for n in members]
            sampling = SamplingParams(cut[0], top_k=cut[1], top_p=cut[2], min_p=cut[3])
            seeds_N, positions_N, sampled_N = _facts(chosen, completions, index.device)
            where = sampling, seeds_N, positions_N
            if has_proposal:
                known_N = None
                if draft_NV is None:
                    known_N = torch.tensor(
                        [steps[row.completion][row.place].proposed for row in chosen], device=index.device
                    )
                draft = None if draft_NV is None else draft_NV[index]
                choice = rejection_choice(logits_NV[index], draft, known_N, *where, tolerance_N[index])
            else:
                choice = shared_noise_choice(logits_NV[index], *where, tolerance_N[index], recovers=verified)
            unexplained_N = torch.zeros_like(sampled_N)
            for copy_NV in copies_SNV:
                own = shared_noise_choice(copy_NV[index], *where, tolerance_N[index]).token_N
                unexplained_N += ~choice.explains(own)
            self._write(chosen, completions, verdicts, choice, sampled_N, logits_NV[index], unexplained_N)

    def _write(
        self, chosen, completions, verdicts, choice: Choice, sampled_N, logits_NV, unexplained_N
    ) -> None:
        temperature = completions[chosen[0].completion].request.sampling.temperature
        logprobs_NV = scores_of(logits_NV, temperature).log_softmax(-1)
        own_N = logprobs_NV.gather(1, sampled_N.unsqueeze(1)).squeeze(1).tolist()
        columns = (choice.explains(sampled_N), choice.decided_N, choice.token_N != choice.greedy_N)
        explained, decided, random = (column.tolist() for column in columns)
        expected, unexplained = choice.token_N.tolist(), unexplained_N.tolist()
        of_logits = min(1.0, temperature or 1.0)
        for n, row in enumerate(chosen):
            completion = completions[row.completion]
            own = verdicts[row.completion]
            own.explained[row.place] = explained[n]
            own.decided[row.place] = decided[n]
            own.random[row.place] = random[n]
            own.expected[row.place] = expected[n]
            own.copies_unexplained[row.place] = unexplained[n]
            own.logprob_error[row.place] = of_logits * abs(completion.logprobs[row.place] - own_N[n])
            own.top_error[row.place] = of_logits * _top_error(completion, row.place, logprobs_NV[n])


@dataclass(frozen=True)
class _Row:
    completion: int
    place: int


def _key(completion: Completion) -> tuple:
    request = completion.request
    origin = tuple((s.start, s.stop, s.weight_version) for s in completion.segments)
    said = completion.logprobs, tuple(tuple(top.items()) for top in completion.top_logprobs)
    return request.prompt, request.seed, _cut(request.sampling), completion.tokens, origin, said


def _cut(sampling: SamplingParams) -> tuple[float, int, float, float]:
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def _parts(own: list[int], completions: Sequence[Completion], vocab_size: int) -> Iterator[list[int]]:
    """Yields completions that one forward pass takes."""
    part: list[int] = []
    tokens = logits = 0
    for i in own:
        length = len(completions[i].request.prompt) + len(completions[i].tokens)
        wanted = len(completions[i].tokens) * vocab_size
        if part and (tokens + length > PASS_TOKENS or logits + wanted > PASS_LOGITS):
            yield part
            part, tokens, logits = [], 0, 0
        part.append(i)
        tokens += length
        logits += wanted
    if part:
        yield part


def _rows(part: list[int], completions: Sequence[Completion], version: int) -> list[_Row]:
    """Returns the tokens of these completions that were sampled under a weight version."""
    return [
        _Row(i, place)
        for i in part
        for segment in completions[i].segments
        if segment.weight_version == version
        for place in range(segment.start, min(segment.stop, len(completions[i].tokens)))
    ]


def _logits(
    policy: Policy, part: list[int], rows: list[_Row], completions: Sequence[Completion]
) -> torch.Tensor:
    """Returns the logits from which the rows' tokens were drawn."""
    texts = [(*completions[i].request.prompt, *completions[i].tokens) for i in part]
    starts = dict(zip(part, torch.tensor([0, *map(len, texts)]).cumsum(0).tolist(), strict=False))
    packed = PackedAttention([len(text) for text in texts], policy.device)
    tokens_T = torch.tensor([token for text in texts for token in text], device=policy.device)
    wanted = [
        starts[row.completion] + len(completions[row.completion].request.prompt) + row.place - 1
        for row in rows
    ]
    hidden_TE = policy(tokens_T, packed.positions_T, packed)
    return policy.logits(hidden_TE[torch.tensor(wanted, device=policy.device)]).double()


def _facts(
    chosen: list[_Row], completions: Sequence[Completion], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    owners = [completions[row.completion] for row in chosen]
    seeds = [completion.request.seed for completion in owners]
    positions = [len(c.request.prompt) + row.place for c, row in zip(owners, chosen, strict=True)]
    sampled = [c.tokens[row.place] for c, row in zip(owners, chosen, strict=True)]
    return tuple(torch.tensor(x, device=device) for x in (seeds, positions, sampled))


def _top_error(completion: Completion, place: int, logprobs_V: torch.Tensor) -> float:
    """Returns how far the reported most likely tokens are off, as tokens or as logprobs."""
    wanted = completion.request.sampling.top_logprobs
    if not wanted:
        return 0.0
    if len(completion.top_logprobs) <= place or len(completion.top_logprobs[place]) != wanted:
        return torch.inf
    reported = completion.top_logprobs[place]
    best = logprobs_V.topk(wanted).values.tolist()
    by_value = max(abs(a - b) for a, b in zip(sorted(reported.values(), reverse=True), best, strict=True))
    by_token = max(abs(value - float(logprobs_V[token])) for token, value in reported.items())
    return max(by_value, by_token)
