"""One-time setup of a run: the drafter that learns beside it, and the state of a resumed run's parts."""

from paceline.cluster.learning_home import LearningHome, OwnProcess
from paceline.cluster.pool import ReplicaPool
from paceline.drafting.online import OnlineDrafter
from paceline.drafting.remote_online import make_follower
from paceline.drafting.run_drafter import RunDrafter
from paceline.drafting.saving import cut_back_saves
from paceline.learning.checkpoint import TrainingState, load_admission, load_calibration, load_drafters
from paceline.pacing.store import load_pacing, load_times
from paceline.plan.head_room import NO_ROOM
from paceline.report.console import Console
from paceline.report.run_directory import RunDirectory
from paceline.runs.records import RunRecords
from paceline.session import Session
from paceline.types import Precision


def make_run_drafter(
    session: Session, learner: LearningHome, console: Console, live: bool = True
) -> RunDrafter | None:
    """Connects a head that learns with the forward passes that its states come from, and with idle time.

    `live`: the run generates, so a head drafts; with saved rollouts none learns unless asked for. None: no
    head learns.
    """
    config = session.config
    if not config.rollout.head_may_learn or not (live or config.rollout.speculation.asks_to_learn):
        return None
    speculation = session.backend.speculation
    head, trainers = session.drafting_head(), session.idle_training
    if head is not None and trainers is None and isinstance(session.backend, ReplicaPool):
        console.warn(NO_ROOM)
        return None
    follower = make_follower(session.policy, head, config, console.warn, speculation, trainers)
    if follower is None or speculation is None:
        return None
    drafter = RunDrafter(follower, speculation.recording, config, console.warn)
    if isinstance(follower, OnlineDrafter) and isinstance(learner, OwnProcess):
        learner.learner.capture_states = follower.texts.tap.watch
        if not session.gives_memory:  # else the KV pool holds the memory meanwhile
            session.sampler.idle_work = drafter.work_in(lambda: session.learning(needs_memory=False))
    return drafter


def restore_parts(
    run: RunRecords | None,
    session: Session,
    learner: LearningHome,
    drafter: RunDrafter | None,
    console: Console,
) -> TrainingState:
    """Loads a resumed run's checkpoint into every part; returns its training state, or the initial one."""
    state = TrainingState(step=0, optimiser_steps=0, task_position=0)
    if run is None:
        return state
    checkpoint = run.checkpoint
    if checkpoint is not None:
        state = learner.load(checkpoint)
        drafters = load_drafters(checkpoint)
        backend = session.backend
        if backend.speculation is not None:
            backend.speculation.load_drafter_state(drafters)
        if admission := load_admission(checkpoint):
            backend.load_admission_state(admission)
        if backend.low_precision is not None:
            backend.low_precision.load_calibration_state(load_calibration(checkpoint))
        if drafter is not None:
            drafter.restore(run.directory.path, state.step, drafters)
    # Without a checkpoint every step is rerun.
    last = state.step if checkpoint is not None else -1
    run.cut_back(last, with_evaluation=not state.eval_due)
    with run.writing("the heads of the steps that stay", run.directory.path):
        cut_back_saves(run.directory.path, last)
    console.resumed(run.directory.path, state.step)
    return state


def restore_pacer(session: Session, precision: Precision, run: RunDirectory | None, console: Console) -> None:
    """Restores the pacer's state from a resumed `run`, and the step times of earlier runs."""
    speculation = session.backend.speculation
    if speculation is not None:
        machine = session.machine(precision)
        if run is not None:
            load_pacing(run.pacing_path, speculation.pacer, machine, console.warn)
        load_times(speculation.pacer, machine)
