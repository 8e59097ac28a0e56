"""What the site has besides docs/: examples, notes of benchmarks, CONTRIBUTING.md, CHANGELOG.md and LICENSE.

On GitHub the pages link to those with `../`; on the site they lie beside the pages.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TAKEN = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
FOLDERS = ("examples", "benchmarks/notes")

# Links from those files to pages of docs/, and from pages to those files.
INTO_DOCS = re.compile(r"\]\((?:\.\./)*docs/")
OUTSIDE = "|".join(map(re.escape, (*(f"{folder}/" for folder in FOLDERS), *TAKEN)))
OUT_OF_DOCS = re.compile(rf"\]\(\.\./((?:\.\./)?)({OUTSIDE})")


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that lie outside docs/."""
    paths = [ROOT / name for name in TAKEN]
    paths += [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".md", ".py", ".yaml", ".jsonl", ".sh", ".svg")
    ]
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links across the border of docs/ into links of the site."""
    depth = page.file.src_uri.count("/")
    if page.file.src_uri in TAKEN or page.file.src_uri.startswith(FOLDERS):
        return INTO_DOCS.sub("](" + "../" * depth, markdown)
    return OUT_OF_DOCS.sub(r"](\1\2", markdown)
