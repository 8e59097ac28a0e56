"""How a step's sequences are cut into micro-batches, and which rank computes which.

A round is one micro-batch per rank. Ranks wait for each other in every layer, so a round takes as long as its
costliest micro-batch: all micro-batches get about the same cost, and those of a round are neighbours in it.

    one rank        parts of at most a budget of tokens, longest sequences first
    several         rounds x ranks parts of equal cost within the budget, costliest rounds first
                    [ 900 890 | 880 870 | 860 310 ]     two ranks, three rounds

A rank that a round leaves without a sequence computes `PADDING`, because the others wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.learning.batch import TrainingSequence, split_by_tokens
from paceline.policy.config import DecoderConfig

Part = list[TrainingSequence]
# One part per rank.
Round = list[Part]

# No gradient: its only response token is not in the loss.
PADDING = TrainingSequence(
    tokens=(0, 0),
    prompt_length=1,
    loss_mask=(False,),
    rollout_logprobs=(0.0,),
    advantage=0.0,
    temperature=1.0,
)


@dataclass(frozen=True)
class SequenceCost:
    """What a sequence of n tokens costs, in tokens of its products: n + n^2 / `even_length`.

    At `even_length` tokens attention takes as many operations as the products do.
    """

    even_length: float

    @staticmethod
    def of(config: DecoderConfig) -> "SequenceCost":
        """Returns the cost for a policy of this shape (operations as in `paceline bench learn`)."""
        attention = config.num_layers * config.num_heads * config.head_dim
        return SequenceCost(active_parameters(config) / attention)

    def __call__(self, sequence: TrainingSequence) -> float:
        tokens = len(sequence.tokens)
        return tokens + tokens * tokens / self.even_length


def active_parameters(config: DecoderConfig) -> int:
    idle = config.num_experts - config.num_experts_per_token if config.num_experts else 0
    expert = 3 * config.hidden_size * config.expert_intermediate_size if idle else 0
    return config.num_parameters - idle * expert * len(config.expert_layers)


def cut(
    sequences: Sequence[TrainingSequence], token_budget: int, ranks: int, cost: SequenceCost
) -> list[Round]:
    """Cuts sequences into rounds of one part per rank; parts may be empty in the last round only.

    No part has more than `token_budget` tokens, except that a longer sequence is a part of its own.
    """
    parts = split_by_tokens(sequences, token_budget)
    if ranks == 1:
        return [[part] for part in parts]
    rounds = -(-len(parts) // ranks)
    while True:
        balanced = _balance(sequences, token_budget, rounds * ranks, cost)
        if balanced is not None:
            return [balanced[i : i + ranks] for i in range(0, len(balanced), ranks)]
        rounds += 1


def _balance(
    sequences: Sequence[TrainingSequence], token_budget: int, count: int, cost: SequenceCost
) -> list[Part] | None:
    """Returns `count` parts, costliest first, or None where they do not hold all sequences.

    The costliest sequence that is left goes to the cheapest part that has room for it.
    """
    parts: list[Part] = [[] for _ in range(count)]
    tokens = [0] * count
    costs = [0.0] * count
    for sequence in sorted(sequences, key=lambda s: len(s.tokens), reverse=True):
        size = len(sequence.tokens)
        with_room = [i for i in range(count) if not parts[i] or tokens[i] + size <= token_budget]
        if not with_room:
            return None
        chosen = min(with_room, key=costs.__getitem__)
        parts[chosen].append(sequence)
        tokens[chosen] += size
        costs[chosen] += cost(sequence)
    return [parts[i] for i in sorted(range(count), key=costs.__getitem__, reverse=True)]
