"""A recipe read from YAML and dotted overrides.

    paceline train my.yaml rollout.temperature=0.8 learning.lr=1e-6

Two layers: the file, then the overrides, whose order does not matter. A key in the overrides wins over the
file's. A key that stands for a group of others (`CHOICES`) replaces its whole group: given as an override,
it drops the file's keys of that group. Within one layer, a key that is spelt out wins over what the
choice stands for.
"""

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from paceline.config.arguments import as_texts, recipe_name
from paceline.config.correction import CorrectionConfig
from paceline.config.explaining import explain, takes_text
from paceline.config.learning import ALGORITHM_DEFAULTS
from paceline.config.recipe import Config
from paceline.config.removed import without_removed_keys
from paceline.config.section import ConfigError
from paceline.config.task import TaskConfig, keys_of_another_task

# Keys whose values stand for a group of other keys, which lie in the same section.
CHOICES = {
    "learning.algorithm": tuple(dict.fromkeys(key for keys in ALGORITHM_DEFAULTS.values() for key in keys)),
    "learning.correction.preset": tuple(key for key in CorrectionConfig.model_fields if key != "preset"),
}

# Where the shipped recipes are.
RECIPES = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def load_config(recipe: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a recipe, given as a path or the name of a shipped one, and applies overrides.

    An override is `section.key=value`, the value read as YAML, or as it is written where the key takes text.
    """
    tree: dict[str, Any] = {}
    if recipe is not None:
        tree = _read_yaml(_recipe_path(recipe_name(recipe)))
    given = [(override, *split_override(override)) for override in as_texts("overrides", overrides)]
    for _, key, value in given:
        _drop(tree, key.rpartition(".")[0].split("."), _stands_for(tree, key, value))
    for override, key, value in given:
        _assign(tree, key.split("."), value, override)
    return parse_config(tree)


def _stands_for(tree: dict[str, Any], key: str, value: Any) -> tuple[str, ...]:
    """Returns the keys of a recipe that are dropped when one of its keys gets another value."""
    section = tree.get("task")
    if key == "task.name" and isinstance(section, dict) and section.get("name", TaskConfig().name) != value:
        return keys_of_another_task(str(value))
    return CHOICES.get(key, ())


def refuse_mistyped_keys(overrides: list[str] | tuple[str, ...]) -> None:
    """Raises ConfigError where an override names a key that no recipe has; values are not checked."""
    tree: dict[str, Any] = {}
    for override in overrides:
        key, value = split_override(override)
        _assign(tree, key.split("."), value, override)
    try:
        Config.model_validate(without_removed_keys(tree))
    except ValidationError as error:
        mistyped = [explain(problem) for problem in error.errors() if problem["type"] == "extra_forbidden"]
        if mistyped:
            raise ConfigError("\n".join(mistyped)) from None


def parse_config(tree: dict[str, Any]) -> Config:
    """Validates a recipe's sections; raises ConfigError with a sentence per problem."""
    try:
        return Config.model_validate(without_removed_keys(tree))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem) for problem in error.errors())) from None


def dump_config(config: Config) -> str:
    """Returns the recipe as YAML, every key spelt out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _recipe_path(recipe: str) -> Path:
    if recipe in shipped_recipes():
        return shipped_recipes()[recipe]
    path = Path(recipe)
    if path.is_file():
        return path
    near = difflib.get_close_matches(recipe, shipped_recipes(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"recipe {recipe!r} is neither a file nor a shipped recipe ({', '.join(shipped_recipes())}).{hint}"
    )


class _RecipeLoader(yaml.SafeLoader):
    """Refuses a key that is repeated in one section, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns the section; raises ConfigError with both lines where a key is repeated."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ConfigError(
                        f"{key.start_mark.name}: {key.value!r} stands in line {lines[key.value]} and again "
                        f"in line {line}, and only one of them can count; put what belongs to it in one place"
                    )
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open() as text:
            tree = yaml.load(text, Loader=_RecipeLoader) or {}
    except (yaml.YAMLError, ValueError) as error:  # not UTF-8, or a date that does not exist
        raise ConfigError(f"{path} is not readable YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold sections ({', '.join(Config.model_fields)}), not a {type(tree).__name__}"
        )
    return tree


def _parse_scalar(text: str) -> Any:
    value = yaml.safe_load(text) if text else ""  # no key takes YAML's null, and paths may be empty
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _parse_text(text: str) -> Any:
    """Returns a scalar as written, where YAML would parse a date, a number or a boolean."""
    node = yaml.compose(text, Loader=yaml.SafeLoader) if text else None
    if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null"):
        return str(node.value)
    return _parse_scalar(text)


def split_override(override: str, root: type[BaseModel] = Config) -> tuple[str, Any]:
    """Returns the key and the value of `key=value`; the value is parsed by the key's type in `root`."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"override {override!r} is not of the form section.key=value, such as learning.lr=1e-4"
        )
    try:
        return key, _parse_text(value) if takes_text(key, root) else _parse_scalar(value)
    except (yaml.YAMLError, ValueError):  # the second: a date that does not exist
        raise ConfigError(
            f"override {override!r} is not readable YAML: "
            "write lists as [a, b], and text with brackets in quotes"
        ) from None


def _drop(tree: dict[str, Any], path: list[str], keys: tuple[str, ...]) -> None:
    branch: Any = tree
    for part in path:
        branch = branch.get(part) if isinstance(branch, dict) else None
    for key in keys if isinstance(branch, dict) else ():
        branch.pop(key, None)


def _assign(tree: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {key!r} is a value, not a section")
    tree[path[-1]] = value
