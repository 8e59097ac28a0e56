"""What may happen to a request besides being sampled, done on purpose: a scene drives a backend through it.

A scene knows only the contract of `backend.py`. It returns the completions, and what it has shown; where
nothing of the kind happened (no request was preempted, say), it has shown nothing, and fails.
"""

import copy
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from paceline.certify.oracle.seeds import seed_of
from paceline.certify.requests import SETTINGS, long_requests
from paceline.certify.subject import BrokenContract, OpenedBackend, Opening, Snapshot, Subject, in_order
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import exported_tensors
from paceline.types import Completion, FinishReason, Request, SamplingParams

# Seconds after which a backend that does not finish counts as hanging.
PATIENCE = 900.0

# How far new weights are from the old ones, in standard deviations of each matrix.
WEIGHT_CHANGE = 0.5


@dataclass(frozen=True)
class Scene:
    """What a scene did."""

    completions: list[Completion]
    opened: OpenedBackend
    shown: str  # what happened, in words
    happened: bool = True
    same_as: list[Completion] | None = None  # plain decoding of the same requests
    versions: dict[int, Snapshot] = field(default_factory=dict)  # of the weights


@contextmanager
def patience(opened: OpenedBackend) -> Iterator[None]:
    """Pauses a backend that does not finish, so that its requests count as missing and the check ends."""
    timer = threading.Timer(PATIENCE, opened.backend.pause)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run(
    subject: Subject, opening: Opening, requests: Sequence[Request]
) -> tuple[OpenedBackend, list[Completion]]:
    """Opens a backend and returns the completions of requests in their order."""
    opened = subject.open(opening)
    with patience(opened):
        return opened, opened.run(requests)


# -- what a backend does by itself -----------------------------------------------------------------


def preempted(subject: Subject, tokens: int, prompts: list[tuple[int, ...]], count: int, seed: int) -> Scene:
    """Lets requests outgrow a KV pool that holds two of them."""
    length = 44 * (1 + tokens)
    requests = long_requests(prompts, count, length, seed, f"preempted {tokens}")
    longest = max(len(r.prompt) + r.sampling.max_tokens for r in requests)
    plain = run(subject, Opening(), requests)[1]
    opened, completions = run(subject, Opening(tokens, 8, kv_tokens=2 * longest + 16), requests)
    times = opened.preemptions()
    return Scene(completions, opened, f"{times} preemptions", times > 0, plain)


def small_chunks(subject: Subject, tokens: int, requests: list[Request], plain: list[Completion]) -> Scene:
    """Fills the cache a few tokens at a time."""
    opened, completions = run(subject, Opening(tokens, 16, prefill_tokens=7), requests)
    return Scene(completions, opened, "prompts of up to 49 tokens, 7 at a time", same_as=plain)


def restless(subject: Subject, tokens: int, requests: list[Request], plain: list[Completion]) -> Scene:
    """Changes drafter and number of tokens at every step."""
    opened, completions = run(subject, Opening(tokens, 24, restless=True), requests)
    used = {str(strategy) for one_run in opened.strategies for strategy in one_run}
    return Scene(completions, opened, f"steps of {', '.join(sorted(used))}", len(used) > 1, plain)


# -- what a caller does ----------------------------------------------------------------------------


def paused(subject: Subject, tokens: int, requests: list[Request], plain: list[Completion]) -> Scene:
    """Pauses and resumes whenever a request has finished, and sleeps in between."""
    opened = subject.open(Opening(tokens, 12))
    opened.submit(requests)
    done: list[Completion] = []
    pauses = 0
    with patience(opened):
        while len(done) < len(requests):
            new = _until(opened, lambda completion: True)
            if not new:
                break
            done += new
            pauses += 1
            opened.backend.resume()
    return Scene(in_order(requests, done), opened, f"{pauses} pauses", pauses > 1, plain)


def aborted(subject: Subject, tokens: int, requests: list[Request], plain: list[Completion]) -> Scene:
    """Aborts every third request once others have finished; what it has must begin as plain decoding does."""
    opened = subject.open(Opening(tokens, 12))
    opened.submit(requests)
    victims = {request.id for request in requests[::3]}
    done: list[Completion] = []
    with patience(opened), torch.inference_mode():
        for completion in opened.backend.completions():
            if not done:
                opened.backend.abort(victims - {completion.request.id})
            done.append(completion)
    completions = in_order(requests, done)
    cut = [c for c in completions if c.finish_reason is FinishReason.ABORTED]
    same = [
        replace(whole, tokens=whole.tokens[: len(c.tokens)], logprobs=whole.logprobs[: len(c.tokens)])
        if c.finish_reason is FinishReason.ABORTED
        else whole
        for c, whole in zip(completions, plain, strict=True)
    ]
    running = sum(bool(c.tokens) for c in cut)
    shown = f"{len(cut)} aborted, {running} of them with tokens"
    strangers = {c.request.id for c in cut} - victims
    if strangers:
        raise BrokenContract(
            f"requests other than the aborted ones ended as aborted: {sorted(strangers)[:3]}"
        )
    return Scene(completions, opened, shown, bool(cut), same)


def continued(
    subject: Subject,
    tokens: int,
    prompts: list[tuple[int, ...]],
    seed: int,
    turns: int = 3,
    sleeps: bool = False,
) -> Scene:
    """Holds finished sequences and continues them with further text, as turns do.

    With `sleeps` the cache's memory is given back between two turns, and what was held with it.
    """
    opened = subject.open(Opening(tokens, 16))
    rng = random.Random(seed)
    vocab_size = subject.policy.config.vocab_size
    requests = [
        Request(
            f"turn 0/{i}",
            prompts[i % len(prompts)],
            seed_of("eval", seed, 0, "turns", 0, i),
            replace(SETTINGS[i % len(SETTINGS)], max_tokens=5 + i % 7, ignore_eos=True),
            hold=True,
        )
        for i in range(16)
    ]
    every: list[Request] = []
    done: list[Completion] = []
    with patience(opened):
        for turn in range(1, turns + 1):
            every += requests
            finished = opened.run(requests)
            done += finished
            if sleeps:
                opened.backend.sleep()
                opened.backend.wake()
            elif turn == 2:  # a continuation whose cache is gone
                opened.backend.abort([requests[0].id])
            requests = [
                replace(
                    c.request,
                    id=f"turn {turn}/{i}",
                    prompt=(
                        *c.request.prompt,
                        *c.tokens,
                        *(rng.randrange(vocab_size) for _ in range(i % 19)),
                    ),
                    continues=c.request.id,
                )
                for i, c in enumerate(finished)
            ]
    plain = run(subject, Opening(), [replace(r, hold=False, continues="") for r in every])[1]
    shown = f"{turns} turns of {len(finished)} sequences{', asleep in between' if sleeps else ''}"
    return Scene(done, opened, shown, same_as=plain)


def new_weights(subject: Subject, tokens: int, requests: list[Request]) -> Scene:
    """Changes the weights twice while requests run, and once back; siblings of cached prompts still wait."""
    opened = subject.open(Opening(tokens, 5))
    versions = {0: subject.snapshot(subject.policy)}
    done: list[Completion] = []
    before = {name: tensor.clone() for name, tensor in subject.policy.state_dict().items()}
    opened.submit(requests[: len(requests) // 2])
    try:
        with patience(opened):
            for version in (1, 2, 3):
                # Not before a response has ended with tokens of the weights that are there now.
                done += _until(opened, lambda c, now=version - 1: c.segments[-1].weight_version == now)
                target = _change_weights(subject.policy, before, version)
                # Of what the backend is to have, not of what it has then.
                versions[version] = subject.snapshot(target)
                handed_over = None if target is subject.policy else list(exported_tensors(target))
                with torch.inference_mode():
                    opened.backend.update_weights(version, handed_over)
                opened.backend.resume()
                if version == 1:  # siblings of prompts that were cached under the old weights
                    opened.submit(requests[len(requests) // 2 :])
            done += opened.completions()
    finally:
        _restore_weights(subject.policy, before)
    completions = in_order(requests, done)
    across = sum(len(completion.segments) > 1 for completion in completions)
    sampled = [0] * len(versions)
    for segment in (segment for completion in completions for segment in completion.segments):
        sampled[segment.weight_version] += segment.stop - segment.start
    shown = f"{across} responses across versions 0 to 3, of {', '.join(map(str, sampled))} tokens"
    return Scene(completions, opened, shown, across > 0 and all(sampled), versions=versions)


# -- what ends a response --------------------------------------------------------------------------


def ending_requests(subject: Subject, plain: list[Completion], count: int, seed: int) -> list[Request]:
    """Returns requests whose stop tokens and texts lie within what plain decoding writes, and every length.

    With the same seed they write the same until then, so a stop arrives anywhere within a step.
    """
    rng = random.Random(f"endings {seed}")
    ends = set(subject.policy.config.eos_token_ids)
    with_end = [c for c in plain if ends & set(c.tokens)]
    plain = [*with_end[:5], *(c for c in plain if c not in with_end)][:count]
    requests = []
    for i, completion in enumerate(plain):
        tokens, own = completion.tokens, completion.request.sampling
        kinds: dict[str, SamplingParams] = {"limit": replace(own, max_tokens=1 + i % len(tokens))}
        kinds["eos"] = replace(own, ignore_eos=False)
        wanted = (tokens[rng.randrange(len(tokens))], *(rng.randrange(subject.policy.config.vocab_size),))
        kinds["token"] = replace(own, stop_token_ids=wanted)
        kinds["several tokens"] = replace(
            own, stop_token_ids=tuple(dict.fromkeys(tokens[len(tokens) // 2 :]))
        )
        if subject.decode is not None:
            first = rng.randrange(len(tokens))
            text = subject.decode(list(tokens[first : first + rng.randint(1, 6)]))
            if text.strip():
                kinds["text"] = replace(own, stop=(text,))
                kinds["texts"] = replace(own, stop=("\x00never", text[-1:]), max_tokens=own.max_tokens - 1)
        requests += [
            replace(completion.request, id=f"{kind}/{completion.request.id}", sampling=sampling)
            for kind, sampling in kinds.items()
        ]
    return requests


def limit_requests(subject: Subject, prompts: list[tuple[int, ...]], seed: int) -> list[Request]:
    """Returns requests that reach the longest sequence the policy has positions for."""
    longest = subject.policy.config.max_positions
    text = [token for prompt in prompts for token in prompt]
    if len(text) < longest:
        text = text * (longest // len(text) + 1)
    sampling = SamplingParams(2.0, max_tokens=64, ignore_eos=True)
    return [
        Request(
            f"limit/{left}",
            tuple(text[: longest - left]),
            seed_of("eval", seed, 0, "limit", 0, left),
            sampling,
        )
        for left in (1, 2, 5)
    ]


def _until(opened: OpenedBackend, enough: Callable[[Completion], bool]) -> list[Completion]:
    """Returns what finishes until one is enough, and pauses there."""
    done = []
    with torch.inference_mode():
        for completion in opened.backend.completions():
            done.append(completion)
            if enough(completion):
                opened.backend.pause()
    return done


def _change_weights(policy: Decoder, before: dict[str, torch.Tensor], version: int) -> Decoder:
    """Moves matrices away from where they were, and returns the policy that has them.

    Version 2 is a copy, to be handed over as by a learner elsewhere; version 3 is version 0 again.
    """
    generator = torch.Generator().manual_seed(version)
    _restore_weights(policy, before)
    target = copy.deepcopy(policy) if version == 2 else policy
    if version < 3:
        with torch.no_grad():
            for parameter in target.parameters():
                if parameter.ndim > 1:
                    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                    parameter.add_(noise * parameter.std(), alpha=WEIGHT_CHANGE)
    return target


def _restore_weights(policy: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in policy.state_dict().items():
            tensor.copy_(before[name])
