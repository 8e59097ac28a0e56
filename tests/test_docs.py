"""The docs hold together: links and anchors resolve, and commands, options, keys, extras and files exist."""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from paceline.cli.main import app
from paceline.config import Config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "paceline"
FOLDERS = (".github", "benchmarks", "docs", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
# The changelog and the lab notebooks name what was, in the words of their time.
CURRENT_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "notes"]

FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
OVERRIDE = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=")
REPOSITORY_PATH = re.compile(
    r"(?:src|bench|benchmarks|docs|tests|scripts|examples|\.ci)/[\w./-]*\w/?|(?!vllm/)[\w.-]+/[\w./-]*\w\.(?:py|sh)"
)
EXTRAS = re.compile(r"pip install [^`\n]*'\.\[([a-z,]+)\]'")
NAMED_PAGE = re.compile(r"\b((?:docs|benchmarks)/[\w/-]+\.md)(?:#([\w-]+))?")
COMMAND = typer.main.get_command(app)
END_OF_COMMAND = ("#", "|", "&&", ";", ">")


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


def broken_links(page: Path) -> Iterator[str]:
    text = INLINE_CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists():
            yield f"links to {target}: no such file"
        elif anchor and anchor not in anchors(linked):
            yield f"links to {target}: no such heading"


def unknown_options(page: Path) -> Iterator[str]:
    for words in commands(page):
        shown = f"paceline {' '.join(words)}"
        command = COMMAND
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        needs_another = hasattr(command, "commands") and not command.invoke_without_command
        if needs_another and words and words[0][0].isalpha():
            yield f"{shown}: no such command"
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for option in (word.partition("=")[0] for word in words):
            if re.match(r"--[a-z]", option) and option not in known:
                yield f"{shown}: there is no {option}"


def unknown_keys(page: Path) -> Iterator[str]:
    for words in commands(page):
        for word in words:
            found = OVERRIDE.match(word)
            section = Config
            for key in found.group(1).split(".") if found else ():
                if not hasattr(section, "model_fields"):
                    break  # free-form options, which the task or reward itself checks
                if key not in section.model_fields:
                    yield f"there is no key {found.group(1)}"
                    break
                section = section.model_fields[key].annotation


def missing_files(page: Path) -> Iterator[str]:
    """Yields the paths that stand for no file of the repository, of the package, or beside the page."""
    text = page.read_text(encoding="utf-8")
    marked = [*FENCE.findall(text), *INLINE_CODE.findall(FENCE.sub("", text))]
    for path in filter(REPOSITORY_PATH.fullmatch, " ".join(marked).split()):
        if not any((folder / path).exists() for folder in (ROOT, PACKAGE, page.parent)):
            yield f"names {path}: no such file"


def collect(complaints: Callable[[Path], Iterator[str]], pages: list[Path]) -> list[str]:
    return [f"{page.relative_to(ROOT)}: {text}" for page in pages for text in complaints(page)]


def test_docs_links_resolve():
    found = collect(broken_links, PAGES)
    assert not found, "\n".join(found)


def test_docs_commands_and_options_exist():
    found = collect(unknown_options, CURRENT_PAGES)
    assert not found, "\n".join(found)


def test_docs_overrides_name_keys_of_the_recipe():
    found = collect(unknown_keys, CURRENT_PAGES)
    assert not found, "\n".join(found)


def test_docs_name_existing_files():
    found = collect(missing_files, CURRENT_PAGES)
    assert not found, "\n".join(found)


def test_docs_name_existing_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for page in PAGES
        for group in EXTRAS.findall(page.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert "models" in named
    assert named <= set(extras), f"no such extras: {', '.join(named - set(extras))}"


def test_code_names_existing_pages():
    for file in sorted((ROOT / "src").rglob("*.*")):
        if file.suffix in (".py", ".yaml", ".json", ".js"):
            for page, anchor in NAMED_PAGE.findall(file.read_text(encoding="utf-8")):
                shown = f"{file.relative_to(ROOT)} names {page}"
                assert (ROOT / page).exists(), f"{shown}: no such page"
                assert not anchor or anchor in anchors(ROOT / page), f"{shown}#{anchor}: no such heading"
