"""Bugs of what rows run and keep, of attention and of the cache."""

from tests.certify.mutation import Mutant

ROWS = "paceline.kernels.row_step"
ATTENTION = "paceline.kernels.attention_reference"
TILES = "paceline.kernels.query_tiles"
ROPE = "paceline.kernels.rope_kv"
ENGINE = "paceline.engine.engine"
SCHEDULER = "paceline.engine.scheduler"

MUTANTS = [
    # -- what rows run and keep ----------------------------------------------------------------------
    Mutant(
        "noise of the position before",
        f"{ROWS}:gather_queries",
        "sample_positions_RQ=positions_RQ + 1",
        "sample_positions_RQ=positions_RQ",
        "tokens",
    ),
    Mutant(
        "all queries of a step share their noise",
        f"{ROWS}:gather_queries",
        "sample_positions_RQ=positions_RQ + 1",
        "sample_positions_RQ=positions_RQ[:, :1].expand_as(positions_RQ) + 1",
        "tokens",
    ),
    Mutant(
        "noise of another row",
        f"{ROWS}:gather_queries",
        "rows.seed[slots_R]",
        "rows.seed[slots_R.roll(1)]",
        "tokens",
    ),
    Mutant(
        "temperature of another row",
        f"{ROWS}:gather_queries",
        "rows.temperature[slots_R]",
        "rows.temperature[slots_R.roll(1)]",
        "tokens",
    ),
    Mutant(
        "block table off by one",
        f"{ROWS}:gather_queries",
        "positions_RQ // block_size]",
        "(positions_RQ + 1) // block_size]",
        "tokens",
    ),
    Mutant(
        "a rejected token's cache slot is not overwritten",
        f"{ROWS}:gather_queries",
        "(positions_RQ < limit_R.unsqueeze(1))",
        "(positions_RQ < limit_R.unsqueeze(1)) & (torch.arange(queries) > (queries > 1) - 1)",
        "tokens",
    ),
    Mutant(
        "proposals run at the first one's position",
        f"{ROWS}:gather_queries",
        "positions_RQ=positions_RQ.clamp(max=max_position)",
        "positions_RQ=torch.minimum(positions_RQ, positions_RQ[:, :1] + 1).clamp(max=max_position)",
        "tokens",
    ),
    Mutant(
        "one token too many is accepted",
        f"{ROWS}:append_samples",
        "agreed_RK.sum(1) + 1",
        "(agreed_RK.sum(1) + 2).clamp(max=queries)",
        "tokens",
    ),
    Mutant(
        "matches after a mismatch are accepted",
        f"{ROWS}:append_samples",
        ".long().cumprod(1)",
        ".long()",
        "tokens",
    ),
    Mutant(
        "max_tokens overrun by an accepted run",
        f"{ROWS}:append_samples",
        "limit_R - length_R)",
        "limit_R - length_R + (queries > 1))",
        "endings",
    ),
    Mutant(
        "a stop token in the middle of a run is missed",
        f"{ROWS}:append_samples",
        "offsets_Q < count_R.unsqueeze(1)\n    )",
        "offsets_Q == count_R.unsqueeze(1) - 1\n    )",
        "endings",
    ),
    Mutant(
        "the token after a stop token is kept",
        f"{ROWS}:append_samples",
        "argmax(1) + 1, count_R)",
        "argmax(1) + 2, count_R)",
        "endings",
    ),
    Mutant(
        "a stop is reported as the length limit",
        f"{ROWS}:append_samples",
        "torch.where(stopped_R, 2, 1)",
        "1",
        "endings",
    ),
    Mutant(
        "logprobs of the neighbouring position",
        f"{ROWS}:append_samples",
        "torch.where(appended_RQ, logprobs_RQ,",
        "torch.where(appended_RQ, logprobs_RQ.roll(1, 1),",
        "tokens",
    ),
    # -- attention and the cache ---------------------------------------------------------------------
    Mutant(
        "attention sees one token of the future",
        f"{TILES}:QueryTiles._some_pairs",
        "> self.position_NQ[tile_P].unsqueeze(2)",
        "> self.position_NQ[tile_P].unsqueeze(2) + 1",
        "tokens",
    ),
    Mutant(
        "attention drops its oldest block",
        f"{TILES}:QueryTiles._some_pairs",
        "> self.position_NQ[tile_P].unsqueeze(2)",
        "> self.position_NQ[tile_P].unsqueeze(2)\n"
        "    hidden_PQN |= (key_PN.unsqueeze(1) < 16) & (self.position_NQ[tile_P].unsqueeze(2) > 48)",
        "preempted",
    ),
    Mutant(
        "long contexts are merged with the wrong weights",
        f"{ATTENTION}:_fold",
        "total = total + weight_CNHM[chunk]",
        "total = total + 1.0",
        "long",
    ),
    Mutant(
        "long contexts are merged without their third chunk",
        f"{ATTENTION}:_fold",
        "weighted = weighted + weighted_CNHMD[chunk]",
        "weighted = weighted + (chunk != 2) * weighted_CNHMD[chunk]",
        "long",
    ),
    Mutant(
        "a prompt's positions end at 400",
        "paceline.engine.prefill:_forward_chunks",
        "positions_T = tensor(np.concatenate(spans))",
        "positions_T = tensor(np.concatenate(spans)).clamp(max=400)",
        "long",
    ),
    Mutant(
        "rotary embedding with the sign turned",
        f"{ROPE}:rotate_heads",
        "torch.cat((b, a), dim=-1)",
        "torch.cat((-b, -a), dim=-1)",
        "tokens",
    ),
    Mutant(
        "a norm without its epsilon's square root",
        "paceline.kernels.norm:rms_norm_reference",
        "weight_K, epsilon)",
        "weight_K, 100 * epsilon)",
        "tokens",
    ),
    Mutant(
        "experts' weights are not normalised",
        "paceline.kernels.moe_routing:route_reference",
        "if normalise",
        "if not normalise",
        "experts",
    ),
    Mutant(
        "siblings do not get a copy of the partial block",
        f"{ENGINE}:Engine._prefill",
        "if ready.copy_from:",
        "if False:",
        "tokens",
    ),
    Mutant(
        "siblings share the partial block",
        f"{SCHEDULER}:Scheduler.take_ready",
        "targets = [sequence.blocks[len(shared.whole_blocks)] for sequence in shared.prefill.waiting]",
        "targets = []\n"
        "            for sequence in shared.prefill.waiting:\n"
        "                own = len(shared.whole_blocks)\n"
        "                self.pool.release([sequence.blocks[own]])\n"
        "                (sequence.blocks[own],) = self.pool.share([shared.partial_block])",
        "tokens",
    ),
    Mutant(
        "a prompt's second chunk does not see the first",
        "paceline.engine.prefill:_forward_chunks",
        "contexts = np.array([prefill.done for",
        "contexts = np.array([0 * prefill.done for",
        "chunks",
    ),
    Mutant(
        "further blocks are entered one place too far",
        "paceline.engine.reservation:Reservation.hand_out",
        "indices += range(len(sequence.blocks), len(sequence.blocks) + missing)",
        "indices += range(len(sequence.blocks) + 1, len(sequence.blocks) + 1 + missing)",
        "preempted",
    ),
    Mutant(
        "a shared block is free when the first sibling ends",
        "paceline.engine.blocks:BlockPool.release",
        'assert self._references[block] > 0, f"block {block} released twice"\n'
        "        self._references[block] -= 1\n"
        "        if self._references[block] == 0 and block in self.prefixes:\n"
        "            self._known[block] = None\n"
        "    self._free += [b for b in blocks if not self._references[b] and b not in self._known]",
        "self._references[block] = max(1, self._references[block] - 1)\n"
        "    self._free += [b for b in blocks if b not in self._free]",
        "aborted",
    ),
    Mutant(
        "a held sequence counts a token that never ran",
        f"{SCHEDULER}:Scheduler.hold",
        "cached = sequence.length - 1",
        "cached = sequence.length",
        "continued",
    ),
    Mutant(
        "a continuation keeps a cache of another text",
        f"{SCHEDULER}:Scheduler._take_held",
        "sequence.cached = held.cached",
        "sequence.cached = len(sequence.request.prompt) - 1",
        "continued",
    ),
]
