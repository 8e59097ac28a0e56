"""A real browser for this folder's tests. Where it is missing they fail: an unopened page is untested."""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str:
    """Returns the path of Debian's chromium, or of another one; fails with what to install."""
    found = os.environ.get("PACELINE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail("no chromium here: run scripts/browser.sh, or set PACELINE_BROWSER to one", pytrace=False)
    return found


@pytest.fixture(scope="module")
def browser():
    """Ends with a file of tests: others count the children of their process, and a browser starts some."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("playwright is missing: pip install -e '.[browser]'", pytrace=False)
    with sync_playwright() as playwright:
        # A container's root has no namespaces for chromium's sandbox; the pages are our own.
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens pages and fails at the end if one wrote to the console, raised, or asked another host."""
    problems: list[str] = []
    contexts = []

    def open_one(url: str, width: int = 1280, height: int = 900, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(120_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda request: check_request(request.url))
        page.goto(url)
        page.wait_for_selector("figure.chart")
        return page

    def check_request(url: str) -> None:
        if not url.startswith(("file:", "http://127.0.0.1:", "data:")):
            problems.append(f"request to {url}")

    yield open_one
    for context in contexts:
        context.close()
    assert not problems, "\n".join(problems)
