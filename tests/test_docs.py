"""The docs hold together: links and anchors resolve, and commands, options, keys, extras and files exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from paceline.cli.main import app
from paceline.config import Config

ROOT = Path(__file__).parents[1]
FOLDERS = (".github", "benchmarks", "docs", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
# The changelog and the lab notebooks name what was, in the words of their time.
CURRENT_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "notes"]

FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
OVERRIDE = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=")
REPOSITORY_PATH = re.compile(r"(?:src|docs|tests|examples)/[\w./-]*\w/?")
EXTRAS = re.compile(r"pip install [^`\n]*'\.\[([a-z,]+)\]'")
NAMED_PAGE = re.compile(r"\b((?:docs|benchmarks)/[\w/-]+\.md)(?:#([\w-]+))?")
COMMAND = typer.main.get_command(app)
END_OF_COMMAND = ("#", "|", "&&", ";", ">")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives a page's headings."""
    found: dict[str, int] = {}
    slugs = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = LINK.sub(lambda link: link.group()[1 : link.group().index("]")], heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        slugs.add(f"{slug}-{count}" if count else slug)
    return slugs


def commands(page: Path) -> list[list[str]]:
    """Returns the arguments of every `paceline ...` that a page shows, in fences and in inline code."""
    text = page.read_text(encoding="utf-8")
    lines = [
        line.strip() for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    lines += INLINE_CODE.findall(FENCE.sub("", text))
    shown = [line for line in lines if re.match(r"paceline [a-z-]", line)]
    found = []
    for line in shown:
        words = shlex.split(line.split(" #")[0])[1:]
        end = next((i for i, word in enumerate(words) if word in END_OF_COMMAND), len(words))
        found.append(words[:end])
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    text = INLINE_CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name_of(page)} links to {target}: no such file"
        if anchor:
            assert anchor in anchors(linked), f"{name_of(page)} links to {target}: no such heading"


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=name_of)
def test_commands_and_options_exist(page):
    for words in commands(page):
        shown = f"{name_of(page)}: paceline {' '.join(words)}"
        command = COMMAND
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        needs_another = hasattr(command, "commands") and not command.invoke_without_command
        assert not (needs_another and words and words[0][0].isalpha()), f"{shown}: no such command"
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for word in words:
            option = word.partition("=")[0]
            assert not re.match(r"--[a-z]", word) or option in known, f"{shown}: there is no {option}"


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=name_of)
def test_overrides_name_keys_of_the_recipe(page):
    for words in commands(page):
        for word in words:
            found = OVERRIDE.match(word)
            section = Config
            for key in found.group(1).split(".") if found else ():
                if not hasattr(section, "model_fields"):
                    break  # free-form options, which the task or reward itself checks
                assert key in section.model_fields, f"{name_of(page)}: there is no key {found.group(1)}"
                section = section.model_fields[key].annotation


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    for code in INLINE_CODE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if REPOSITORY_PATH.fullmatch(code):
            assert (ROOT / code).exists(), f"{name_of(page)} names {code}: no such file"


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for page in PAGES
        for group in EXTRAS.findall(page.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert "models" in named
    assert named <= set(extras), f"no such extras: {', '.join(named - set(extras))}"


def test_pages_that_the_code_names_exist():
    for file in sorted((ROOT / "src").rglob("*.*")):
        if file.suffix in (".py", ".yaml", ".json", ".js"):
            for page, anchor in NAMED_PAGE.findall(file.read_text(encoding="utf-8")):
                shown = f"{file.relative_to(ROOT)} names {page}"
                assert (ROOT / page).exists(), f"{shown}: no such page"
                assert not anchor or anchor in anchors(ROOT / page), f"{shown}#{anchor}: no such heading"
