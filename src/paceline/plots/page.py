"""Pages that stand alone: styles, uPlot, our scripts and the data in one HTML file, and nothing fetched.

Data goes in as JSON that no HTML parser can mistake for markup, and scripts put it on the page as text. The
page's content security policy lets exactly the scripts run that were written here, whatever else a text from
a run may hold.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

LIBRARY = ("uPlot.iife.min.js", "charts.js")
STYLES = ("uPlot.min.css", "page.css")


@cache
def asset(name: str) -> str:
    """Returns the text of a script or a style sheet that is shipped with the package."""
    return files("paceline.plots").joinpath("assets", name).read_text(encoding="utf-8")


def standalone_page(title: str, data: Mapping[str, Any], scripts: Sequence[str], lead: str = "") -> str:
    """Returns a page whose `scripts` (names of assets) find `data` under the id "data".

    `lead` is shown until they have run, and to readers without scripts.
    """
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {script_hashes(scripts)}"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
    block = f'<script type="application/json" id="data">{script_json(data)}</script>'
    return _page(title, scripts, meta, lead, block)


def shell_page(title: str, scripts: Sequence[str]) -> str:
    """Returns a page without data, for a server whose scripts fetch it and whose headers say the policy."""
    return _page(title, scripts, "", "", "")


def script_hashes(scripts: Sequence[str]) -> str:
    """Returns the digests of the scripts of a page, as a content security policy takes them."""
    return " ".join(f"'sha256-{_digest(asset(name))}'" for name in (*LIBRARY, *scripts))


def _page(title: str, scripts: Sequence[str], meta: str, lead: str, data: str) -> str:
    return "".join(
        [
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{meta}',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            *(f"<style>{asset(name)}</style>" for name in STYLES),
            '</head><body><div id="page"><header>',
            f"<h1>{html.escape(title)}</h1><p>{html.escape(lead)}</p></header></div>{data}",
            *(f"<script>{asset(name)}</script>" for name in (*LIBRARY, *scripts)),
            "</body></html>\n",
        ]
    )


def script_json(data: Any) -> str:
    """Returns JSON that may stand inside a script element: it has no `<`, `>` or `&`, only escapes."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
