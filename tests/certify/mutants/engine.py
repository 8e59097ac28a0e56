"""Bugs of the engine's bookkeeping, of FP8, of the reference backend and of the loop."""

from tests.certify.mutation import Mutant

STEP_SAMPLING = "paceline.engine.sampling"
ENGINE = "paceline.engine.engine"
OUTCOMES = "paceline.engine.outcomes"

MUTANTS = [
    # -- the engine ----------------------------------------------------------------------------------
    Mutant(
        "the bonus token is always greedy",
        f"{STEP_SAMPLING}:sample_step",
        "temperature_P = queries.temperature_RQ.flatten()[piece]",
        "last_Q = torch.arange(num_queries) == max(1, num_queries - 1)\n"
        "        temperature_P = (queries.temperature_RQ * ~last_Q).flatten()[piece]",
        "tokens",
    ),
    Mutant(
        "the second position of a step is always greedy",
        f"{STEP_SAMPLING}:sample_step",
        "temperature_P = queries.temperature_RQ.flatten()[piece]",
        "temperature_P = (queries.temperature_RQ * (torch.arange(num_queries) != 1)).flatten()[piece]",
        "tokens",
    ),
    Mutant(
        "truncation of another row",
        f"{STEP_SAMPLING}:sample_step",
        "slots_R.repeat_interleave(num_queries)",
        "slots_R.repeat(num_queries)",
        "tokens",
    ),
    Mutant(
        "truncation only if the whole batch truncates",
        f"{OUTCOMES}:Batch.of",
        "any(s.truncates",
        "all(s.truncates",
        "tokens",
    ),
    Mutant(
        "a slot keeps the min-p of its last request",
        "paceline.engine.rows:Rows.enter",
        "self.state.min_p[slots] = self._tensor([row.sampling.min_p for row in new_rows], score)",
        "pass",
        "tokens",
    ),
    Mutant(
        "a slot keeps the stop tokens of its last request",
        "paceline.engine.rows:Rows.enter",
        "self.state.stop_ids[slots] =",
        "_ =",
        "endings",
    ),
    Mutant(
        "a preempted request resumes with other noise",
        f"{ENGINE}:Engine._enter",
        "s.request.seed,",
        "s.request.seed + len(s.response),",
        "preempted",
    ),
    Mutant(
        "a preempted request repeats its last token",
        f"{ENGINE}:Engine._enter",
        "s.tokens,",
        "[*s.tokens, s.tokens[-1]] if s.response else s.tokens,",
        "preempted",
    ),
    Mutant(
        "running rows keep the old weights' cache",
        f"{ENGINE}:Engine.update_weights",
        "self._preempt_all()",
        "self._drain()",
        "weights",
    ),
    Mutant(
        "cached prompts outlive a weight update",
        f"{ENGINE}:Engine._preempt_all",
        "self.scheduler.drop_all()",
        "pass",
        "weights",
    ),
    Mutant(
        "weights that are handed over are never copied",
        f"{ENGINE}:Engine.update_weights",
        "self._take_weights(weights)",
        "self._take_weights(None)",
        "weights",
    ),
    Mutant(
        "tokens carry the next weight version",
        "paceline.engine.request_state:RequestState.append",
        "self.segments[-1].weight_version == version",
        "True",
        "weights",
    ),
    Mutant(
        "a stop text in the middle of a run is missed",
        "paceline.engine.stop_strings:first_stop",
        "tokens[checked:], start=checked + 1",
        "tokens[-1:], start=len(tokens)",
        "endings",
    ),
    Mutant(
        "a stop text across tokens is missed",
        "paceline.engine.stop_strings:first_stop",
        "decode(list(window))",
        "decode([token])",
        "endings",
    ),
    Mutant(
        "logprobs are left behind a stop text",
        "paceline.engine.request_state:RequestState.shorten",
        "del self.response[count:], self.logprobs[count:],",
        "del self.response[count:],",
        "endings",
    ),
    Mutant(
        "ignore_eos is ignored",
        f"{ENGINE}:Engine._stop_ids",
        "() if request.sampling.ignore_eos else",
        "",
        "tokens",
    ),
    Mutant(
        "the end token ends nothing",
        f"{ENGINE}:Engine._stop_ids",
        "() if request.sampling.ignore_eos else self.policy.config.eos_token_ids",
        "()",
        "endings",
    ),
    Mutant(
        "the policy's last position is one further",
        f"{ENGINE}:Engine.submit",
        "self.max_length)",
        "self.max_length + 1)",
        "limit",
    ),
    Mutant(
        "most likely tokens of a step's first position",
        "paceline.engine.step:StepStatus.append_top_logprobs",
        "self.top_tokens_RQN[index, q,",
        "self.top_tokens_RQN[index, 0,",
        "tokens",
    ),
    Mutant(
        "sleep keeps held sequences",
        f"{ENGINE}:Engine.sleep",
        "self._preempt_all()",
        "self._drain()",
        "asleep",
    ),
    Mutant(
        "an abort takes the sibling, too",
        f"{ENGINE}:Engine.abort",
        "sequence.aborted |= sequence.request.id in ids",
        "sequence.aborted |= sequence.request.id in ids or sequence.slot == 1",
        "aborted",
    ),
    # -- FP8 -----------------------------------------------------------------------------------------
    Mutant(
        "FP8 scale of the wrong block",
        "paceline.kernels.fp8_linear:fp8_linear_reference",
        "weight_NK = weight.dequantise() if weight.wide is None else weight.wide",
        "weight.scales.copy_(weight.scales.roll(1, -1))\n    weight_NK = weight.dequantise()",
        "fp8",
    ),
    Mutant(
        "keys read with the values' scale",
        "paceline.paged.cache:KVCache.scales",
        "return self.scales_L2H[index, 0], self.scales_L2H[index, 1]",
        "return self.scales_L2H[index, 1], self.scales_L2H[index, 0]",
        "fp8",
    ),
    Mutant(
        "FP8 weights are not quantised again after an update",
        "paceline.precision.rollout:RolloutPrecision.refresh",
        "self.weights.sync(arrived)",
        "pass",
        "fp8, weights",
    ),
    # -- the reference backend -----------------------------------------------------------------------
    Mutant(
        "reference: top-p keeps one token too few",
        "paceline.engine.reference:truncate",
        "before >= sampling.top_p",
        "before + probabilities >= sampling.top_p",
        "reference",
    ),
    Mutant(
        "reference: a row that came back has other noise",
        "paceline.engine.reference:ReferenceBackend._sample",
        "len(row.request.prompt) + len(row.tokens) for row",
        "len(row.request.prompt) + len(row.tokens) + len(row.segments) // 2 for row",
        "reference, weights",
    ),
    # -- the loop ------------------------------------------------------------------------------------
    Mutant(
        "a step's samples share their seed",
        "paceline.rollout.sampler:GroupSampler.requests_of",
        "occurrence, i)",
        "occurrence, 0)",
        "tests/certify/test_oracle.py::test_requests_of_a_step_have_the_published_seeds",
    ),
    Mutant(
        "a prompt that occurs twice in a step has one seed",
        "paceline.rollout.sampler:GroupSampler.requests_of",
        "problem.id, occurrence, i)",
        "problem.id, 0, i)",
        "tests/certify/test_oracle.py::test_requests_of_a_step_have_the_published_seeds",
    ),
]
