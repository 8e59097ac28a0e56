"""The RL loop, top to bottom: roll out, learn, hand the new weights over; evaluate and save when it is time.

    tasks ──prompts──▶ backend ──completions──▶ rewards ──▶ learner ──weights──▶ backend

What generates, what scores and what learns are parts of their own; this file only says in which order they
work. A killed run continues from its newest checkpoint and computes what it would have computed.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.backend import WeightsNotFinite
from paceline.certify.closing_check import check_speculation
from paceline.config import (
    RESUME_MAY_CHANGE,
    Config,
    ConfigError,
    changed_keys,
    learning_notes,
    rollout_notes,
)
from paceline.device import learning_threads
from paceline.drafting.online import make_online
from paceline.learning.algorithms.dapo import punish_overlong
from paceline.learning.checkpoint import (
    TrainingState,
    load_checkpoint,
    load_drafters,
    newest_checkpoint,
    replace_folder,
    save_best,
    save_checkpoint,
    whole_checkpoints,
)
from paceline.learning.learner import Learner
from paceline.learning.sentinel import Sentinel, UnsafeRollouts
from paceline.pacing.store import load_pacing, save_pacing
from paceline.pacing.trace import append_trace
from paceline.policy.decoder import not_finite
from paceline.report.clock import StageClock
from paceline.report.console import Console
from paceline.report.metrics import rollout_metrics
from paceline.report.run_directory import RunDirectory
from paceline.report.summary import Summary, summarise_run
from paceline.report.writers import make_writers
from paceline.rollout.dynamic_sampling import DynamicSampling, sampling_metrics
from paceline.rollout.evaluation import evaluate
from paceline.rollout.samples import write_groups
from paceline.rollout.sources import LiveRollouts, RolloutSource, SavedRollouts
from paceline.session import Session, open_session
from paceline.tasks.order import ProblemOrder
from paceline.types import Group


@dataclass(frozen=True)
class Result:
    finished: bool  # False: interrupted, resumable
    summary: Summary


def train(
    config: Config,
    recipe: str = "default",
    resume: Path | None = None,
    replay: Path | None = None,
    console: Console | None = None,
) -> Result:
    console = console or Console(quiet=True)
    run = None if resume is None else _reopen(RunDirectory.open(resume), config)
    session = open_session(config, learns=True)
    console.plan(session.plan)
    for note in [*learning_notes(config.learning), *rollout_notes(config.rollout)]:
        console.warn(note)
    clock = StageClock(session.device)
    learner = Learner(session.policy, config, console.warn)
    learner.observe_attention = session.backend.attention_observer
    online = make_online(session.policy, session.backend.trainable_head, config, console.warn)
    state = TrainingState(step=0, optimiser_steps=0, task_position=0, best_accuracy=-1.0)
    if run is not None:
        checkpoint = newest_checkpoint(run.checkpoints_path, console.warn)
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, session.policy, learner.optimiser)
            drafters = load_drafters(checkpoint)
            session.backend.load_drafter_state(drafters)
            if online is not None:
                online.load_state(drafters)
        run.cut_back(state.step if checkpoint is not None else -1)  # without one, everything is made again
        console.resumed(run.path, state.step)
    sentinel = Sentinel(
        config.rollout.sentinel, session.backend, state, live=replay is None, warn=console.warn
    )
    if state.step:
        load_pacing(
            run.pacing_path, session.backend.pacer, session.machine, console.warn
        )  # not before the sentinel: it may have fallen back
    order = ProblemOrder(session.task.train, config.run.seed, state.task_position)
    source = _rollout_source(session, order, replay, console)
    run = run or RunDirectory.create(config, recipe)  # not before everything it needs has been found
    writers = make_writers(config, run.path)
    best_accuracy = state.best_accuracy
    checkpoints = partial(whole_checkpoints, run.checkpoints_path, console.warn)

    def record(step: int, kind: str, metrics: dict[str, float]) -> None:
        run.append_metrics({"step": step, "kind": kind, **metrics})
        for writer in writers:
            writer.write(step, metrics)

    def evaluate_at(step: int) -> None:
        nonlocal best_accuracy
        with clock("evaluate"):
            evaluation = evaluate(session.sampler, session.task.held_out, config.eval)
            session.backend.take_stats()  # they are not the next rollout's
        record(step, "eval", evaluation.metrics() | clock.take_metrics())
        console.evaluated(step, evaluation)
        if evaluation.accuracy.value > best_accuracy:
            best_accuracy = evaluation.accuracy.value
            save_best(run.checkpoints_path, session.policy, session.policy_folder)

    def save(step: int) -> None:
        harmed = not_finite(session.policy)
        if harmed:  # a checkpoint of them would push out a sound one
            raise sentinel.failure(
                f"after step {step} {len(harmed)} parameters are not finite, first {harmed[0]}",
                run.path,
                checkpoints(),
            )
        state = TrainingState(
            step,
            learner.optimiser.steps,
            order.position,
            best_accuracy,
            sentinel.fallback,
            sentinel.capped_steps,
        )
        drafters, keep = (
            session.backend.drafter_state() | (online.state() if online is not None else {}),
            config.checkpoint.keep,
        )
        save_checkpoint(
            run.checkpoints_path,
            session.policy,
            learner.optimiser,
            state,
            session.policy_folder,
            keep,
            drafters,
        )
        save_pacing(run.pacing_path, session.backend.pacer, session.machine)
        if online is not None:
            replace_folder(run.checkpoints_path / "eagle", online.save)

    def hand_over_weights(step: int) -> None:
        try:
            session.backend.update_weights(version=step)
        except WeightsNotFinite as problem:
            raise sentinel.failure(f"after step {step} {problem}", run.path, checkpoints()) from None

    def roll_out_and_learn(step: int) -> tuple[list[Group], dict[str, float]]:
        with clock("rollout"):
            groups = punish_overlong(
                source.collect(step), config.rollout.max_tokens, config.learning.overlong_share
            )
            sentinel.check_rollouts(groups)
        with clock("learn"), learning_threads(config), session.backend.training(), session.learning_memory():
            metrics = learner.update(groups, sentinel.check_mismatch)
        sentinel.check_update(
            step, metrics
        )  # not before the KV pool is awake: falling back builds another one
        if online is not None:
            with (
                clock("drafter"),
                learning_threads(config),
                session.backend.training(),
                session.learning_memory(online.due),
            ):
                metrics |= online.follow(step, groups)
        return groups, metrics

    step = state.step
    due = False  # a checkpoint is
    hand_over_weights(step)
    with _interruptible(console) as interrupted:
        if step == 0:
            evaluate_at(0)
        console.start(config.run.steps)
        while step < config.run.steps and not interrupted:
            step += 1
            position = order.position
            try:
                groups, metrics = roll_out_and_learn(step)
            except (
                UnsafeRollouts
            ) as problem:  # the weights have not moved: the same problems and seeds, in base precision
                sentinel.fall_back(step, str(problem))
                order.position = position
                source.take_stats()
                groups, metrics = roll_out_and_learn(step)
            with clock("sync"):
                hand_over_weights(step)
            metrics |= sentinel.end_step(step, metrics)
            stats = source.take_stats()
            if online is not None and online.name in stats.drafts:
                online.observe(stats.drafts[online.name].first_accepted, stats.drafts[online.name].drafts)
            append_trace(run.trace_path, step, stats.trace)
            metrics |= rollout_metrics(groups, stats) | sampling_metrics(source) | clock.take_metrics()
            metrics["time/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/rollout"]
            record(step, "train", metrics)
            write_groups(
                run.samples_path / f"step_{step:06d}.jsonl",
                groups[: config.report.samples_per_step],
                session.tokenizer,
            )
            console.step(step, metrics)
            sentinel.stop_if_hopeless(run.path, checkpoints)
            if step == config.run.steps or (config.eval.every and step % config.eval.every == 0):
                evaluate_at(step)
            due = due or step == config.run.steps or step % config.checkpoint.every == 0 or bool(interrupted)
            if (
                due and not sentinel.failed_steps
            ):  # the weights may be what failed; the next step that learns is saved
                save(step)
                due = False
    if step == config.run.steps and replay is None:
        check = check_speculation(session, order.position, step + 1)
        if check is not None:
            console.speculation(check)
    for writer in writers:
        writer.close()
    session.close()
    return Result(finished=step >= config.run.steps, summary=summarise_run(run))


def _rollout_source(
    session: Session, order: ProblemOrder, replay: Path | None, console: Console
) -> RolloutSource:
    if replay is not None:
        return SavedRollouts(replay)
    rollout = session.config.rollout
    live = LiveRollouts(
        session.sampler, order, rollout.prompts_per_step, rollout.samples_per_prompt, session.train_sampling()
    )
    rounds = session.config.learning.dynamic_sampling_rounds
    return DynamicSampling(live, rollout.prompts_per_step, rounds, console.warn) if rounds else live


def _reopen(run: RunDirectory, config: Config) -> RunDirectory:
    changed = changed_keys(run.config(), config)
    refused = {key: values for key, values in changed.items() if key not in RESUME_MAY_CHANGE}
    if refused:
        listing = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in refused.items())
        raise ConfigError(
            f"{run.path} cannot resume with changed keys ({listing}). Allowed to change: {', '.join(RESUME_MAY_CHANGE)}"
        )
    run.write_config(config)
    return run


@contextmanager
def _interruptible(console: Console) -> Iterator[list[bool]]:
    """The first Ctrl-C lets the step finish and saves it; a second one ends the run on the spot."""
    interrupted: list[bool] = []

    def on_interrupt(signal_number: int, frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)
        console.warn("interrupted: finishing this step and saving it (Ctrl-C again to stop at once)")

    try:
        previous = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield interrupted
        return
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
