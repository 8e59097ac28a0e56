"""The teacher of on-policy distillation: whole distributions of a policy beside ours, or a server's logprobs.

    states      the teacher's hidden states where a response token is predicted, without a gradient
    logits      of both, a chunk of rows at a time; a chunk is computed again in the backward pass
    D           reverse   sum p (log p - log q)                     p the policy's, q the teacher's
                forward   sum q (log q - log p)
                mixed     1/2 sum p (log p - log m) + 1/2 sum q (log q - log m),   m = (p + q) / 2

With top_k the sums run over the teacher's k likeliest tokens and over all others as one event, which never
makes a divergence larger. Both distributions are at the temperature that the rollout sampled at.
"""

import json
import math
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from paceline.config import ConfigError, DistillConfig, LearningConfig
from paceline.learning.batch import MicroBatch
from paceline.policy.config import read_config
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.types import Completion, Group

# Logits of one distribution per chunk: 16 MiB in float32, on a GPU 256 MiB.
CHUNK_ELEMENTS = 1 << 22
GPU_CHUNK_ELEMENTS = 1 << 26
# Smallest share of all other tokens that has a logarithm.
LEAST_SHARE = 1e-12
# Requests to a server at once, and how long one may take.
AT_ONCE = 32
SECONDS = 600.0

# What a comparison returns: logprobs, entropies and divergences of response tokens.
Compared = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LocalTeacher:
    """A policy in this process, on the learner's device."""

    def __init__(self, policy: Decoder, config: DistillConfig) -> None:
        self.policy = policy
        self.config = config

    @staticmethod
    def load(config: DistillConfig, student: Decoder) -> "LocalTeacher":
        """Loads the teacher's folder, on a meta device its shapes alone."""
        folder = Path(config.teacher)
        if student.device.type == "meta":
            teacher = Decoder(read_config(folder), student.dtype, student.device)
        else:
            teacher = load_policy(folder, student.dtype, student.device)
        return LocalTeacher(teacher.requires_grad_(False), config)

    def comparison(self, batch: MicroBatch) -> Callable[[Decoder, MicroBatch], Compared]:
        """Runs the teacher on a micro-batch; returns what compares a policy with it."""
        with torch.no_grad():
            hidden_TE = self.policy(batch.tokens_T, batch.attention.positions_T, batch.attention)
        return partial(self._compare, hidden_TE[batch.predictors_R])

    def _compare(self, teacher_RE: torch.Tensor, policy: Decoder, batch: MicroBatch) -> Compared:
        hidden_TE = policy(
            batch.tokens_T, batch.attention.positions_T, batch.attention, batch.capture, batch.replay
        )
        rows = (hidden_TE[batch.predictors_R], teacher_RE, batch.targets_R, batch.temperatures_R)
        elements = CHUNK_ELEMENTS if hidden_TE.device.type == "cpu" else GPU_CHUNK_ELEMENTS
        chunk = max(1, elements // policy.config.vocab_size)
        parts = [
            checkpoint(self._compare_rows, policy, *part, use_reentrant=False)
            for part in zip(*(x.split(chunk) for x in rows), strict=True)
        ]
        logprobs, entropies, divergences = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies).detach(), torch.cat(divergences)

    def _compare_rows(
        self,
        policy: Decoder,
        hidden_RE: torch.Tensor,
        teacher_RE: torch.Tensor,
        targets_R: torch.Tensor,
        temperatures_R: torch.Tensor,
    ) -> Compared:
        logits_RV = policy.logits(hidden_RE)
        temperatures_R1 = temperatures_R[:, None].to(logits_RV.dtype)
        log_p_RV = (logits_RV / temperatures_R1).log_softmax(-1)
        with torch.no_grad():
            log_q_RV = (self.policy.logits(teacher_RE) / temperatures_R1).log_softmax(-1)
        logprobs_R = log_p_RV.gather(1, targets_R[:, None]).squeeze(1)
        entropies_R = -(log_p_RV.detach().exp() * log_p_RV.detach()).sum(-1)
        # Vocabularies of one tokenizer may be padded to different sizes.
        common = min(log_p_RV.shape[1], log_q_RV.shape[1])
        divergence_R = divergence(
            log_p_RV[:, :common], log_q_RV[:, :common], self.config.kl, self.config.top_k
        )
        return logprobs_R, entropies_R, divergence_R


def divergence(log_p_RV: torch.Tensor, log_q_RV: torch.Tensor, kl: str, top_k: int = 0) -> torch.Tensor:
    """Returns the divergence of policy p and teacher q in every row, by the formulas above."""
    if 0 < top_k < log_q_RV.shape[1]:
        log_q_RK, likeliest_RK = log_q_RV.topk(top_k, -1)
        log_p_RV = _with_others(log_p_RV.gather(1, likeliest_RK))
        log_q_RV = _with_others(log_q_RK)
    if kl == "reverse":
        return (log_p_RV.exp() * (log_p_RV - log_q_RV)).sum(-1)
    if kl == "forward":
        return (log_q_RV.exp() * (log_q_RV - log_p_RV)).sum(-1)
    log_m_RV = torch.logaddexp(log_p_RV, log_q_RV) - math.log(2)
    from_p_R = (log_p_RV.exp() * (log_p_RV - log_m_RV)).sum(-1)
    from_q_R = (log_q_RV.exp() * (log_q_RV - log_m_RV)).sum(-1)
    return 0.5 * (from_p_R + from_q_R)


def _with_others(log_RK: torch.Tensor) -> torch.Tensor:
    """Appends the log of what the given shares leave of 1."""
    others_R1 = (1 - log_RK.exp().sum(-1, keepdim=True)).clamp(min=LEAST_SHARE).log()
    return torch.cat((log_RK, others_R1), -1)


class EndpointTeacher:
    """A server with `/inference/v1/generate`, ours or vLLM's, which scores a prompt's tokens."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def log_ratios(self, groups: Sequence[Group]) -> list[list[list[float]]]:
        """Returns log pi_old - log pi_T of every response token, by group and sample."""
        completions = [[sample.completion for sample in group.samples] for group in groups]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            asked = [[threads.submit(self._score, completion) for completion in own] for own in completions]
            return [
                [
                    [old - taught for old, taught in zip(completion.logprobs, call.result(), strict=True)]
                    for completion, call in zip(own, calls, strict=True)
                ]
                for own, calls in zip(completions, asked, strict=True)
            ]

    def _score(self, completion: Completion) -> list[float]:
        """Returns the teacher's logprob of every response token."""
        prompt = completion.request.prompt
        tokens = [*prompt, *completion.tokens]
        if not completion.tokens:
            return []
        asked = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
        request = urllib.request.Request(
            f"{self.url}/inference/v1/generate",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                told = json.load(reply)["prompt_logprobs"]
            places = range(len(prompt), len(tokens))
            return [float(told[place][str(tokens[place])]["logprob"]) for place in places]
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"learning.distill.teacher = {self.url!r} did not score a response ({error!r}); it must be a "
                "server with /inference/v1/generate and prompt_logprobs, of a model with this tokenizer"
            ) from None


def make_teacher(config: LearningConfig, student: Decoder) -> "LocalTeacher | EndpointTeacher | None":
    """Returns the recipe's teacher, with the student's type and device; None where the algorithm has none."""
    if config.algorithm != "distill":
        return None
    if config.distill.by_endpoint:
        return EndpointTeacher(config.distill.teacher)
    return LocalTeacher.load(config.distill, student)
