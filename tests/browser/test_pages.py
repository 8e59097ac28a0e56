"""Report and dashboard in a real browser: they load, draw, answer to mouse and keyboard, and stay safe."""

import json
import time

import pytest

from paceline.report.html_report import write_report
from tests.dashboard.test_server import serving
from tests.report.made_run import HOSTILE, HOSTILE_NAME, make_hostile_run, make_run, train_record

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


def seconds_to_open(open_page, url, times=3):
    """Returns how long it takes until there is a chart, at best: others use this machine, too."""
    seconds = []
    for _ in range(times):
        begun = time.monotonic()
        page = open_page(url)
        page.wait_for_selector("[data-drawn]")
        seconds.append(time.monotonic() - begun)
        page.close()
    return min(seconds)


def draw_all(page):
    """Scrolls through the page, so that every chart is drawn, and returns the figures."""
    for figure in page.query_selector_all("figure.chart"):
        figure.scroll_into_view_if_needed()
        page.wait_for_selector(f"[id='{figure.get_attribute('id')}'][data-drawn]")
    return page.query_selector_all("figure.chart")


@pytest.mark.ci
def test_every_chart_of_a_report_has_ink(tmp_path, open_page):
    page = open_page(report_url(tmp_path, make_run(tmp_path / "run")))
    figures = draw_all(page)
    assert len(figures) >= 20
    for figure in figures:
        identity = figure.get_attribute("id")
        assert figure.evaluate(INK) > 50, f"{identity} is empty"
        assert "between" in figure.query_selector(".plot").get_attribute("aria-label")
    assert page.inner_text("#summary .card.good .verdict") == "Yes: 35.0% → 92.0%"


def test_a_step_is_chosen(tmp_path, open_page):
    page = open_page(report_url(tmp_path, make_run(tmp_path / "run")))
    page.select_option("#tail-step", "7")
    wait_until(lambda: page.input_value("#tail-slider") == "6")
    page.locator("#tail-slider").focus()
    page.keyboard.press("ArrowRight")
    wait_until(lambda: page.input_value("#tail-step") == "8")
    page.select_option("#samples-step", "9")
    wait_until(lambda: "question 9" in page.inner_text("#samples"))
    assert "question 8" not in page.inner_text("#samples")


def test_samples_are_searched(tmp_path, open_page):
    page = open_page(report_url(tmp_path, make_run(tmp_path / "run")))
    page.select_option("#samples-step", "")
    page.fill("#samples-search", "ANSWER 13")
    status = page.locator("#samples [role=status]")
    wait_until(lambda: status.inner_text().startswith("2 responses"))
    assert page.inner_text("#samples mark") == "answer 13"
    page.select_option("#samples-outcome", "wrong")
    wait_until(lambda: status.inner_text().startswith("1 responses"))


def test_keyboard_and_legend(tmp_path, open_page):
    page = open_page(report_url(tmp_path, make_run(tmp_path / "run")))
    draw_all(page)
    plot = page.locator("#chart-reward .plot")
    plot.focus()
    readout = page.locator("#chart-reward .readout")
    page.keyboard.press("End")
    wait_until(lambda: readout.inner_text().startswith("step 20: mean reward"))
    page.keyboard.press("ArrowLeft")
    wait_until(lambda: readout.inner_text().startswith("step 19: mean reward"))
    before = page.query_selector("#chart-lengths").evaluate(INK)
    page.locator("#chart-lengths .legend button").first.click()
    wait_until(lambda: page.get_attribute("#chart-lengths .legend button", "aria-pressed") == "false")
    wait_until(lambda: page.query_selector("#chart-lengths").evaluate(INK) < before)
    page.locator("#chart-reward summary").click()
    # A browser tells that <details> was opened in a task of its own, some time after the click.
    wait_until(lambda: page.locator("#chart-reward table tbody tr").count() == 20)


def test_runs_lie_on_top_of_one_another(tmp_path, open_page):
    runs = [
        make_run(tmp_path / "slow"),
        make_run(tmp_path / "fast", **{"time/rollout": 1.3, "time/step": 2.5}),
    ]
    page = open_page(report_url(tmp_path, *runs))
    page.wait_for_selector("#chart-reward .legend button")
    assert page.locator("#chart-reward .legend button").all_inner_texts() == ["slow", "fast"]
    assert "2.00x" in page.inner_text("#table-speedups") and "same seed" in page.inner_text("#summary")
    page.select_option("#tail-run", "fast")
    page.select_option("#samples-run", "fast")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_the_width_in_light_and_dark(tmp_path, open_page, scheme, width):
    page = open_page(report_url(tmp_path, make_run(tmp_path / "run")), width=width, scheme=scheme)
    draw_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 50_000


@pytest.mark.ci
def test_hostile_content_is_text(tmp_path, open_page):
    run = make_hostile_run(tmp_path)
    page = open_page(report_url(tmp_path, run))
    draw_all(page)
    assert page.evaluate("window.hacked") is None and page.query_selector("img") is None
    assert page.inner_text("h1") == HOSTILE_NAME and page.title() == HOSTILE_NAME
    assert HOSTILE[:40] in page.inner_text("#samples")
    assert "<script>window.hacked=1</script>" in page.inner_text("#speculation")
    with serving(tmp_path) as server:
        live = open_page(server.url)
        draw_all(live)
        live.select_option("#samples-step", "20")
        live.wait_for_selector("#samples .sample")
        assert live.evaluate("window.hacked") is None and live.query_selector("img") is None
        assert live.inner_text("h1") == HOSTILE_NAME


def test_a_long_report_opens_quickly(tmp_path, open_page):
    url = report_url(tmp_path, make_run(tmp_path / "run", steps=2000))
    assert (tmp_path / "report.html").stat().st_size < 10_000_000
    (tmp_path / "short").mkdir()
    usual = seconds_to_open(open_page, report_url(tmp_path / "short", make_run(tmp_path / "short/run")))
    seconds = seconds_to_open(open_page, url)
    assert seconds < max(2, 4 * usual), f"{seconds} s; a short one takes {usual} s on this machine"


@pytest.mark.ci
def test_the_dashboard_follows_a_run(tmp_path, open_page):
    run = make_run(tmp_path / "run", steps=5)
    make_run(tmp_path / "other", steps=5)
    (run / "metrics.jsonl").touch()  # the newest is shown first
    with serving(tmp_path) as server:
        page = open_page(server.url)
        page.wait_for_selector("#chart-reward[data-drawn='5']")
        assert page.inner_text("h1") == "run"
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(train_record(6)) + "\n")
        page.wait_for_selector("#chart-reward[data-drawn='6']", state="attached")
        wait_until(lambda: page.input_value("#tail-step") == "6")
        page.check("#runs input[value=other]")
        page.wait_for_selector("#table-speedups")
        wait_until(lambda: page.locator("#chart-reward .legend button").count() == 2)
        page.select_option("#tail-step", "3")
        page.select_option("#samples-step", "3")
        wait_until(lambda: "question 3" in page.inner_text("#samples"))
        page.uncheck("#follow")
        page.fill("#run-filter", "oth")
        wait_until(lambda: page.locator("#runs li:visible").count() == 1)


def test_the_dashboard_needs_its_token(tmp_path, browser):
    make_run(tmp_path / "run", steps=3)
    with serving(tmp_path, host="0.0.0.0") as server:
        page = browser.new_page()
        answer = page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        assert answer.status == 403
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/?token={server.token}")
        page.wait_for_selector("figure.chart")
        page.close()


def test_a_run_of_100000_steps_is_there_in_two_seconds(tmp_path, open_page):
    run = make_run(tmp_path / "run", steps=1)
    lines = [json.dumps(train_record(step)) + "\n" for step in range(1, 1001)]
    with (run / "metrics.jsonl").open("w") as file:
        for thousand in range(100):
            file.writelines(
                line.replace(f'"step": {i}', f'"step": {i + 1000 * thousand}', 1)
                for i, line in enumerate(lines, 1)
            )
    make_run(tmp_path / "short/run")
    with serving(tmp_path / "short") as server:
        usual = seconds_to_open(open_page, server.url)
    seconds = []
    for _ in range(3):
        with serving(tmp_path) as server:
            seconds.append(seconds_to_open(open_page, server.url, times=1))
    assert min(seconds) < max(2, 4 * usual), (
        f"the first view took {seconds} s; a short run's takes {usual} s on this machine"
    )
    with serving(tmp_path) as server:
        page = open_page(server.url)
        live = server.folder.run("run")
        wait_until(lambda: page.get_attribute("body", "data-updates") == "2", 300)  # it is read whole
        assert len(live.data.train) == 100_000
        milliseconds = []
        for step in range(100_001, 100_007):
            updates = page.get_attribute("body", "data-updates")
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(train_record(step)) + "\n")
            wait_until(lambda: page.get_attribute("body", "data-updates") != updates)
            begun = time.thread_time()
            server.folder.view(["run"])
            made = 1e3 * (time.thread_time() - begun)
            milliseconds.append(made + float(page.get_attribute("body", "data-update-milliseconds")))
        assert min(milliseconds) < max(100, 200 * usual), f"an update takes {milliseconds} ms"
