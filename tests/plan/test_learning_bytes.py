"""What the plan says of learning, against tensors that exist and against a count by hand."""

import pytest
import torch

from paceline.config import load_config
from paceline.learning import logprobs
from paceline.learning.learner import Learner
from paceline.learning.logprobs import token_logprobs
from paceline.plan.learning import learner_bytes, meta_policy, one_response, policy_bytes
from paceline.plan.memory_tracker import MemoryTracker
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.lora import add_adapters
from tests.plan.shapes import SMALL_SHAPES

TOKENS = 96
LORA = ["policy.lora.rank=4", "policy.lora.targets=[q_proj,v_proj,o_proj]"]
VARIANTS = {
    "full": [],
    "checkpointing": ["policy.activation_checkpointing=true"],
    "lora": LORA,
    "reference": ["learning.kl_coef=0.1"],
}
CASES = [(name, "full") for name in SMALL_SHAPES] + [
    (name, v) for name in ("qwen3", "qwen3_moe") for v in VARIANTS if v != "full"
]
QUICK = [("qwen3", "full"), ("qwen3_moe", "checkpointing"), ("qwen3_moe", "lora")]
MARKED_CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.fixture(autouse=True)
def small_logit_chunks(monkeypatch):
    """Several chunks of logits for one micro-batch, as at real sizes."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 40 * 500)


@pytest.fixture(autouse=True)
def plain_attention():
    """The meta device runs float32 attention as plain products; the real tensors must as well. In bf16 it
    plans for the flash kernel.
    """
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


def real_learner(shape: DecoderConfig, overrides: list[str], dtype: torch.dtype) -> Learner:
    config = load_config(None, overrides)
    policy = Decoder(shape, dtype).initialise(0)
    if config.policy.lora.rank:
        add_adapters(policy, config.policy.lora, seed=0)
    return Learner(policy, config)


def planned(shape: DecoderConfig, overrides: list[str], dtype: torch.dtype):
    config = load_config(None, overrides)
    return learner_bytes(meta_policy(shape, config, dtype), config, TOKENS)


@pytest.mark.parametrize("name, variant", CASES)
def test_learner_state_bytes_are_those_of_a_real_learner(name, variant):
    shape, overrides = SMALL_SHAPES[name], VARIANTS[variant]
    learner = real_learner(shape, overrides, torch.bfloat16)
    policy, optimiser = learner.policy, learner.optimiser
    held = policy_bytes(meta_policy(shape, load_config(None, overrides), torch.bfloat16))
    weights = [p for n, p in policy.named_parameters() if ".adapters." not in n]
    assert (
        held.weights
        == sum(p.nbytes for p in weights) + policy.rope_table.nbytes
        == 2 * shape.num_parameters + policy.rope_table.nbytes
    )
    assert held.adapters == sum(p.nbytes for n, p in policy.named_parameters() if ".adapters." in n)
    assert held.base_copies == sum(b.nbytes for b in policy.buffers())
    plan, state = planned(shape, overrides, torch.bfloat16), optimiser.state()
    assert plan.masters == sum(t.nbytes for n, t in state.items() if n.startswith("master."))
    assert plan.moments == sum(t.nbytes for n, t in state.items() if not n.startswith("master."))
    assert plan.gradients == sum(p.nbytes for p in policy.parameters() if p.requires_grad)
    assert plan.reference == (
        sum(p.nbytes for p in learner.reference.parameters()) if variant == "reference" else 0
    )


@pytest.mark.parametrize("name, variant", MARKED_CASES)
def test_activations_are_what_autograd_keeps(name, variant):
    """In float32, where CPU, GPU and meta device run the same code: every storage that autograd saves,
    counted by its own hooks.
    """
    shape, overrides = SMALL_SHAPES[name], VARIANTS[variant]
    learner = real_learner(shape, overrides, torch.float32)
    policy, batch = learner.policy, one_response(TOKENS, torch.device("cpu"))
    own = {
        t.untyped_storage().data_ptr() for t in [*policy.parameters(), *policy.buffers(), policy.rope_table]
    }
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes():
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = token_logprobs(policy, batch)
    measured = sum(storage.nbytes() for storage in saved.values())
    plan = planned(shape, overrides, torch.float32).activations
    assert plan == pytest.approx(measured, rel=0.03), (plan, measured)
    del result


@pytest.mark.parametrize("name, variant", MARKED_CASES)
def test_learning_peak_is_that_of_a_real_backward_pass(name, variant):
    """The same pass with real tensors, of a second micro-batch; the meta device sees every one of them."""
    shape, overrides = SMALL_SHAPES[name], VARIANTS[variant]
    learner = real_learner(shape, overrides, torch.float32)
    policy, batch = learner.policy, one_response(TOKENS, torch.device("cpu"))
    learner._backward(batch, TOKENS, 1, 1.0)
    known = [
        *policy.parameters(),
        *policy.buffers(),
        policy.rope_table,
        *(p.grad for p in policy.parameters() if p.grad is not None),
    ]
    known += list(learner.reference.parameters()) if learner.reference is not None else []
    with MemoryTracker([*known, *(t for t in vars(batch).values() if isinstance(t, torch.Tensor))]) as memory:
        learner._backward(batch, TOKENS, 1, 1.0)
    plan = planned(shape, overrides, torch.float32)
    assert plan.activations + plan.backward == pytest.approx(memory.peak, rel=0.05)


def by_hand(shape: DecoderConfig, layer: int) -> int:
    """Bytes that one layer keeps of one token in bf16 on a GPU, read off `policy/decoder.py`.

    norms         what they norm (2 E each); the result is made again
    attention     qkv, from which q and k are made again (2 each), the output (2), a float32 normaliser for
                  each head
    feed-forward  gate and up (2 x 2 F); the product after them is made again
    experts       the router's float32 probabilities and choices; for each choice the same as above, the
                  gathered input and the output (2 E each)
    """
    e, q, kv, f = (
        shape.hidden_size,
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        shape.intermediate_size,
    )
    total = 2 * 2 * e + 2 * (q + 2 * kv) + 2 * q + 4 * shape.num_heads
    if not shape.has_experts(layer):
        return total + 4 * f
    choices, inner = shape.num_experts_per_token, shape.expert_intermediate_size
    indices = 8 * choices * 3  # which experts, in which order, and back
    weights = 4 * choices + 4 + 2 * choices
    return total + 4 * shape.num_experts + indices + weights + choices * (4 * inner + 4 * e)


@pytest.mark.parametrize("name", SMALL_SHAPES)
def test_activations_by_hand(name):
    shape = SMALL_SHAPES[name]
    layers = sum(by_hand(shape, i) for i in range(shape.num_layers))
    # Last norm, what the head reads and the difference it keeps; cos and sin; tokens and positions.
    once = 4 * shape.hidden_size + 2 * shape.vocab_size + 4 * shape.head_dim + 8 * 2
    assert planned(shape, [], torch.bfloat16).activations == pytest.approx(TOKENS * (layers + once), rel=0.03)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_the_others():
    shape = SMALL_SHAPES["qwen3"]
    kept, recomputed = (
        planned(shape, [], torch.bfloat16),
        planned(shape, VARIANTS["checkpointing"], torch.bfloat16),
    )
    inputs = shape.num_layers * TOKENS * shape.hidden_size * 2
    once = TOKENS * (4 * shape.hidden_size + 4 * shape.head_dim + 20)
    assert recomputed.activations == pytest.approx(inputs + once, rel=0.05)
    assert recomputed.activations < 0.2 * kept.activations


def test_memory_tracker_counts_views_once_and_drops_freed_tensors():
    known = torch.zeros(100)
    with MemoryTracker([known]) as memory:
        a = torch.zeros(1000)
        view, known_view = a[10:], known[:5]
        b = a * 2
        assert memory.live == 8000 and view is not None and known_view is not None
        del b
        assert (memory.live, memory.peak) == (4000, 8000)
        a.add_(1)
        assert memory.live == 4000
