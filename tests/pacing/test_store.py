"""pacing.json only saves learning the machine again: a damaged one is said and ignored, and leaves nothing
behind.
"""

import json

import pytest

from paceline.engine.graphs import buckets_up_to
from paceline.pacing.adaptive import AdaptivePacer, PacingSettings
from paceline.pacing.store import FORMAT, load_pacing, save_pacing
from paceline.pacing.strategy import Decision, Moment, Observation, Strategy

STRATEGY = Strategy("history", 3)


def make_pacer() -> AdaptivePacer:
    return AdaptivePacer(PacingSettings(tuple(buckets_up_to(8)), (STRATEGY,), seed=0))


def torn(state: dict) -> str:
    """Halfway through it turns into something else: what comes before it can be loaded."""
    return json.dumps({**state, "acceptance": {"history": {"all": 5}}})


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "",
        lambda _: "{no",
        lambda _: "[]",
        lambda _: "5",
        lambda _: json.dumps({"format": FORMAT}),
        torn,
        lambda s: json.dumps(s)[:-30],
    ],
    ids=["empty", "garbage", "list", "number", "no machine", "wrong inside", "cut off"],
)
def test_a_damaged_file_is_said_and_ignored(tmp_path, damage):
    path, pacer = tmp_path / "pacing.json", make_pacer()
    seen = Observation(Decision(STRATEGY), 4, 100.0, 0.001, 0.01, 8, 4, (3, 1, 0))
    for _ in range(50):
        pacer.observe(seen)
    pacer.choose(Moment(4, 100.0, 8))  # looks at what came in
    save_pacing(path, pacer, "here")
    state = json.loads(path.read_text())
    assert state["cost"]["steps"], "there is something to lose"
    path.write_text(damage(state))
    said, fresh = [], make_pacer()
    assert not load_pacing(path, fresh, "here", said.append)
    assert len(said) == 1 and str(path) in said[0] and "damaged" in said[0]
    assert fresh.state() == make_pacer().state()
