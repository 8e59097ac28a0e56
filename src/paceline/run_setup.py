"""One-time setup of a run: the drafter that learns beside it, and the state of a resumed run's parts."""

from paceline.cluster.learning_home import LearningHome, OwnProcess
from paceline.cluster.pool import ReplicaPool
from paceline.config import ConfigError
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.online import PREFIX, OnlineHead
from paceline.drafting.run_drafter import RunDrafter
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
    """Connects a head that learns with the forward passes that its states come from, or with idle replicas.

    `live`: the run generates, so a head drafts; with saved rollouts none learns unless asked for. None: no
    head learns.
    """
    config = session.config
    if not config.rollout.head_may_learn or not (live or config.rollout.speculation.asks_to_learn):
        return None
    speculation = session.backend.speculation
    head, trainers = session.drafting_head(), session.idle_training
    replicated = config.cluster.replicas > 0 and isinstance(session.backend, ReplicaPool)
    if head is not None and trainers is None and replicated:
        console.warn(NO_ROOM)
        return None
    own = config.rollout.speculation.online
    if head is None and own.is_asked_for:
        raise ConfigError(
            f"rollout.speculation.online.share = {own.share:g}: no eagle head drafts for this policy "
            f"(rollout.speculation.eagle_path = {config.rollout.speculation.eagle_path!r}); make one with "
            "`paceline drafter train` and name its folder there"
        )
    if not isinstance(head, EagleHead) or speculation is None:
        return None
    online = OnlineHead(session.policy, head, own, config.run.seed, console.warn, speculation, trainers)
    if isinstance(learner, OwnProcess) and trainers is None:
        learner.learner.capture_states = online.tap.watch
    return RunDrafter(online, session.policy.config, head, config, console.warn)


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
            drafting = {name: x for name, x in drafters.items() if not name.startswith(PREFIX)}
            backend.speculation.load_drafter_state(drafting)
        if admission := load_admission(checkpoint):
            backend.load_admission_state(admission)
        if backend.low_precision is not None:
            backend.low_precision.load_calibration_state(load_calibration(checkpoint))
        if drafter is not None:
            drafter.online.load_state(drafters)
    # Without a checkpoint every step is rerun.
    last = state.step if checkpoint is not None else -1
    run.cut_back(last, with_evaluation=not state.eval_due)
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
