"""Idle time: while rewards are computed a head may learn, and no longer."""

from concurrent.futures import Future
from dataclasses import replace

from paceline.config import load_config
from paceline.session import open_session
from paceline.types import Purpose, SamplingParams


def test_idle_work_is_offered_while_rewards_are_computed_and_only_then():
    config = load_config(
        None, ["run.device=cpu", "run.threads=1", "task.train_problems=4", "task.eval_problems=2"]
    )
    session = open_session(config)
    scoring = session.task.scoring
    reward = scoring.rewards[0]
    waiting_for: list[tuple[Future, Future]] = []
    seen: list[tuple[bool, bool]] = []

    def slow(inputs) -> Future:
        """Scores at once, and answers when it is let."""
        answer: Future = Future()
        waiting_for.append((answer, reward.run(inputs)))
        return answer

    def idle(waiting) -> None:
        before = waiting()
        for answer, scored in waiting_for:
            answer.set_result(scored.result())
        waiting_for.clear()
        seen.append((before, waiting()))

    scoring.rewards[0] = replace(reward, run=slow)
    session.sampler.idle_work = idle
    problems = session.task.train[:2]
    sampling = SamplingParams(max_tokens=8)
    groups = session.sampler.sample(problems, Purpose.TRAIN, 1, 2, sampling)
    assert seen == [(True, False)] and len(groups) == 2
    scoring.rewards[0] = reward
    session.sampler.sample(problems, Purpose.EVAL, 1, 1, sampling)
    assert len(seen) == 1, "an evaluation leaves nothing to learn from"
    session.close()
