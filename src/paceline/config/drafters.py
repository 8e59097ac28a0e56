"""Every drafter that a recipe can name: what makes it, which keys are its own, and whether vLLM has it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class DrafterEntry:
    """One drafter; a new one is an entry here and a subclass of `drafting/base.Drafter`."""

    name: str
    made_by: str = ""  # `module:class` of the native engine's; empty: only vLLM has it
    folder_key: str = ""  # of rollout.speculation
    more_keys: tuple[str, ...] = ()  # of rollout.speculation, too
    vllm_method: str = ""  # empty: vLLM does not have it
    learns: bool = False  # during a run (rollout.speculation.online)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.folder_key, *self.more_keys) if self.folder_key else self.more_keys


_ENTRIES = (
    DrafterEntry("history", "paceline.drafting.history:HistoryDrafter"),
    DrafterEntry(
        "eagle",
        "paceline.drafting.eagle:EagleDrafter",
        folder_key="eagle_path",
        more_keys=("eagle_precision",),
        vllm_method="eagle3",
        learns=True,
    ),
    DrafterEntry(
        "draft_model",
        "paceline.drafting.draft_model:DraftModel",
        folder_key="draft_model_path",
        vllm_method="draft_model",
    ),
    DrafterEntry("ngram", vllm_method="ngram"),
    DrafterEntry("suffix", vllm_method="suffix"),
    DrafterEntry("mtp", vllm_method="mtp"),
    DrafterEntry("dflash", vllm_method="dflash"),
)

DRAFTERS = {entry.name: entry for entry in _ENTRIES}
if TYPE_CHECKING:
    DrafterName = str
else:
    DrafterName = Literal[tuple(DRAFTERS)]

NATIVE = tuple(entry.name for entry in _ENTRIES if entry.made_by)
VLLM = tuple(entry.name for entry in _ENTRIES if entry.vllm_method)
LEARNER = next(entry.name for entry in _ENTRIES if entry.learns)
