"""A file of its own in tests/cluster (test_ranks.py is slow as a whole)."""

from paceline.cluster.learning_home import RankProcesses
from paceline.learning.checkpoint import Beside, TrainingState, checkpoint_steps


class Ranks:
    """Ranks that write nothing."""

    def ask_all(self, message):
        assert message.kind == "write"
        return []


def test_rank_checkpoint_waits_for_the_head_of_its_step(tmp_path):
    seen = []
    state = TrainingState(step=6, optimiser_steps=6, task_position=3, best_reward=0.0)
    home = RankProcesses(Ranks(), None, tmp_path)
    folder = tmp_path / "checkpoints"
    home.save(folder, state, 2, Beside(written_elsewhere=lambda: seen.append(checkpoint_steps(folder))))
    assert seen == [[]] and checkpoint_steps(folder) == [6]
