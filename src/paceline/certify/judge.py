"""Judges every token of a completion: is it the one that the oracle's noise and the policy's logits give?

    completion ──▶ forward pass over its text in float64 ──▶ the oracle's choice at each position ──▶ verdicts

The text is the backend's own, so a token that rounding decided otherwise does not make those after it
differ. Tokens of one weight version are judged with that version's policy. In a narrow type (bf16, FP8),
perturbed copies of the policy bound how far logits may be off in each context, and how often they
would choose what the oracle does not explain.
"""

import itertools
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


@dataclass(frozen=True, eq=False)
class _Text:
    """A completion that is being judged."""

    completion: Completion
    verdicts: Verdicts  # being filled in
    steps: Sequence[Step] = ()  # by token, where tokens are verified by rejection

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.completion.request.prompt, *self.completion.tokens)

    def sampled_by(self, version: int) -> bool:
        return any(segment.weight_version == version for segment in self.completion.segments)


@dataclass(frozen=True)
class _Token:
    """One of its sampled tokens."""

    text: _Text
    place: int  # among the completion's tokens

    @property
    def position(self) -> int:
        return len(self.text.completion.request.prompt) + self.place

    @property
    def sampled(self) -> int:
        return self.text.completion.tokens[self.place]

    @property
    def step(self) -> Step:
        return self.text.steps[self.place]


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
        texts = [_Text(completion, Verdicts.empty(len(completion.tokens))) for completion in new.values()]
        self._judge(texts, proposed=0)
        self._known |= {key: text.verdicts for key, text in zip(new, texts, strict=True)}
        return [self._known[key] for key in keys]

    def rejection(
        self, completions: Sequence[Completion], steps: Sequence[list[Step]], proposed: int
    ) -> list[Verdicts]:
        """Judges tokens of steps that proposed so many tokens and verified them by rejection."""
        texts = [
            _Text(completion, Verdicts.empty(len(completion.tokens)), own)
            for completion, own in zip(completions, steps, strict=True)
        ]
        self._judge(texts, proposed)
        return [text.verdicts for text in texts]

    @torch.inference_mode()
    def _judge(self, texts: Sequence[_Text], proposed: int) -> None:
        """Fills in the verdicts; `proposed` tokens of each step were verified by rejection."""
        for version in sorted({s.weight_version for text in texts for s in text.completion.segments}):
            own_weights = Snapshot(self.subject.exact_policy, rounded_copies(self.subject))
            weights = self.versions.get(version, own_weights)
            own = [text for text in texts if text.sampled_by(version)]
            for part in _parts(own, weights.exact.config.vocab_size):
                self._judge_part(weights, part, _tokens(part, version), proposed)

    def _judge_part(
        self, weights: Snapshot, part: Sequence[_Text], tokens: Sequence[_Token], proposed: int
    ) -> None:
        logits_NV = _logits(weights.exact, part, tokens)
        draft_NV = None
        if proposed and self.subject.draft_policy is not None:
            draft_NV = _logits(self.subject.draft_policy, part, tokens)
        copies_SNV = [_logits(copy, part, tokens).to(logits_NV) for copy in weights.copies]
        tolerance_N = torch.full_like(logits_NV[:, 0], self.tolerance)
        for copy_NV in copies_SNV:
            spread_N = spread_factor(len(copies_SNV)) * (copy_NV - logits_NV).std(-1)
            tolerance_N = torch.maximum(tolerance_N, spread_N)
        groups: dict[tuple, list[int]] = {}
        for n, token in enumerate(tokens):
            by = token.text.completion.request.sampling
            verified = proposed > 0 and token.step.depth < proposed
            known = token.step.proposed if verified else None
            has_proposal = verified and (draft_NV is not None or (known is not None and known >= 0))
            groups.setdefault((_cut(by), verified, has_proposal), []).append(n)
        for (cut, verified, has_proposal), members in groups.items():
            index = torch.tensor(members, device=logits_NV.device)
            chosen = [tokens[n] for n in members]
            noise = {
                "sampling": SamplingParams(cut[0], top_k=cut[1], top_p=cut[2], min_p=cut[3]),
                "seeds_N": index.new_tensor([token.text.completion.request.seed for token in chosen]),
                "positions_N": index.new_tensor([token.position for token in chosen]),
                "tolerance_N": tolerance_N[index],
            }
            if has_proposal:
                known_N = None
                if draft_NV is None:
                    known_N = index.new_tensor([token.step.proposed for token in chosen])
                draft = None if draft_NV is None else draft_NV[index]
                choice = rejection_choice(logits_NV[index], draft, known_N, **noise)
            else:
                choice = shared_noise_choice(logits_NV[index], **noise, recovers=verified)
            unexplained_N = torch.zeros_like(index)
            for copy_NV in copies_SNV:
                own = shared_noise_choice(copy_NV[index], **noise).token_N
                unexplained_N += ~choice.explains(own)
            _write(chosen, choice, logits_NV[index], unexplained_N)


def _write(
    chosen: Sequence[_Token], choice: Choice, logits_NV: torch.Tensor, unexplained_N: torch.Tensor
) -> None:
    """Fills in the verdicts on tokens that were sampled with the same parameters."""
    sampled_N = unexplained_N.new_tensor([token.sampled for token in chosen])
    temperature = chosen[0].text.completion.request.sampling.temperature
    logprobs_NV = scores_of(logits_NV, temperature).log_softmax(-1)
    own_N = logprobs_NV.gather(1, sampled_N.unsqueeze(1)).squeeze(1).tolist()
    columns = (choice.explains(sampled_N), choice.decided_N, choice.token_N != choice.greedy_N)
    explained, decided, random = (column.tolist() for column in columns)
    expected, unexplained = choice.token_N.tolist(), unexplained_N.tolist()
    of_logits = min(1.0, temperature or 1.0)
    for n, token in enumerate(chosen):
        completion, verdicts, place = token.text.completion, token.text.verdicts, token.place
        verdicts.explained[place] = explained[n]
        verdicts.decided[place] = decided[n]
        verdicts.random[place] = random[n]
        verdicts.expected[place] = expected[n]
        verdicts.copies_unexplained[place] = unexplained[n]
        verdicts.logprob_error[place] = of_logits * abs(completion.logprobs[place] - own_N[n])
        verdicts.top_error[place] = of_logits * _top_error(completion, place, logprobs_NV[n])


def _key(completion: Completion) -> tuple:
    request = completion.request
    origin = tuple((s.start, s.stop, s.weight_version) for s in completion.segments)
    said = completion.logprobs, tuple(tuple(top.items()) for top in completion.top_logprobs)
    return request.prompt, request.seed, _cut(request.sampling), completion.tokens, origin, said


def _cut(sampling: SamplingParams) -> tuple[float, int, float, float]:
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def _parts(texts: Sequence[_Text], vocab_size: int) -> Iterator[list[_Text]]:
    """Yields texts that one forward pass takes."""
    part: list[_Text] = []
    tokens = logits = 0
    for text in texts:
        length, wanted = len(text.tokens), len(text.completion.tokens) * vocab_size
        if part and (tokens + length > PASS_TOKENS or logits + wanted > PASS_LOGITS):
            yield part
            part, tokens, logits = [], 0, 0
        part.append(text)
        tokens += length
        logits += wanted
    if part:
        yield part


def _tokens(part: Sequence[_Text], version: int) -> list[_Token]:
    """Returns the tokens of these texts that were sampled under a weight version."""
    return [
        _Token(text, place)
        for text in part
        for segment in text.completion.segments
        if segment.weight_version == version
        for place in range(segment.start, min(segment.stop, len(text.completion.tokens)))
    ]


def _logits(policy: Policy, part: Sequence[_Text], tokens: Sequence[_Token]) -> torch.Tensor:
    """Returns the logits from which the tokens were drawn."""
    lengths = [len(text.tokens) for text in part]
    starts = dict(zip(part, [0, *itertools.accumulate(lengths)], strict=False))
    packed = PackedAttention(lengths, policy.device)
    tokens_T = torch.tensor([token for text in part for token in text.tokens], device=policy.device)
    wanted = [starts[token.text] + token.position - 1 for token in tokens]
    hidden_TE = policy(tokens_T, packed.positions_T, packed)
    return policy.logits(hidden_TE[torch.tensor(wanted, device=policy.device)]).double()


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
