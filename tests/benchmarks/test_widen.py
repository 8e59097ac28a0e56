"""A widened model computes the small model's function: same logits, same states at the same share of its
depth, same proposals of its head; and it is an ordinary folder.
"""

import dataclasses
import json

import pytest
import torch
import transformers

from benchmarks.widen import NOTE_FILE, layer_places, main, named_shape, widen, widen_eagle, widened_config
from paceline.config import load_config
from paceline.drafting.eagle_folder import BUILTIN_EAGLE, load_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.model_card import ACCEPTANCE_FILE
from paceline.learning.learner import Learner
from paceline.models.source import BUILTIN_POLICY
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig, RopeConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy
from paceline.policy.lora import add_adapters
from paceline.policy.shapes import SHAPES
from paceline.policy.tokenizer import load_tokenizer
from paceline.session import open_session
from paceline.tasks.order import ProblemOrder
from paceline.types import Purpose, Request, SamplingParams
from tests.drafting.heads import random_head

pytestmark = pytest.mark.slow

BUILTIN = DecoderConfig("llama", 48, 128, 256, 6, 4, 2, 32, 512)  # the built-in policy's sizes
TARGETS = {
    "twice-the-head": DecoderConfig("llama", 0, 360, 700, 9, 9, 3, 64, 0),
    "same-head": DecoderConfig("llama", 0, 192, 256, 6, 8, 4, 32, 0),
    "kv-heads-copied": DecoderConfig(
        "llama", 0, 256, 512, 8, 4, 4, 96, 0
    ),  # two query heads a kv head become one
    "same-sizes": DecoderConfig("llama", 0, 128, 256, 6, 4, 2, 32, 0),
}


def logits_of(policy: Decoder, tokens: list[list[int]]) -> torch.Tensor:
    packed = PackedAttention([len(t) for t in tokens], policy.device)
    with torch.inference_mode():
        return policy.logits(policy(torch.tensor(sum(tokens, [])), packed.positions_T, packed))


def some_tokens(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (70, 1, 33)]


# -- the folder -----------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Returns what makes a widened policy and head in a type, and where they are."""
    monkeypatch.setitem(SHAPES, "tiny", TARGETS["twice-the-head"])

    def make(dtype: str):
        out, head_out = tmp_path / f"wide-{dtype}", tmp_path / f"head-{dtype}"
        main(
            ["builtin", str(out), "--to", "tiny", "--dtype", dtype, "--head", "builtin-eagle", str(head_out)]
        )
        return out, head_out

    return make


def test_widened_folder_notes_what_it_is_and_transformers_agrees(folders):
    out, _ = folders("float32")
    note = json.loads((out / NOTE_FILE).read_text())
    assert (note["widened_from"], note["to"], note["dtype"]) == ("builtin", "tiny", "float32")
    assert note["layers_of_the_small_model"] == [0, 2, 3, 5, 6, 8]
    wide, small = load_policy(out, torch.float32), load_policy(BUILTIN_POLICY, torch.float32)
    assert wide.config.eos_token_ids == small.config.eos_token_ids and wide.config.tie_embeddings
    assert load_tokenizer(out).get_vocab() == load_tokenizer(BUILTIN_POLICY).get_vocab()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = some_tokens(48)[0]
    with torch.inference_mode():
        logits = theirs(torch.tensor([tokens])).logits[0]
    expected = logits_of(small, [tokens])
    assert expected.std() > 1 and (logits - expected).abs().max() < 2e-4


def test_widened_folder_has_every_tensor(folders):
    """Those that nothing sees, too: later updates depend on them."""
    out, head_out = folders("bfloat16")
    small = load_policy(BUILTIN_POLICY, torch.float32)
    wide = widen(small, TARGETS["twice-the-head"], torch.bfloat16)
    opened = load_policy(out, torch.bfloat16)
    assert opened.config == wide.config
    head = widen_eagle(load_eagle(BUILTIN_EAGLE, small, torch.float32), small.config, wide)
    opened_head = load_eagle(head_out, opened, torch.bfloat16)
    assert opened_head.config == head.config
    for made, read in ((wide, opened), (head, opened_head)):
        tensors = read.state_dict()
        assert tensors.keys() == made.state_dict().keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in made.state_dict().items())


def test_run_from_widened_folders_samples_the_small_policys_tokens(folders):
    """In float64, where no rounding decides a token; the head's proposals are accepted as often, too."""
    out, head_out = folders("float64")
    keys = ["policy.dtype=float64", "run.device=cpu", "rollout.speculation.drafters=[eagle]"]
    keys += ["rollout.speculation.pacing=fixed", "rollout.speculation.tokens=3"]
    outcomes = []
    for policy, head in (("builtin", "builtin-eagle"), (out, head_out)):
        own = [f"policy.path={policy}", f"rollout.speculation.eagle_path={head}"]
        session = open_session(load_config("default", [*keys, *own]))
        sampling = SamplingParams(max_tokens=40)
        session.backend.submit([Request(str(i), (5 + i, 6, 7, 8), i, sampling) for i in range(4)])
        tokens = {completion.request.id: completion.tokens for completion in session.backend.completions()}
        drafts = session.backend.take_stats().drafts["eagle"]
        outcomes.append((tokens, drafts.drafts, drafts.accepted_at))
        session.close()
    assert outcomes[0] == outcomes[1] and outcomes[0][1] > 20


def test_widened_folder_is_reused_and_no_other_replaced(folders, tmp_path, capsys):
    out, head_out = folders("float32")
    written = (out / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "head").mkdir()
    for file in BUILTIN_EAGLE.iterdir():
        (tmp_path / "head" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "head" / ACCEPTANCE_FILE).write_text("{}")  # by which a head's trees have their depth
    again = ["builtin", str(out), "--to", "tiny", "--dtype", "float32"]
    main([*again, "--head", str(tmp_path / "head"), str(tmp_path / "head-out")])
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    assert (tmp_path / "head-out" / ACCEPTANCE_FILE).read_text() == "{}"
    for command, says in (
        (["builtin", str(out), "--to", "tiny"], "already holds another model"),
        ([*again, "--head", "builtin-eagle", str(head_out)], "already holds a model"),
        (["nowhere", str(tmp_path / "x"), "--to", "tiny"], "policy.path = 'nowhere'"),
        (["builtin", str(tmp_path / "x"), "--to", "9b"], "--to '9b': must be one of"),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# -- the function ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_widened_builtin_policy_keeps_its_logits(target):
    policy = load_policy(BUILTIN_POLICY, torch.float64)
    wide = widen(policy, TARGETS[target])
    small_logits, wide_logits = (logits_of(p, some_tokens(48)) for p in (policy, wide))
    assert small_logits.std() > 1, "logits that say something"
    assert (small_logits - wide_logits).abs().max() < 1e-9
    assert (
        wide.config.hidden_size == TARGETS[target].hidden_size
        and len(wide.layers) == TARGETS[target].num_layers
    )


@pytest.mark.parametrize("rope", [RopeConfig(5000.0), RopeConfig(10000.0, "linear", {"factor": 4.0})])
def test_widen_keeps_biases_untied_heads_and_scaled_rope(rope):
    """Everything a config of these families can switch on, with random weights."""
    config = DecoderConfig(
        "llama", 61, 48, 80, 3, 6, 2, 16, 256, 1e-2, rope, qkv_bias=True, output_bias=True, mlp_bias=True
    )
    policy = Decoder(config, torch.float64).initialise(1)
    for parameter in policy.parameters():
        parameter.data += 0.2 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
        )
    wide = widen(policy, DecoderConfig("llama", 0, 112, 90, 7, 8, 4, 48, 0))
    small_logits, wide_logits = (logits_of(p, some_tokens(61)) for p in (policy, wide))
    assert small_logits.std() > 0.5 and (small_logits - wide_logits).abs().max() < 1e-9


def states(policy: Decoder) -> list[torch.Tensor]:
    """The residual stream after each layer."""
    seen = []
    hooks = [layer.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in policy.layers]
    logits_of(policy, some_tokens(48))
    for hook in hooks:
        hook.remove()
    return seen


def test_widened_captured_states_are_the_small_models():
    policy = load_policy(BUILTIN_POLICY, torch.float64)
    wide = widen(policy, TARGETS["twice-the-head"])
    small_states, wide_states = states(policy), states(wide)
    places = layer_places(6, 9)
    assert places == [0, 2, 3, 5, 6, 8], "spread evenly, first and last in place"
    for index, state in enumerate(wide_states):
        owner = max(i for i, place in enumerate(places) if place <= index)
        assert (state[:, :128] - small_states[owner]).abs().max() < 1e-9
        assert not state[:, 128:].any(), "the padding stays empty"


def test_widened_unseen_weights_are_not_zero():
    """Memory and multipliers must see numbers: most of the weights are random, and the layers in between are
    too.
    """
    wide = widen(load_policy(BUILTIN_POLICY, torch.float32), TARGETS["twice-the-head"])
    for layer in wide.layers:
        for linear in (layer.attention.qkv, layer.feed_forward.gate_up):
            assert (linear.weight == 0).float().mean() < 0.5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("draft_vocab", [0, 30])
def test_widened_head_has_the_small_ones_logits(target, draft_vocab):
    policy = load_policy(BUILTIN_POLICY, torch.float64)
    head = EagleHead(config_for(policy.config, (1, 2, 5), draft_vocab), torch.float64)
    head.draft_to_target.copy_(torch.arange(len(head.draft_to_target)) + (3 if draft_vocab else 0))
    random_head(head, policy, 1)
    wide = widen(policy, TARGETS[target])
    wide_head = widen_eagle(head, policy.config, wide)
    tokens = torch.randint(48, (40,), generator=torch.Generator().manual_seed(2))
    packed = PackedAttention([39], policy.device)
    outs = []
    with torch.no_grad():
        for model, drafter in ((policy, head), (wide, wide_head)):
            captured, x = [], model.embedding(tokens[:-1])
            for index, layer in enumerate(model.layers):
                if index in drafter.config.captured_layers:
                    captured.append(x)
                x = layer(x, model.rope_table[packed.positions_T], index, packed)
            out = drafter(drafter.features(captured), model.embedding(tokens[1:]), packed.positions_T, packed)
            again = drafter(
                out, model.embedding(tokens[1:]), packed.positions_T, packed
            )  # from its own states, as a longer draft
            outs.append((drafter.logits(out), drafter.logits(again)))
    for small, large in zip(*outs, strict=True):
        assert small.std() > 0.5 and (small - large).abs().max() < 1e-8
    assert torch.equal(wide_head.draft_to_target, head.draft_to_target)


# -- the sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1.7b", "4b", "8b"])
def test_smollm2_fits_the_named_shapes(name):
    config = widened_config(SHAPES["smollm2-135m"], named_shape(name))
    peer = SHAPES[f"qwen3-{name}"]
    for field in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(config, field) == getattr(peer, field)
    layers, peer_layers = (
        c.num_parameters - c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
        for c in (config, peer)
    )
    assert abs(layers / peer_layers - 1) < 0.005, "the weights that a step reads, head aside"
    random_weights = dataclasses.replace(SHAPES[name], norm_eps=config.norm_eps)
    assert config == random_weights, "the shape that `bench decode` fills with random weights"


def test_widen_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="hidden_size 128 is more than 96.*head_dim 48 is no multiple of 32"):
        widened_config(BUILTIN, DecoderConfig("llama", 0, 96, 256, 6, 4, 2, 48, 0))
    with pytest.raises(ValueError, match="4 query heads on 2 kv heads do not fit 2 on 2"):
        widened_config(BUILTIN, DecoderConfig("llama", 0, 128, 256, 6, 2, 2, 32, 0))
    with pytest.raises(ValueError, match="family qwen3 cannot"):
        widened_config(SHAPES["qwen3-0.6b"], SHAPES["qwen3-8b"])


# -- what becomes of it ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapters", [pytest.param([], id="full"), pytest.param(["policy.lora.rank=8"], id="lora")]
)
def test_widened_updates_reach_the_padding(adapters):
    """So figures of widened policies are about cost: from the first update on they are another function."""
    sizes = ["task.train_problems=8", "task.eval_problems=4", "rollout.max_tokens=40"]
    config = load_config("default", ["run.device=cpu", *sizes, "learning.warmup_steps=0", *adapters])
    session = open_session(config)
    problems = ProblemOrder(session.task.train, 0).take(3)
    groups = session.sampler.sample(problems, Purpose.TRAIN, 1, 4, session.train_sampling())
    session.close()
    logits = {}
    small = load_policy(BUILTIN_POLICY, torch.float64)
    for name, policy in (("small", small), ("wide", widen(small, TARGETS["twice-the-head"]))):
        if adapters:
            add_adapters(policy, config.policy.lora, 0)
        before = logits_of(policy, some_tokens(48))
        writes_padding = policy.layers[0].attention.output.weight[small.config.hidden_size :]
        assert not writes_padding.any()
        assert not Learner(policy, config).update(groups)["policy/skipped"]
        assert writes_padding.any() == (name == "wide")
        logits[name] = before, logits_of(policy, some_tokens(48))
    (small_before, small_after), (wide_before, wide_after) = logits["small"], logits["wide"]
    assert (small_before - wide_before).abs().max() < 1e-9
    moved = (small_before - small_after).abs().max()
    assert (small_after - wide_after).abs().max() > 0.1 * moved, "no longer the same function"
