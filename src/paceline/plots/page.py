"""Pages that stand alone: styles, uPlot, our scripts and the data in one HTML file, and nothing fetched.

Data goes in as JSON that no HTML parser can mistake for markup, and scripts put it on the page as text. The
page's content security policy lets exactly the scripts run that were written here, whatever else a text from
a run may hold.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

SCRIPTS = ("uPlot.iife.min.js", "charts.js", "report.js")
STYLES = ("uPlot.min.css", "page.css")


@cache
def asset(name: str) -> str:
    return files("paceline.plots").joinpath("assets", name).read_text(encoding="utf-8")


def standalone_page(title: str, data: Mapping[str, Any], lead: str = "") -> str:
    """Returns a page whose scripts find `data` under the id "data".

    `lead` is shown until they have run, and to readers without scripts. A page whose data says "live" may
    ask the server that it came from for newer data, and no other host.
    """
    asks = "'self'" if data.get("live") else "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {_script_hashes()}; "
        f"connect-src {asks}"
    )
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            *(f"<style>{asset(name)}</style>" for name in STYLES),
            '</head><body><div id="page"><header>',
            f"<h1>{html.escape(title)}</h1><p>{html.escape(lead)}</p></header></div>",
            f'<script type="application/json" id="data">{script_json(data)}</script>',
            *(f"<script>{asset(name)}</script>" for name in SCRIPTS),
            "</body></html>\n",
        ]
    )


def script_json(data: Any) -> str:
    """Returns JSON that may stand inside a script element: it has no `<`, `>` or `&`, only escapes."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script_hashes() -> str:
    """Returns the digests of the scripts of a page, as a content security policy takes them."""
    digests = (hashlib.sha256(asset(name).encode()).digest() for name in SCRIPTS)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
