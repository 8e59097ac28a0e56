"""The engine under a pacer: the same bits as without one, times and traces that add up, memory and training
respected.
"""

import json
import threading
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.oracle import OracleDrafter
from paceline.config import ConfigError, load_config
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.history import HistoryDrafter
from paceline.engine import graph_memory, sampling, step_bytes
from paceline.engine.capture_guard import CaptureGuard
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import buckets_up_to
from paceline.engine.sampling import StepVariant
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.store import load_pacing, save_pacing
from paceline.pacing.strategy import PLAIN, Decision, FixedPacer, Moment, Observation, Strategy
from paceline.pacing.trace import append_trace, cut_trace, read_trace
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.shapes import SHAPES
from paceline.report.views.tail import tail_view
from paceline.types import Completion, Purpose
from tests.engine.test_engine import bits, grouped_requests

CONFIG = DecoderConfig("llama", 97, 32, 64, 2, 2, 1, 16, 256, eos_token_ids=(2,))
COUNTS = (1, 3, 7)


@pytest.fixture(scope="module")
def policy() -> Decoder:
    return Decoder(CONFIG).initialise(0)


REQUESTS = grouped_requests(prompts=5, samples=3, longest=60)


def make_engine(policy: Decoder, pacer=None, steps_ahead: int = 0) -> tuple[Engine, OracleDrafter]:
    oracle = OracleDrafter(REQUESTS, [0.9, 0.7])
    engine = Engine(
        policy,
        EngineSettings(max_running=8, kv_tokens=2048),
        drafters=[HistoryDrafter(bank_tokens=480), oracle],
        pacer=pacer,
    )
    engine.steps_ahead = steps_ahead
    return engine, oracle


def run(engine: Engine) -> dict[str, Completion]:
    engine.submit(REQUESTS)
    done = {completion.request.id: completion for completion in engine.completions()}
    assert len(done) == len(REQUESTS) and engine.pool.used == 0
    return done


def make_pacer(seed: int = 0) -> AdaptivePacer:
    strategies = tuple(Strategy(name, count) for name in ("history", "oracle") for count in COUNTS)
    return AdaptivePacer(PacingSettings(tuple(buckets_up_to(8)), strategies, seed))


@pytest.fixture(scope="module")
def plain(policy) -> dict[str, Completion]:
    return run(make_engine(policy)[0])


def test_engine_bits_are_the_same_under_every_strategy_and_the_pacer(policy, plain, cpu_clock):
    for name in ("history", "oracle"):
        for count in COUNTS:
            engine, oracle = make_engine(policy, FixedPacer(Strategy(name, count)))
            oracle.learn(plain.values())
            assert bits(run(engine)) == bits(plain), (name, count)
    for steps_ahead in (0, 4):
        engine, oracle = make_engine(policy, make_pacer(), steps_ahead)
        oracle.learn(plain.values())
        used: set[str] = set()
        # One drafter's trial must be earned before the other's; how long that takes is up to the machine.
        for _ in range(30):
            assert bits(run(engine)) == bits(plain)
            used |= set(engine.take_stats().strategies)
            if any(s.startswith("oracle") for s in used):
                break
        assert "plain" in used and any(s.startswith("oracle") for s in used), (
            "it chose, and it changed its mind"
        )


def test_trace_accounts_for_every_step_and_token(policy, plain, cpu_clock):
    engine, oracle = make_engine(policy, make_pacer())
    oracle.learn(plain.values())
    run(engine)
    stats = engine.take_stats()
    assert sum(row.steps for row in stats.trace) == len(stats.running) == len(stats.strategies)
    assert stats.graph_pool_bytes is None, "nothing is captured on a CPU"
    assert sum(row.rows for row in stats.trace) == sum(stats.running)
    assert sum(row.tokens for row in stats.trace) == sum(len(c.tokens) for c in plain.values())
    assert all(row.seconds > 0 and row.realised > 0 for row in stats.trace)
    assert [str(row.decision.strategy) for row in stats.trace for _ in range(row.steps)] == stats.strategies
    assert sum(row.seconds for row in stats.trace) == pytest.approx(sum(stats.step_seconds), rel=0.5)


def test_oracle_drafter_has_the_requested_acceptance(policy, plain):
    engine, oracle = make_engine(policy, FixedPacer(Strategy("oracle", 2)))
    oracle.learn(plain.values())
    for _ in range(2):
        run(engine)
    drafts = engine.take_stats().drafts["oracle"]
    first = drafts.accepted_at[0] / drafts.drafts
    assert first == pytest.approx(0.9, abs=0.06) and drafts.accepted_at[1] / drafts.accepted_at[
        0
    ] == pytest.approx(0.7, abs=0.1)


class Recorder:
    """A pacer that keeps what it is told."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.seen = strategy, []
        self.workloads: list[str] = []

    def choose(self, moment: Moment) -> Decision:
        self.workloads.append(moment.workload)
        return Decision(self.strategy, moment.running, moment.context)

    def observe(self, observation: Observation) -> None:
        self.seen.append(observation)


def test_observations_report_the_step(policy, plain):
    recorder = Recorder(Strategy("oracle", 3))
    engine, oracle = make_engine(policy, recorder)
    oracle.learn(plain.values())
    run(engine)
    assert sum(o.tokens for o in recorder.seen) == sum(len(c.tokens) for c in plain.values())
    for o in recorder.seen:
        assert (
            len(o.accepted_at) == 3
            and o.drafts >= o.accepted_at[0] >= o.accepted_at[1] >= o.accepted_at[2] >= 0
        )
        assert o.tokens == o.drafts + sum(o.accepted_at) and o.draft_seconds > 0 and o.verify_seconds > 0
        assert 1 <= o.context <= 256
    assert recorder.seen[0].disturbed and any(not o.disturbed for o in recorder.seen), (
        "a prefill is in the first one's time"
    )


def test_moments_carry_the_purpose_of_the_rows(policy):
    recorder = Recorder(PLAIN)
    engine, _ = make_engine(policy, recorder)
    for purpose in (Purpose.EVAL, Purpose.TRAIN):
        engine.submit([replace(request, purpose=purpose) for request in REQUESTS])
        list(engine.completions())
        assert set(recorder.workloads) == {purpose.value}
        recorder.workloads.clear()


def test_pacing_state_is_kept_for_the_same_machine_only(policy, plain, tmp_path):
    pacer = make_pacer()
    engine, oracle = make_engine(policy, pacer)
    oracle.learn(plain.values())
    run(engine)
    save_pacing(tmp_path / "pacing.json", pacer, "this machine")
    again, elsewhere = make_pacer(), make_pacer()
    assert load_pacing(tmp_path / "pacing.json", again, "this machine") and not load_pacing(
        tmp_path / "pacing.json", elsewhere, "another"
    )
    assert again.state() == pacer.state() != elsewhere.state()
    earlier = {
        key: value
        for key, value in json.loads((tmp_path / "pacing.json").read_text()).items()
        if key != "format"
    }
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    assert not load_pacing(tmp_path / "earlier.json", elsewhere, "this machine"), (
        "what another version of the pacer kept is not understood"
    )
    assert not load_pacing(tmp_path / "missing.json", make_pacer(), "x") and not load_pacing(
        tmp_path / "pacing.json", FixedPacer(PLAIN), "x"
    )


def test_trace_files_skip_damaged_lines_and_can_be_plotted_and_cut(policy, plain, tmp_path):
    engine, oracle = make_engine(policy, make_pacer())
    oracle.learn(plain.values())
    path = tmp_path / "trace.jsonl"
    for step in (1, 2, 3):
        run(engine)
        rows = engine.take_stats().trace
        append_trace(path, step, rows)
    read = read_trace(path)
    not_kept = {"decision": None, "begun": 0.0, "draft_seconds": 0.0}
    assert sorted(read) == [1, 2, 3] and [asdict(r) | not_kept for r in read[3]] == [
        asdict(r) | not_kept for r in rows
    ]
    view = tail_view(rows)
    running, accept, speed = view["charts"]
    assert len(running["spans"]) == len(rows) and running["xs"][-1] == pytest.approx(
        sum(row.seconds for row in rows), rel=1e-4
    )
    assert running["series"][0]["y"][:-1] == pytest.approx([row.running for row in rows], rel=1e-5)
    assert accept["series"][0]["y"][0] == pytest.approx(rows[0].tokens / rows[0].rows, rel=1e-5)
    assert max(speed["series"][0]["y"]) > 0
    named = {row[0] for row in view["tables"][0]["rows"]}
    assert named == {str(row.decision.strategy) for row in rows} == {span[2] for span in running["spans"]}
    with path.open("a") as file:
        file.write('{"step": 4, "strat')
    good = path.read_bytes()
    path.write_bytes(b'{"step": 1, "strat\n\xff\xfe\n[]\n' + good + b'{"step": 3')
    assert {k: len(v) for k, v in read_trace(path).items()} == {k: len(v) for k, v in read.items()}, (
        "damaged lines are left out"
    )
    cut_trace(path, 2)
    assert sorted(read_trace(path)) == [1, 2] and path.read_bytes().startswith(good[:20])


def test_trace_of_rows_that_shared_tokens_can_be_read(tmp_path):
    """Strategies of an earlier version: `eagle:tree3~4`, and a drafter `history+eagle`."""
    names = {"eagle:tree3~4": "eagle:tree3", "history+eagle:tree7": "history+eagle:tree7", "plain": "plain"}
    fields = dict(reason="best", context=1.0, expected=0.0, steps=1, rows=2, tokens=3, seconds=0.1)
    records = [{"step": 1, "strategy": name, **fields} for name in names]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (rows,) = read_trace(tmp_path / "trace.jsonl").values()
    assert [str(row.decision.strategy) for row in rows] == list(names.values())


def test_fixed_strategy_that_does_not_fit_runs_plain(policy, plain, monkeypatch):
    monkeypatch.setattr(graph_memory, "SEGMENT", 1)  # so small a policy never needs a second one
    engine, oracle = make_engine(policy, FixedPacer(Strategy("oracle", 7)))
    oracle.learn(plain.values())
    memory = engine.runner.memory
    # More than plain decoding needs, and less than eight tokens of four rows.
    memory.budget = memory.would_hold(2, 8)
    assert memory.would_hold(8, 1) < memory.budget < memory.would_hold(4, 8)
    assert bits(run(engine)) == bits(plain)
    stats = engine.take_stats()
    for running, strategy in zip(stats.running, stats.strategies, strict=True):
        assert strategy == ("oracle:7" if running <= 2 else "plain")


def test_capture_and_training_keep_apart():
    guard, order = CaptureGuard(), []
    with guard.training():
        assert not guard.begin_capture(), "never while somebody trains"
    assert guard.begin_capture() and not guard.begin_capture()

    def train() -> None:
        with guard.training():
            order.append("training")

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not order, "training waits for the capture"
    order.append("captured")
    guard.end_capture()
    thread.join(120)
    assert order == ["captured", "training"] and guard.begin_capture()


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["rollout.speculation.drafters=[history,eagle]", "rollout.speculation.pacing=fixed"],
            "pacing = 'fixed' takes one drafter",
        ),
        (["rollout.speculation.max_running=4"], "max_running = 4 applies to pacing = 'fixed' only"),
        (["rollout.speculation.drafters=[history,history]"], "each drafter once"),
        (["rollout.speculation.drafter=history"], "Did you mean 'rollout.speculation.drafters'"),
        (["rollout.speculation.drafters=[eagel]"], "must be one of history, eagle, draft_model"),
        (["rollout.speculation.drafters=[history+eagle]"], "must be one of history, eagle, draft_model"),
        (
            ["rollout.speculation.drafters=[history]", "rollout.speculation.step_tokens=64"],
            "step_tokens = 64: there is no such key any more; leave it out; requests that share .* slower",
        ),
    ],
)
def test_speculation_recipes_that_make_no_sense_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_config(None, overrides)


def test_make_pacer_follows_the_recipe(policy):
    from paceline.engine.factory import counts_up_to, make_pacer

    config = load_config(
        None, ["rollout.speculation.drafters=[history]", "rollout.speculation.tokens=6"]
    ).rollout.speculation
    pacer = make_pacer(config, [HistoryDrafter()], 8, seed=5, shape=CONFIG)
    assert (
        pacer.settings.strategies == tuple(Strategy("history", k) for k in (1, 2, 3, 5, 6))
        and pacer.settings.seed == 5
    )
    assert not pacer.settings.catch_up, "copying needs no catching up"
    half = DraftModel(Decoder(replace(CONFIG, num_layers=1)).initialise(0))
    share = make_pacer(config, [half], 8, 0, CONFIG).settings.catch_up["draft_model"]
    assert share == half.shape.num_parameters / CONFIG.num_parameters and 0.5 < share < 1
    assert counts_up_to(15) == [1, 2, 3, 5, 7, 11, 15] and counts_up_to(1) == [1]
    fixed = load_config(
        None, ["rollout.speculation.drafters=[history]", "rollout.speculation.pacing=fixed"]
    ).rollout.speculation
    assert make_pacer(fixed, [HistoryDrafter()], 8, 0, CONFIG).choose(Moment(8)).strategy == Strategy(
        "history", 7
    )


@pytest.mark.gpu
def test_capture_time_excludes_the_steps_in_flight():
    """Else strategies that capture on the way would seem faster than those whose graphs are there."""
    config = DecoderConfig("qwen3", 1024, 512, 1024, 4, 8, 2, 64, 2048, qk_norm=True, eos_token_ids=(2,))
    runner = Engine(
        Decoder(config, torch.bfloat16, "cuda").initialise(0), EngineSettings(max_running=8, kv_tokens=4096)
    ).runner
    with torch.inference_mode():
        runner.run(8, 1, StepVariant())  # compiles
        runner.captured.clear()
        before = runner.capture_seconds
        torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
        runner.run(8, 1, StepVariant())
    assert 0 < runner.capture_seconds - before < 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("budget, tokens", [(320_000_000, 256), (260_000_000, 16)])
def test_graph_memory_is_measured_and_kept_to_its_budget(budget, tokens, monkeypatch):
    """Logits of 64 tokens are 39 MB, and what is kept for 16 rows in plain torch 147; half of that again for
    gaps. So the larger budget has room for every step of 16 rows, of 16 x 16 tokens in four pieces too,
    and the smaller one for 16 tokens and not for 32.
    """
    for module in (sampling, step_bytes):
        monkeypatch.setattr(module, "SAMPLE_TOKENS", 64)
    # Logits fill the pool.
    config = DecoderConfig("qwen3", 151936, 512, 1024, 4, 8, 2, 64, 2048, qk_norm=True, eos_token_ids=(2,))
    policy = Decoder(config, torch.bfloat16, "cuda").initialise(0)
    oracle = OracleDrafter(REQUESTS, [0.9])
    settings = EngineSettings(max_running=16, kv_tokens=4096, deterministic=True, graph_memory=budget)
    engine = Engine(policy, settings, drafters=[oracle], pacer=FixedPacer(PLAIN))
    plain = run(engine)
    oracle.learn(plain.values())
    for count in (1, 3, 7, 15):
        engine.pacer = FixedPacer(Strategy("oracle", count))
        assert bits(run(engine)) == bits(plain)
    stats = engine.take_stats()
    assert {"plain", "oracle:1"} < set(
        stats.strategies
    ) and stats.graph_pool_bytes == engine.runner.memory.pool_bytes
    assert max(key.shape.rows * key.shape.num_queries for key in engine.runner.captured) == tokens
    memory = engine.runner.memory
    assert memory.segment < memory.pool_bytes <= budget, "the segment, and small tensors beside it"
    with engine.runner.guard.training():
        captured = dict(engine.runner.captured)
        engine.pacer = FixedPacer(Strategy("oracle", 2))
        assert bits(run(engine)) == bits(plain), "without graphs, and the same"
        assert engine.runner.captured == captured


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_graphs_of_256_rows_of_the_8b_shape_fit_two_gigabytes(deterministic):
    policy = Decoder(replace(SHAPES["qwen3-8b"], num_layers=2), torch.bfloat16, "cuda").initialise(0)
    settings = EngineSettings(
        max_running=256, kv_tokens=4096, deterministic=deterministic, graph_memory=2_000_000_000
    )
    runner = Engine(policy, settings, drafters=[HistoryDrafter(bank_tokens=480)]).runner
    assert runner.memory.max_queries(256) == 16
    with torch.inference_mode():
        for bucket, queries in ((16, 4), (256, 1), (256, 2), (200, 5), (256, 8), (256, 16)):
            for variant in (StepVariant(), StepVariant(truncates=True, top_logprobs=4)):
                runner.run(bucket, queries, variant)  # of null rows
    assert (
        runner.memory.segment
        < runner.memory.pool_bytes
        <= runner.memory.segment + runner.memory.beside
        < 1_000_000_000
    )
