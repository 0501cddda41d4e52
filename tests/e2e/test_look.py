"""The pages of the made-up pipelines in a real Chromium: widths, themes, and what a reader with a
keyboard, a screen reader or an open form needs.
"""

from collections.abc import Iterator
from importlib.resources import files

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from tests.pictures.__main__ import served, write_story
from tests.pictures.lakes import run_id
from tests.pictures.story import TALES, today
from tests.support.bookkeeping import NOON
from tests.support.browser import CUT, LOW_CONTRAST, SPLIT, WIDER, open_browser, prefer
from waldelta.stages.check.reports.entries import ReportEntry, checked_runs
from waldelta.stages.check.reports.page import static_index

pytestmark = pytest.mark.nightly("needs a browser; unit tests read the same pages")

ORDERS = next(tale for tale in TALES if tale.name == "orders")
PAGES = {
    "all pipelines": "/",
    "failing": "/p/billing",
    "lost": "/p/inventory",
    "paused": "/p/loyalty",
    "healthy": "/p/customers",
    "empty": "/p/hr",
    "running": "/p/orders",
    "runs": "/p/orders/runs",
    "run": f"/p/orders/run/consume/{run_id(ORDERS.runs()[-1])}",
    "failed run": f"/p/orders/run/consume/{run_id(today(11, 40))}",
    "expectations": "/p/orders/expectations",
    "table": "/p/orders/table/public.invoices",
    "reconciliation": "/p/orders/reconciliation",
    "waiting": "/p/orders/waiting",
    "reports": "/docs/",
    "reports of a pipeline": "/docs/orders/",
}
each_page = pytest.mark.parametrize("page", PAGES)
AXE = """
const done = arguments[arguments.length - 1];
axe.run().then((found) => done(found.violations.map((one) =>
  [one.id, one.help, one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160))])));
"""
MOST_BYTES = 150_000
SIZE = "return performance.getEntriesByType('navigation')[0].decodedBodySize"
HOSTS = """
return performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)
  .filter((origin) => origin !== location.origin)
"""
ROOM = """
const [card, text, form] = ['.state', '.state > strong', '.state > .act']
  .map((one) => document.querySelector(one).getBoundingClientRect());
return [text.width / card.width, form.width / card.width]
"""
GROUND = "return getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("story")
    write_story(folder)
    with pytest.MonkeyPatch.context() as environment:
        # served() sets them for the process.
        for name in ("AIRFLOW_HOME", "WALDELTA_PIPELINES"):
            environment.setenv(name, str(folder))
        with served(folder) as address:
            yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with open_browser() as opened:
        yield opened


def show(browser: WebDriver, address: str, width: int, scheme: str = "light") -> None:
    """Open a page; what the browser said before is forgotten."""
    prefer(browser, scheme)
    view = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
    browser.get(address)


@each_page
@pytest.mark.parametrize("width", [1400, 900])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_and_can_be_read(browser, base, page, width, scheme):
    browser.get_log("browser")
    show(browser, base + PAGES[page], width, scheme)
    assert browser.execute_script(WIDER) <= 0
    # The grid of checks by run scrolls by itself.
    assert page in ("expectations", "table") or not any(browser.execute_script(CUT))
    assert browser.execute_script(SPLIT) == []
    assert browser.execute_script(SIZE) <= MOST_BYTES
    assert browser.execute_script(HOSTS) == []
    assert browser.execute_script(LOW_CONTRAST) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("width", [1400, 1021, 900])
def test_a_form_with_a_reason_takes_no_width_of_the_cards_text(browser, base, width):
    show(browser, base + PAGES["lost"], width)
    assert min(browser.execute_script(ROOM)) > 0.9
    assert browser.execute_script(WIDER) <= 0


@pytest.mark.parametrize("width", [1400, 900])
def test_the_index_of_reports_on_a_disk_cuts_no_word(browser, tmp_path, width):
    missed = (6 * "carrier refers to a row of public.airlines, which lacks 2 of the values ",)
    names = ("public.airlines", "public.order_line_positions")
    entries = [ReportEntry(NOON, "shop", run_id(NOON), t, 7, 12, missed, (), "x") for t in names]
    page = tmp_path / "index.html"
    page.write_text(static_index("shop", checked_runs(entries)))
    show(browser, page.as_uri(), width)
    assert (browser.execute_script(WIDER) <= 0, browser.execute_script(SPLIT)) == (True, [])


@each_page
def test_axe_finds_nothing(browser, base, page):
    show(browser, base + PAGES[page], 1400)
    # By the driver, which the page's policy for scripts doesn't bind.
    browser.execute_script(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    assert browser.execute_async_script(AXE) == []


def test_a_page_follows_airflows_theme_without_a_reload(browser, base):
    """Another document of the same origin, as Airflow's own pages are, stores the choice."""
    show(browser, f"{base}/p/orders", 1400)
    browser.execute_script("window.isSame = true")
    page, light = browser.current_window_handle, browser.execute_script(GROUND)
    browser.switch_to.new_window("tab")
    other = browser.current_window_handle
    browser.get(f"{base}/docs/")
    try:
        for theme in ("dark", "light"):
            browser.switch_to.window(other)
            browser.execute_script("localStorage.setItem('theme', arguments[0])", theme)
            browser.switch_to.window(page)
            WebDriverWait(browser, 10).until(
                lambda b, is_light=theme == "light": (b.execute_script(GROUND) == light) is is_light
            )
        assert browser.execute_script("return window.isSame")
    finally:
        browser.switch_to.window(other)
        browser.execute_script("localStorage.removeItem('theme')")
        browser.close()
        browser.switch_to.window(page)


def test_an_update_loses_no_fold_and_no_form(browser, base):
    """The page of what waits is updated while a reason is written and a fold is open."""
    show(browser, f"{base}/p/orders/waiting", 1400)
    browser.find_element(By.CSS_SELECTOR, "details summary").click()
    browser.find_element(By.NAME, "reason").send_keys("known")
    browser.execute_script(
        "document.querySelector('h1').textContent = 'old'; document.body.dataset.every = 0.1;"
        " return update()"
    )
    WebDriverWait(browser, 10).until(lambda b: b.find_element(By.TAG_NAME, "h1").text != "old")
    assert browser.find_element(By.NAME, "reason").get_property("value") == "known"
    assert browser.find_element(By.CSS_SELECTOR, "details").get_property("open")


def test_times_count(browser, base):
    show(browser, f"{base}/p/orders", 1400)
    script = "return document.querySelector('dl.facts time').textContent"
    before = browser.execute_script(script)
    WebDriverWait(browser, 10).until(lambda b: b.execute_script(script) != before)
