"""The report in a real browser: it loads, draws, answers to mouse and keyboard, follows a run, stays safe."""

import json
import time

import pytest

from paceline.report.html_report import write_report
from paceline.report.run_directory import RunDirectory
from tests.report.made_run import CLOSING, HOSTILE, HOSTILE_NAME, make_hostile_run, make_run, train_record
from tests.report.test_server import serving

pytestmark = pytest.mark.slow

# Whether a canvas has ink beyond axes and grid: pixels in the colour of the first curve, all but grey ones.
INK = """figure => {
  const canvas = figure.querySelector('canvas');
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let coloured = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const [r, g, b, a] = pixels.slice(i, i + 4);
    if (a > 40 && Math.max(r, g, b) - Math.min(r, g, b) > 60) coloured += 1;
  }
  return coloured;
}"""


def report_url(folder, *runs):
    write_report(list(runs), folder / "report.html")
    return f"file://{folder / 'report.html'}"


def wait_until(happened, seconds=120):
    """Waits until it has; Playwright's own wait evaluates text, which the pages' policy forbids."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def unfold(page):
    """Opens what is folded away and returns the figures, all drawn."""
    for folded in (".fold:not([open])", ".more:not([hidden])"):
        for summary in page.query_selector_all(f"{folded} > summary"):
            summary.click()
    figures = page.query_selector_all("figure.chart")
    wait_until(lambda: all(figure.get_attribute("data-drawn") for figure in figures))
    return figures


@pytest.mark.ci
def test_report_draws_what_it_shows_without_scrolling(tmp_path, open_page):
    """So that it is all there on paper and in a picture of the whole page."""
    page = open_page(report_url(tmp_path, make_run(tmp_path / "run")))
    shown = page.query_selector_all(".fold > .charts > figure.chart")
    wait_until(lambda: all(figure.get_attribute("data-drawn") for figure in shown))
    assert len(shown) == 12, "three of them of one step"
    assert page.inner_text("#summary .card.good .verdict") == "Yes: 35.0% → 92.0%"
    figures = unfold(page)
    assert len(figures) > len(shown)
    for figure in figures:
        assert figure.evaluate(INK) > 50, f"{figure.get_attribute('id')} is empty"
        assert " to " in figure.query_selector(".plot").get_attribute("aria-label")


def test_report_answers_to_mouse_and_keyboard(tmp_path, open_page):
    page = open_page(report_url(tmp_path, make_run(tmp_path / "run")))
    page.select_option("#tail-step", label="step 7")
    page.select_option("#samples-step", label="step 9")
    wait_until(lambda: "question 9" in page.inner_text("#samples"))
    assert "question 8" not in page.inner_text("#samples")
    page.check("#samples-all")
    page.fill("#samples-search", "ANSWER 13")
    status = page.locator("#samples [role=status]")
    wait_until(lambda: status.inner_text().startswith("2 responses"))
    page.select_option("#samples-outcome", "not correct")
    wait_until(lambda: status.inner_text().startswith("1 responses"))

    page.locator("#chart-reward .plot").focus()
    readout = page.locator("#chart-reward .readout")
    page.keyboard.press("End")
    wait_until(lambda: readout.inner_text().startswith("step 20: mean reward"))
    page.keyboard.press("ArrowLeft")
    wait_until(lambda: readout.inner_text().startswith("step 19: mean reward"))
    before = page.query_selector("#chart-lengths").evaluate(INK)
    page.locator("#chart-lengths .legend button").first.press("Enter")
    wait_until(lambda: page.get_attribute("#chart-lengths .legend button", "aria-pressed") == "false")
    wait_until(lambda: page.query_selector("#chart-lengths").evaluate(INK) < before)


def test_report_of_several_runs_overlays_their_curves(tmp_path, open_page):
    faster = {"time/rollout": 1.3, "time/step": 2.5}
    runs = [make_run(tmp_path / "slow"), make_run(tmp_path / "fast", **faster)]
    page = open_page(report_url(tmp_path, *runs))
    assert page.locator("#chart-reward .legend button").all_inner_texts() == ["slow", "fast"]
    assert "2.00x" in page.inner_text("#table-speedups") and "same seed" in page.inner_text("#summary")
    page.select_option("#tail-step", label="slow: step 3")
    unfold(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_report_fits_the_width_in_light_and_dark(tmp_path, open_page, scheme, width):
    page = open_page(report_url(tmp_path, make_run(tmp_path / "run")), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") < (2700 if width < 1000 else 4300)
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")


def test_report_answers_its_questions_on_a_phones_first_screen(tmp_path, open_page):
    run = make_run(tmp_path / "run")
    RunDirectory(run).write_closing(CLOSING)
    page = open_page(report_url(tmp_path, run), width=390, height=844)
    cards = page.query_selector_all("#summary .card")
    said = [card.query_selector(".verdict").inner_text() for card in cards[:3]]
    assert said == ["Yes: 35.0% → 92.0%", "1.20x as fast", "Yes: the same tokens"]
    assert all(box["y"] + box["height"] < 844 for card in cards[:3] if (box := card.bounding_box()))
    assert not page.is_visible("#tail-step")
    page.click("nav a[href='#tail']")
    assert page.is_visible("#tail-step"), "a link to what is folded unfolds it"


def test_report_calls_a_partly_rewarded_response_neither_correct_nor_wrong(tmp_path, open_page):
    run = make_run(tmp_path / "run", steps=1)
    samples = run / "samples/step_000001.jsonl"
    samples.write_text(samples.read_text().replace('"reward": 0.0', '"reward": 0.4'))
    page = open_page(report_url(tmp_path, run))
    assert page.locator("#samples .badge").all_inner_texts() == ["correct", "in part"]


@pytest.mark.ci
def test_report_shows_hostile_content_as_text_in_a_browser(tmp_path, open_page):
    run = make_hostile_run(tmp_path)
    with serving(run) as server:
        for url in (report_url(tmp_path, run), server.url):
            page = open_page(url)
            unfold(page)
            assert page.inner_text("h1") == HOSTILE_NAME and page.title() == HOSTILE_NAME
            page.select_option("#samples-step", label="step 20")
            assert HOSTILE[:40] in page.inner_text("#samples")
            assert "<script>window.hacked=1</script>" in page.inner_text("#speculation")
            assert page.evaluate("window.hacked") is None and page.query_selector("img") is None


def test_long_report_opens_quickly(tmp_path, open_page):
    def seconds(url):
        begun = time.monotonic()
        open_page(url).wait_for_selector("[data-drawn]")
        return time.monotonic() - begun

    (tmp_path / "short").mkdir()
    short = report_url(tmp_path / "short", make_run(tmp_path / "short/run"))
    long = report_url(tmp_path, make_run(tmp_path / "run", steps=2000))
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    usual = min(seconds(short) for _ in range(3))
    least = min(seconds(long) for _ in range(3))
    assert least < max(2, 4 * usual), f"{least} s; a short one takes {usual} s on this machine"


@pytest.mark.ci
def test_served_report_follows_its_run(tmp_path, open_page):
    run = make_run(tmp_path / "run", steps=5)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])  # the first evaluation
    with serving(run) as server:
        page = open_page(server.url)
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(lines[1:-1])
        page.wait_for_selector("#chart-reward[data-drawn='5']")
        sections = page.locator("section").evaluate_all("found => found.map((section) => section.id)")
        assert sections == [
            "summary",
            "learning",
            "time",
            "speculation",
            "health",
            "metrics",
            "tail",
            "samples",
        ]
        page.select_option("#tail-step", label="step 3")
        page.locator("#chart-lengths .legend button").first.click()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(train_record(6)) + "\n")
        page.wait_for_selector("#chart-reward[data-drawn='6']")
        chosen = page.locator("#tail-step").evaluate("select => select.selectedOptions[0].text")
        assert chosen == "step 3", "what was chosen stays"
        assert page.get_attribute("#chart-lengths .legend button", "aria-pressed") == "false"
