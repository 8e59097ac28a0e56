"""`paceline export`: a run's policy as a Hugging Face folder.

With LoRA that is the merged model; its adapters go along as `adapter/`, a PEFT folder.
"""

from pathlib import Path

from paceline.cli.saved_policy import saved_policy
from paceline.cli.saving import refuse_run_directory, refuse_unwritable_folder, writing_folder
from paceline.policy.huggingface import DTYPES, load_policy, save_policy, stored_dtype
from paceline.policy.model_files import ADAPTER_FILES, copy_files, replaced_files


def export_policy(checkpoint: Path, out: Path, dtype: str, force: bool = False) -> Path:
    """Writes the policy of a run directory (its newest checkpoint), a checkpoint or a policy folder to `out`.

    Without a `dtype`, in the type that it is saved in. A folder that holds anything needs `force`: the model
    in it is replaced, other files stay. What is exported is not written over, and nothing is written into a
    run directory. Returns the folder that the policy was read from.
    """
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    refuse_run_directory("OUT", out)
    saved = saved_policy(checkpoint)
    source, adapter = saved.folder, saved.adapter
    _refuse_source(out, (checkpoint, source, adapter))
    _refuse_used(out, force)
    refuse_unwritable_folder("OUT", out)
    policy = load_policy(source, DTYPES[dtype] if dtype else stored_dtype(source))
    with writing_folder("OUT", out):
        save_policy(policy, out, tokenizer_from=source)
        _copy_adapter(adapter, out / "adapter")
    return source


def _refuse_source(out: Path, sources: tuple[Path, ...]) -> None:
    for source in sources:
        if out.exists() and source.exists() and out.samefile(source):
            raise ValueError(f"OUT {out}: is what is exported; choose another folder")


def _refuse_used(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose a folder")
    held = next(out.iterdir(), None) if out.is_dir() else None
    if held is not None and not force:
        raise ValueError(
            f"{out} is not empty: it holds {held.name}; choose another folder, or replace the model in it "
            "with --force (other files stay)"
        )


def _copy_adapter(adapter: Path, out: Path) -> None:
    """Puts the adapter in place of one that an earlier export left; without one, removes that."""
    if adapter.is_dir() or out.is_dir():
        with replaced_files(out, ADAPTER_FILES, last="adapter_config.json") as staging:
            copy_files(adapter, ADAPTER_FILES, staging)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
