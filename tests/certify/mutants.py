"""The planted bugs, layer by layer. Each names the check that must see it (`checks.py`)."""

from tests.certify.mutation import Mutant

SAMPLER = "paceline.kernels.sampler"
NOISE = "paceline.kernels.noise"
REJECTION = "paceline.kernels.rejection"
ROWS = "paceline.kernels.row_step"
ATTENTION = "paceline.kernels.attention_reference"
ROPE = "paceline.kernels.rope_kv"
STEP_SAMPLING = "paceline.engine.sampling"
ENGINE = "paceline.engine.engine"
SCHEDULER = "paceline.engine.scheduler"
OUTCOMES = "paceline.engine.outcomes"

MUTANTS = [
    # -- the sampler ------------------------------------------------------------------------------
    Mutant("top-k keeps k + 1", f"{SAMPLER}:kept_tokens", "keep_RV = rank_V < top_k", "keep_RV = rank_V <= top_k", "tokens"),
    Mutant("top-k keeps k - 1", f"{SAMPLER}:kept_tokens", "keep_RV = rank_V < top_k_R", "keep_RV = rank_V < (top_k_R - 1).clamp(min=1)", "tokens"),
    Mutant("top-p keeps 0.2 too little", f"{SAMPLER}:kept_tokens", "top_p_R.double()).uns", "(top_p_R.double() - 0.2)).uns", "tokens"),
    Mutant("top-p drops the token that crosses the threshold", f"{SAMPLER}:kept_tokens", "(mass_before_RV < limit_R)", "(mass_before_RV + left_RV <= limit_R)", "tokens"),
    Mutant("top-p counts mass that top-k dropped", f"{SAMPLER}:kept_tokens", "left_RV = torch.where(keep_RV, mass_RV, 0)", "left_RV = mass_RV", "tokens"),
    Mutant("top-p before temperature", f"{SAMPLER}:_sample_truncated", "kept_tokens(scaled_RV, logsumexp_R,", "kept_tokens(logits_RV.float(), row_logsumexp(logits_RV.float()),", "tokens"),
    Mutant("min-p relative to the second most likely token", f"{SAMPLER}:kept_tokens", "sorted_RV - sorted_RV[:, :1]", "sorted_RV - sorted_RV[:, 1:2]", "tokens"),
    Mutant("min-p as an absolute probability", f"{SAMPLER}:kept_tokens", "(sorted_RV - sorted_RV[:, :1]).exp()", "(sorted_RV - logsumexp_R.unsqueeze(-1)).exp()", "tokens"),
    Mutant("min-p ignored together with top-p", f"{SAMPLER}:kept_tokens", "| (min_p_R <= 0).unsqueeze(-1)", "| (min_p_R <= 0).unsqueeze(-1) | (top_p_R < 1).unsqueeze(-1)", "tokens"),
    Mutant("of equal logits top-k keeps the higher id", f"{SAMPLER}:kept_tokens", "sorted_RV, token_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)", "sorted_RV, token_RV = scaled_RV.flip(-1).sort(dim=-1, descending=True, stable=True)\n    token_RV = scaled_RV.shape[1] - 1 - token_RV", "kernels"),
    Mutant("of equal logits greedy takes the higher id", f"{SAMPLER}:sample_reference", "position_R).argmax(-1)", "position_R).flip(-1).argmax(-1).neg() + scaled_RV.shape[1] - 1", "kernels"),
    Mutant("temperature applied twice", f"{SAMPLER}:scaled_logits", "return logits_RV / torch", "return logits_RV / temperature_R.clamp(min=0.1).unsqueeze(-1) / torch", "tokens"),
    Mutant("temperature capped at 2", f"{SAMPLER}:scaled_logits", "temperature_R, 1.0)", "temperature_R.clamp(max=2.0), 1.0)", "tokens"),
    Mutant("greedy requests draw with noise", f"{SAMPLER}:_scores", "torch.where((temperature_R > 0).unsqueeze(-1), noise_RV, 0.0)", "noise_RV", "tokens"),
    Mutant("logprob of the most likely token", f"{SAMPLER}:sample_reference", "scaled_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1)", "scaled_RV.amax(-1)", "tokens"),
    Mutant("logprobs before temperature", f"{SAMPLER}:sample_reference", "logprob_R = scaled_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1) - row_logsumexp(scaled_RV)", "logprob_R = logits_RV.float().log_softmax(-1).gather(-1, token_R.unsqueeze(-1)).squeeze(-1)", "tokens"),
    Mutant("logprobs of the truncated distribution", f"{SAMPLER}:_sample_truncated", "squeeze(-1) - logsumexp_R", "squeeze(-1) - logsumexp_R - log_mass_R", "tokens"),
    Mutant("most likely tokens before temperature", f"{SAMPLER}:top_logprobs", "scaled_logits(logits, temperature)", "logits.float()", "tokens"),
    Mutant("the logsumexp of long rows leaves out a chunk", f"{SAMPLER}:row_logsumexp", ".logsumexp(-1).logsumexp(-1)", ".logsumexp(-1)[:, :-1].logsumexp(-1)", "kernels"),
    # -- the noise --------------------------------------------------------------------------------
    Mutant("three rounds of Philox", f"{NOISE}:philox", "range(ROUNDS)", "range(3)", "tokens"),
    Mutant("the seed's high half is ignored", f"{NOISE}:random_bits", "(seed >> 32) & MASK32)", "seed & 0)", "tokens"),
    Mutant("two positions share their noise", f"{NOISE}:random_bits", "position + zero", "position // 2 + zero", "tokens"),
    Mutant("four tokens share their noise", f"{NOISE}:random_bits", "torch.broadcast_tensors(*words)", "torch.broadcast_tensors(*words[:1] * 4)", "tokens"),
    Mutant("all streams are one", f"{NOISE}:random_bits", "zero + stream", "zero", "kernels"),
    Mutant("noise of 16 bits", f"{NOISE}:gumbel_from_bits", "v = bits.to(", "v = (bits >> 16 << 16).to(", "kernels"),
    Mutant("noise that is 3% too small", f"{NOISE}:gumbel_from_bits", "return -(_log_reduced(f)", "return -0.97 * (_log_reduced(f)", "tokens"),
    Mutant("a seed that ignores the sample index", "paceline.types:request_seed", "occurrence, sample_index]", "occurrence, 0]", "kernels"),
    Mutant("a seed that ignores the step", "paceline.types:request_seed", "run_seed, step,", "run_seed, 0,", "kernels"),
    # -- what rows run and keep -------------------------------------------------------------------
    Mutant("noise of the position before", f"{ROWS}:gather_queries_reference", "sample_positions_RQ=positions_RQ + 1", "sample_positions_RQ=positions_RQ", "tokens"),
    Mutant("all queries of a step share their noise", f"{ROWS}:gather_queries_reference", "sample_positions_RQ=positions_RQ + 1", "sample_positions_RQ=positions_RQ[:, :1].expand_as(positions_RQ) + 1", "tokens"),
    Mutant("noise of another row", f"{ROWS}:gather_queries_reference", "rows.seed[slots_R]", "rows.seed[slots_R.roll(1)]", "tokens"),
    Mutant("temperature of another row", f"{ROWS}:gather_queries_reference", "rows.temperature[slots_R]", "rows.temperature[slots_R.roll(1)]", "tokens"),
    Mutant("block table off by one", f"{ROWS}:gather_queries_reference", "positions_RQ // block_size]", "(positions_RQ + 1) // block_size]", "tokens"),
    Mutant("a rejected token's cache slot is not overwritten", f"{ROWS}:gather_queries_reference", "(positions_RQ < limit_R.unsqueeze(1))", "(positions_RQ < limit_R.unsqueeze(1)) & (torch.arange(queries) > (queries > 1) - 1)", "tokens"),
    Mutant("proposals run at the first one's position", f"{ROWS}:gather_queries_reference", "positions_RQ=positions_RQ.clamp(max=max_position)", "positions_RQ=torch.minimum(positions_RQ, positions_RQ[:, :1] + 1).clamp(max=max_position)", "tokens"),
    Mutant("one token too many is accepted", f"{ROWS}:append_samples_reference", "agreed_RK.sum(1) + 1", "(agreed_RK.sum(1) + 2).clamp(max=queries)", "tokens"),
    Mutant("matches after a mismatch are accepted", f"{ROWS}:append_samples_reference", ".long().cumprod(1)", ".long()", "tokens"),
    Mutant("max_tokens overrun by an accepted run", f"{ROWS}:append_samples_reference", "limit_R - length_R)", "limit_R - length_R + (queries > 1))", "endings"),
    Mutant("a stop token in the middle of a run is missed", f"{ROWS}:append_samples_reference", "offsets_Q < count_R.unsqueeze(1)\n    )", "offsets_Q == count_R.unsqueeze(1) - 1\n    )", "endings"),
    Mutant("the token after a stop token is kept", f"{ROWS}:append_samples_reference", "argmax(1) + 1, count_R)", "argmax(1) + 2, count_R)", "endings"),
    Mutant("a stop is reported as the length limit", f"{ROWS}:append_samples_reference", "torch.where(stopped_R, 2, 1)", "1", "endings"),
    Mutant("logprobs of the neighbouring position", f"{ROWS}:append_samples_reference", "torch.where(appended_RQ, logprobs_RQ,", "torch.where(appended_RQ, logprobs_RQ.roll(1, 1),", "tokens"),
    # -- attention and the cache ------------------------------------------------------------------
    Mutant("attention sees one token of the future", f"{ATTENTION}:_step", "> position_T.unsqueeze(1)", "> position_T.unsqueeze(1) + 1", "tokens"),
    Mutant("attention drops its oldest block", f"{ATTENTION}:_step", "hidden_TN = torch.arange(start, start + step_keys) > position_T.unsqueeze(1)", "hidden_TN = (torch.arange(start, start + step_keys) > position_T.unsqueeze(1)) | ((torch.arange(start, start + step_keys) < 16) & (position_T.unsqueeze(1) > 48))", "preempted"),
    Mutant("long contexts are merged with the wrong weights", f"{ATTENTION}:_attend_slice", "old_total * old_scale + new_total * new_scale", "old_total + new_total", "preempted"),
    Mutant("rotary embedding with the sign turned", f"{ROPE}:rope_reference", "a * cos - b * sin", "a * cos + b * sin", "tokens"),
    Mutant("a norm without its epsilon's square root", "paceline.kernels.norm:rms_norm_reference", "+ epsilon", "+ 100 * epsilon", "tokens"),
    Mutant("experts' weights are not normalised", "paceline.kernels.moe_routing:route_reference", "if normalise", "if not normalise", "experts"),
    Mutant("siblings do not get a copy of the partial block", f"{ENGINE}:Engine._prefill", "if ready.copy_from:", "if False:", "tokens"),
    Mutant("siblings share the partial block", "paceline.engine.prefill:SharedPrompt.whole_blocks", "len(self.prefill.tokens) // BLOCK_SIZE]", "-(-len(self.prefill.tokens) // BLOCK_SIZE)]", "tokens"),
    Mutant("a prompt's second chunk does not see the first", "paceline.engine.prefill:_forward_chunks", "contexts = np.array([prefill.done for", "contexts = np.array([0 * prefill.done for", "chunks"),
    Mutant("further blocks are entered one place too far", "paceline.engine.reservation:Reservation.hand_out", "indices += range(len(sequence.blocks), len(sequence.blocks) + missing)", "indices += range(len(sequence.blocks) + 1, len(sequence.blocks) + 1 + missing)", "preempted"),
    Mutant("freed blocks stay shared", "paceline.engine.blocks:BlockPool.share", "self._references[block] += 1", "pass", "tokens"),
    Mutant("a held sequence counts a token that never ran", f"{SCHEDULER}:Scheduler.hold", "cached = sequence.length - 1", "cached = sequence.length", "continued"),
    Mutant("a continuation keeps a cache of another text", f"{SCHEDULER}:Scheduler._take_held", "sequence.cached = held.cached", "sequence.cached = len(sequence.request.prompt) - 1", "continued"),
    # -- the engine -------------------------------------------------------------------------------
    Mutant("the bonus token is always greedy", f"{STEP_SAMPLING}:sample_step", "temperature_P = queries.temperature_RQ.flatten()[piece]", "temperature_P = (queries.temperature_RQ * (torch.arange(num_queries) < max(1, num_queries - 1))).flatten()[piece]", "tokens"),
    Mutant("the second position of a step is always greedy", f"{STEP_SAMPLING}:sample_step", "temperature_P = queries.temperature_RQ.flatten()[piece]", "temperature_P = (queries.temperature_RQ * (torch.arange(num_queries) != 1)).flatten()[piece]", "tokens"),
    Mutant("truncation of another row", f"{STEP_SAMPLING}:sample_step", "slots_R.repeat_interleave(num_queries)", "slots_R.repeat(num_queries)", "tokens"),
    Mutant("truncation only if the whole batch truncates", f"{OUTCOMES}:Batch.of", "any(s.truncates", "all(s.truncates", "tokens"),
    Mutant("a slot keeps the min-p of its last request", "paceline.engine.rows:Rows.enter", "self.state.min_p[slots] = self._tensor([row.sampling.min_p for row in new_rows], score)", "pass", "tokens"),
    Mutant("a slot keeps the stop tokens of its last request", "paceline.engine.rows:Rows.enter", "self.state.stop_ids[slots] =", "_ =", "endings"),
    Mutant("a preempted request resumes with other noise", f"{ENGINE}:Engine._enter", "s.request.seed,", "s.request.seed + len(s.response),", "preempted"),
    Mutant("a preempted request loses its last token", f"{ENGINE}:Engine._enter", "s.tokens,", "s.tokens[:-1] if s.response else s.tokens,", "preempted"),
    Mutant("running rows keep the old weights' cache", f"{ENGINE}:Engine.update_weights", "self._preempt_all()", "self._drain()", "weights"),
    Mutant("cached prompts outlive a weight update", f"{ENGINE}:Engine._preempt_all", "self.scheduler.drop_all()", "pass", "weights"),
    Mutant("tokens carry the next weight version", "paceline.engine.request_state:RequestState.append", "self.segments[-1].weight_version == version", "True", "weights"),
    Mutant("a stop text in the middle of a run is missed", "paceline.engine.stop_strings:first_stop", "range(checked + 1, len(tokens) + 1)", "range(len(tokens), len(tokens) + 1)", "endings"),
    Mutant("a stop text across tokens is missed", "paceline.engine.stop_strings:first_stop", "max(0, end - window) : end", "end - 1 : end", "endings"),
    Mutant("logprobs are left behind a stop text", "paceline.engine.request_state:RequestState.shorten", "del self.response[count:], self.logprobs[count:],", "del self.response[count:],", "endings"),
    Mutant("ignore_eos is ignored", f"{ENGINE}:Engine._stop_ids", "() if request.sampling.ignore_eos else", "", "tokens"),
    Mutant("the end token ends nothing", f"{ENGINE}:Engine._stop_ids", "() if request.sampling.ignore_eos else self.policy.config.eos_token_ids", "()", "endings"),
    Mutant("the policy's last position is one further", f"{ENGINE}:Engine.submit", "self.max_length)", "self.max_length + 1)", "limit"),
    Mutant("most likely tokens of a step's first position", "paceline.engine.step:StepStatus.append_top_logprobs", "self.top_tokens_RQN[index, q,", "self.top_tokens_RQN[index, 0,", "tokens"),
    Mutant("sleep keeps what was cached", f"{ENGINE}:Engine.sleep", "self._preempt_all()", "self._drain()", "asleep"),
    Mutant("an abort takes the sibling, too", f"{ENGINE}:Engine.abort", "sequence.aborted |= sequence.request.id in ids", "sequence.aborted |= sequence.request.id in ids or sequence.slot == 0", "aborted"),
    # -- rejection --------------------------------------------------------------------------------
    Mutant("acceptance that is too kind", f"{REJECTION}:verify_by_rejection", "uniform_RK1 * q_RKV", "0.5 * uniform_RK1 * q_RKV", "rejection"),
    Mutant("recovery from p instead of the residual", f"{REJECTION}:verify_by_rejection", "left_RKV = (p_RKV - q_RKV).clamp(min=0)", "left_RKV = p_RKV", "rejection"),
    Mutant("residual without its sign", f"{REJECTION}:verify_by_rejection", "(p_RKV - q_RKV).clamp(min=0)", "(p_RKV - q_RKV).abs()", "rejection"),
    Mutant("residual that is drawn without its logarithm", f"{REJECTION}:verify_by_rejection", "left_RKV.log() + noise_RKV", "left_RKV + noise_RKV", "rejection"),
    Mutant("residual of another row", f"{REJECTION}:verify_by_rejection", "left_RKV.log() + noise", "left_RKV.roll(1, 0).log() + noise", "rejection"),
    Mutant("recovery that reuses the draft's noise", f"{REJECTION}:verify_by_rejection", "p_RKV.shape[-1], STREAM_RECOVER)", "p_RKV.shape[-1], 0)", "rejection"),
    Mutant("acceptance that reuses the draft's noise", f"{REJECTION}:verify_by_rejection", "1, STREAM_ACCEPT)", "1, 0)", "rejection"),
    Mutant("the token after all proposals is greedy", f"{REJECTION}:_sample_last", "noise = temperature_RQ[:, -1].contiguous()", "noise = 0 * temperature_RQ[:, -1].contiguous()", "rejection"),
    Mutant("draft probabilities of the wrong position", f"{STEP_SAMPLING}:_by_rejection", "probabilities_SKV[slots, :count],", "probabilities_SKV[slots, :count].roll(1, 1),", "rejection"),
    Mutant("draft probabilities at temperature 1", "paceline.drafting.sampling:sample_draft", "logits_RV[few], queries.temperature_R[few]", "logits_RV[few], torch.ones_like(queries.temperature_R[few])", "rejection"),
    Mutant("proposals count as certain though they were drawn", "paceline.engine.drafters:Drafters.verification", "if self[strategy.drafter].has_probabilities:", "if False:", "rejection"),
    Mutant("certain proposals are accepted as if drawn from p", f"{REJECTION}:verify_by_rejection", "q_RKV = torch.zeros_like(p_RKV).scatter(-1, draft_RK1, 1.0)", "q_RKV = p_RKV.clone()", "rejection, history"),
    # -- FP8 --------------------------------------------------------------------------------------
    Mutant("FP8 scale of the wrong block", "paceline.kernels.fp8_linear:fp8_linear_reference", "weight_NK = weight.dequantise() if weight.wide is None else weight.wide", "weight.scales.copy_(weight.scales.roll(1, -1))\n    weight_NK = weight.dequantise()", "fp8"),
    Mutant("keys read with the values' scale", "paceline.paged.cache:KVCache.scales", "return self.scales_L2H[index, 0], self.scales_L2H[index, 1]", "return self.scales_L2H[index, 1], self.scales_L2H[index, 0]", "fp8"),
    Mutant("FP8 weights are not quantised again after an update", "paceline.precision.rollout:RolloutPrecision.refresh", "self.weights.sync()", "pass", "fp8, weights"),
    # -- the reference backend --------------------------------------------------------------------
    Mutant("reference: top-p keeps one token too few", "paceline.engine.reference:truncate", "before >= sampling.top_p", "before + probabilities >= sampling.top_p", "reference"),
    Mutant("reference: a row that came back has other noise", "paceline.engine.reference:ReferenceBackend._sample", "len(row.request.prompt) + len(row.tokens) for row", "len(row.request.prompt) + len(row.tokens) + len(row.segments) // 2 for row", "reference, weights"),
]
