"""Reads back the data that a page of `plots/page.py` carries."""

import json
import re
from typing import Any

BLOCK = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_data(page: str) -> dict[str, Any]:
    """Returns the record inside a page; it fails where there is not exactly one."""
    (block,) = BLOCK.findall(page)
    assert not set(block) & set("<>&"), "nothing in it can end the element"
    return json.loads(block)
