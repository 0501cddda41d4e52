"""The pages in Airflow's UI with a real Chromium and a real Airflow."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from deltalake import DeltaTable
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.expected_conditions import (
    element_to_be_clickable,
    frame_to_be_available_and_switch_to_it,
    presence_of_element_located,
)
from selenium.webdriver.support.wait import WebDriverWait

from demo.airflow_client import DagRun
from demo.stack import Stack
from tests.e2e.shop import Shop, change, make_shop
from tests.support.browser import CUT, LOADED, LOW_CONTRAST, WIDER, open_browser, prefer, screenshot
from tests.support.machine_load import times_longer
from waldelta.lake import Lake
from waldelta.lake.ledger import Decision, Decisions, Ledger

pytestmark = [
    pytest.mark.nightly("needs a browser; unit tests read the same pages"),
    pytest.mark.long("starts Airflow's stack and a browser, and walks through a morning"),
]

PICTURES = Path(".waldelta/screenshots")
FAILING = """
expectations:
  - type: expect_column_values_to_be_in_set
    kwargs: {column: note, value_set: [never]}
    severity: critical
"""
SET_ASIDE = """
expectations:
  - type: expect_column_values_to_not_match_regex
    kwargs: {column: name, regex: ^bad}
    severity: critical
    gate: quarantine
"""
PAGES = {
    "pipelines": "/",
    "pipeline": "/p/browsed",
    "runs": "/p/browsed/runs",
    "run": "/p/browsed/run/any/{run}",
    "expectations": "/p/browsed/expectations",
    "table": "/p/browsed/table/public.orders",
    "waiting": "/p/browsed/waiting",
    "quarantined row": "/p/browsed/waiting/row/{row}",
    "reconciliation": "/p/browsed/reconciliation",
    "reports": "/docs/",
}
each_page = pytest.mark.parametrize("page", PAGES)


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def browsed(browser: WebDriver, stack: Stack) -> Iterator[Shop]:
    """A good run, a failed check, a row set aside, a row tampered with; logged in."""
    for shop in make_shop(stack, "browsed", "waldelta_spark"):
        change(shop)
        shop.run("cdc")
        (shop.suites / "public.orders.yml").write_text(FAILING)
        (shop.suites / "public.customers.yml").write_text(SET_ASIDE)
        change(shop)
        shop.source.execute("insert into customers values (11, 'bad customer')")
        shop.runs.append(shop.client.wait("browsed_cdc", shop.client.trigger("browsed_cdc")))
        shop.client.wait_for_dags(["browsed_reconcile", "browsed_decide", "browsed_resync"])
        shop.client.unpause("browsed_reconcile")  # the others are unpaused by their pages
        tamper(shop)
        log_in(browser, stack)
        yield shop


def tamper(shop: Shop) -> None:
    """Another program changes a target, which a reconciliation finds."""
    customers = DeltaTable(f"{shop.root}/public/customers")
    customers.update(updates={"name": "'tampered'"}, predicate="id = 3")
    compared = shop.client.wait("browsed_reconcile", shop.client.trigger("browsed_reconcile"))
    assert compared.state == "failed"


def log_in(browser: WebDriver, stack: Stack) -> None:
    browser.get(stack.url)
    user = wait(browser).until(presence_of_element_located((By.NAME, "username")))
    user.send_keys(stack.user)
    browser.find_element(By.NAME, "password").send_keys(stack.password, Keys.RETURN)
    wait(browser).until(presence_of_element_located((By.CSS_SELECTOR, "a[aria-label=Home]")))


def wait(browser: WebDriver, timeout_s: float = 30) -> WebDriverWait:
    """Pages with a run under way reload by themselves, which takes their elements away."""
    return WebDriverWait(browser, timeout_s, ignored_exceptions=[StaleElementReferenceException])


def failed_run(shop: Shop) -> DagRun:
    return shop.runs[-1]


def address(shop: Shop, page: str) -> str:
    chosen = {"run": failed_run(shop).run_id}
    if "{row}" in PAGES[page]:
        chosen["row"] = quarantined_row(shop).id
    return (
        f"{shop.stack.url}/waldelta{PAGES[page].format(**{k: quote(v) for k, v in chosen.items()})}"
    )


def quarantined_row(shop: Shop) -> Decision:
    """The customer that the gate held back, whatever was decided since."""
    return Decisions(Lake(shop.root)).rows("public.customers", 1)[-1]


def text_of(browser: WebDriver) -> str:
    """What the page shows, read in one command: between two, the page can reload."""
    return shown(browser, "main")


def shown(browser: WebDriver, selector: str) -> str:
    """The text of the first element that CSS *selector* finds, once there is one."""
    script = "return document.querySelector(arguments[0])?.innerText"
    return wait(browser).until(lambda b: b.execute_script(script, selector))


def started_run(browser: WebDriver) -> str:
    """The id of the DAG run that the page says it has started."""
    return shown(browser, "[role=status] code").strip()


def follow(browser: WebDriver, link: str) -> None:
    """Click a link and wait for its page; the words that only a screen reader gets count."""
    found = (By.XPATH, f"//a[contains(normalize-space(), '{link}')]")
    wanted = wait(browser).until(element_to_be_clickable(found))
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", wanted)
    was = browser.execute_script("return location.href")
    wanted.click()
    wait(browser).until(lambda b: b.execute_script("return location.href") != was)


def test_the_morning_walk_leads_from_the_navigation_to_the_rows_that_failed(browser, browsed):
    """From Airflow's home to the table's report, by clicks alone."""
    browser.get(browsed.stack.url)
    entry = (By.CSS_SELECTOR, "nav a[aria-label=Pipelines], a[aria-label=Pipelines]")
    wait(browser).until(element_to_be_clickable(entry)).click()
    wait(browser).until(frame_to_be_available_and_switch_to_it((By.TAG_NAME, "iframe")))
    wait(browser).until(presence_of_element_located((By.LINK_TEXT, "browsed")))
    assert "problem" in text_of(browser)
    screenshot(browser, PICTURES, "walk-1-pipelines")
    follow(browser, "browsed")
    assert "public.orders" in text_of(browser)
    screenshot(browser, PICTURES, "walk-2-pipeline")
    browser.get(address(browsed, "run"))
    seen = text_of(browser)
    assert "QualityFailed" in seen
    assert "public.orders" in seen
    follow(browser, "report of public.orders")
    report = browser.find_element(By.TAG_NAME, "body").text
    assert "public.orders" in report
    assert "values must belong to this set: never" in report
    screenshot(browser, PICTURES, "walk-3-report")


def test_a_dag_run_has_a_tab_with_what_it_changed(browser, browsed):
    run = failed_run(browsed)
    browser.get(
        f"{browsed.stack.url}/dags/{run.dag_id}/runs/{quote(run.run_id)}/plugin/waldelta-run"
    )
    wait(browser).until(frame_to_be_available_and_switch_to_it((By.TAG_NAME, "iframe")))
    wait(browser).until(presence_of_element_located((By.TAG_NAME, "h1")))
    assert run.run_id in text_of(browser)
    assert re.search(r"landed\s+[\d,]+ change", text_of(browser).lower())


@each_page
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser, browsed, page, scheme):
    """WCAG's contrast for each text; and the browser has nothing to complain about."""
    browser.get_log("browser")
    prefer(browser, scheme)
    browser.get(address(browsed, page))
    screenshot(browser, PICTURES, f"{page}-{scheme}")
    assert browser.execute_script(LOW_CONTRAST) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@each_page
@pytest.mark.parametrize("width", [1400, 700])
def test_no_page_is_wider_than_its_window(browser, browsed, page, width):
    browser.set_window_size(width, 900)
    browser.get(address(browsed, page))
    wider = browser.execute_script(WIDER)
    browser.set_window_size(1400, 900)
    assert wider <= 0


@each_page
def test_nothing_is_cut_in_airflows_frame(browser, browsed, page):
    """All columns of all tables at once, in a window of 1,000 pixels."""
    browser.set_window_size(1000, 900)
    page_address = address(browsed, page).removeprefix(f"{browsed.stack.url}/waldelta/")
    browser.get(f"{browsed.stack.url}/plugin/waldelta/{page_address}")
    wait(browser).until(frame_to_be_available_and_switch_to_it((By.TAG_NAME, "iframe")))
    wait(browser).until(presence_of_element_located((By.TAG_NAME, "h1")))
    cut, own = browser.execute_script(CUT), browser.execute_script("return location.href")
    screenshot(browser, PICTURES, f"{page}-frame-1000")
    browser.set_window_size(1400, 900)
    assert own == address(browsed, page)
    assert not any(cut)


def test_a_run_is_started_and_followed_into_airflow(browser, browsed):
    """By the button of the pipeline's page in Airflow's frame."""
    expected = "success" if browsed.is_equal() else "failed"
    browser.get(f"{browsed.stack.url}/plugin/waldelta/p/browsed")
    wait(browser).until(frame_to_be_available_and_switch_to_it((By.TAG_NAME, "iframe")))
    button = (By.XPATH, "//button[normalize-space()='Run now browsed_reconcile']")
    wait(browser).until(element_to_be_clickable(button)).click()
    running = wait(browser).until(element_to_be_clickable((By.PARTIAL_LINK_TEXT, "reconcile")))
    assert browser.find_elements(By.CSS_SELECTOR, "body[data-every='5']")
    screenshot(browser, PICTURES, "started")
    running.click()
    browser.switch_to.default_content()
    wait(browser).until(lambda b: "/dags/browsed_reconcile/runs/manual__" in b.current_url)
    run_id = unquote(browser.current_url.split("/runs/")[1].split("/")[0].split("?")[0])
    assert browsed.client.wait("browsed_reconcile", run_id).state == expected


@each_page
def test_a_page_is_there_within_a_second(browser, browsed, page):
    """The best of five, as on a quiet machine of usual speed."""
    seconds = []
    for _ in range(5):
        browser.get(address(browsed, page))
        seconds.append(browser.execute_script(LOADED) / times_longer())
    assert 0 < min(seconds) < 1, (seconds, times_longer())


@each_page
def test_a_page_works_by_keyboard(browser, browsed, page):
    """The first Tab skips the navigation, and every link can be reached."""
    browser.get(address(browsed, page))
    # What is folded can be reached once it is unfolded.
    links = browser.execute_script(
        "return [...document.querySelectorAll('a[href], :is(button, input, select):enabled')]"
        ".filter((link) => link.checkVisibility({ contentVisibilityAuto: true })).length"
    )
    browser.switch_to.active_element.send_keys(Keys.TAB)
    first = browser.switch_to.active_element
    assert first.text == "Skip to the content"
    assert first.rect["y"] >= 0
    reached = 1
    for _ in range(links - 1):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        focused = browser.execute_script(
            "const e = document.activeElement, s = getComputedStyle(e);return e === document.body ?"
            " null : s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0"
        )
        if focused is None:
            break
        assert focused, browser.switch_to.active_element.text
        reached += 1
    assert reached >= links - 1
    browser.get(address(browsed, page))
    browser.switch_to.active_element.send_keys(Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.RETURN)
    assert browser.execute_script("return document.activeElement.id") == "content"


def test_a_paused_dag_is_unpaused_where_its_pipeline_is_shown(browser, browsed):
    browsed.client.pause("browsed_maintenance")
    browser.get(address(browsed, "pipeline"))
    browser.find_element(
        By.XPATH, "//button[normalize-space()='Unpause browsed_maintenance']"
    ).click()
    wait(browser).until(
        presence_of_element_located(
            (By.XPATH, "//button[normalize-space()='Run now browsed_maintenance']")
        )
    )


def press(browser: WebDriver, button: str) -> None:
    browser.find_element(By.XPATH, f"//button[starts-with(normalize-space(), '{button}')]").click()


def test_a_quarantined_row_is_retried_and_discarded_and_the_target_repaired(browser, browsed):
    """In this order: a repair waits for decisions on the rows in quarantine."""
    retry_rows(browser, browsed)
    discard_row(browser, browsed)
    repair_target(browser, browsed)
    repair_by_the_card(browser, browsed)


def retry_rows(browser: WebDriver, browsed: Shop) -> None:
    """The page says what keeps its buttons; a row that still fails stays."""
    browser.get(address(browsed, "waiting"))
    assert "The DAG browsed_decide is paused" in text_of(browser)
    disabled = "button[name=action]:disabled"
    assert len(browser.find_elements(By.CSS_SELECTOR, disabled)) == 3
    screenshot(browser, PICTURES, "quarantine-paused")
    press(browser, "Unpause")
    wait(browser).until(lambda b: "is paused" not in text_of(b))
    assert not browser.find_elements(By.CSS_SELECTOR, disabled)
    press(browser, "Retry all rows")
    run_id = started_run(browser)
    wait(browser).until(lambda b: len(b.find_elements(By.CSS_SELECTOR, disabled)) == 3)
    assert "is retrying rows" in text_of(browser)
    screenshot(browser, PICTURES, "quarantine-under-way")
    assert browsed.client.wait("browsed_decide", run_id).state == "success"
    # The page reloads by itself.
    wait(browser).until(lambda b: "succeeded" in text_of(b))
    seen = text_of(browser)
    assert "retried, still fails" in seen
    screenshot(browser, PICTURES, "quarantine-judged")


def discard_row(browser: WebDriver, browsed: Shop) -> None:
    """After a look at its values; then the page says who did it, and why."""
    waiting = address(browsed, "waiting")
    browser.get(waiting)
    follow(browser, "messages")
    assert "bad customer" in text_of(browser)
    browser.get(waiting)
    browser.find_element(By.CSS_SELECTOR, "form:has(button[value=discard]) input[name=id]").click()
    browser.find_element(By.NAME, "reason").send_keys("no customer of ours")
    press(browser, "Discard")
    assert browsed.client.wait("browsed_decide", started_run(browser)).state == "success"
    browser.get(waiting)
    seen = text_of(browser)
    assert "Discard selected rows" not in seen
    assert "no customer of ours" in seen
    assert browsed.stack.user in seen
    screenshot(browser, PICTURES, "discarded")


def repair_target(browser: WebDriver, browsed: Shop) -> None:
    """Both values are shown; afterwards the target is the source's again."""
    assert not browsed.is_equal()
    browser.get(f"{browsed.stack.url}/plugin/waldelta")
    wait(browser).until(frame_to_be_available_and_switch_to_it((By.TAG_NAME, "iframe")))
    follow(browser, "browsed")
    follow(browser, "reconciliation")
    seen = text_of(browser)
    assert "customer 3" in seen
    assert "tampered" in seen
    screenshot(browser, PICTURES, "repair-1")
    press(browser, "Repair")
    run = browsed.client.wait("browsed_reconcile", started_run(browser))
    last = Ledger(Lake(browsed.root)).last_run()
    assert run.state == "success", last and last.result
    browsed.source.execute("delete from customers where id = 11")  # which was discarded
    assert browsed.is_equal()
    browser.refresh()
    browser.switch_to.default_content()
    browser.get(address(browsed, "reconciliation"))
    assert "repaired" in text_of(browser)
    screenshot(browser, PICTURES, "repair-2")


def repair_by_the_card(browser: WebDriver, browsed: Shop) -> None:
    """The button of the table's page repairs that table alone."""
    # A repair waits for the run that reads the row's end.
    browsed.client.wait("browsed_cdc", browsed.client.trigger("browsed_cdc"))
    tamper(browsed)
    browser.get(f"{browsed.stack.url}/waldelta/p/browsed/table/public.customers")
    assert "different from the source" in text_of(browser)
    press(browser, "Repair public.customers")
    run = browsed.client.wait("browsed_reconcile", started_run(browser))
    last = Ledger(Lake(browsed.root)).last_run()
    assert run.state == "success", last and last.result
    assert browsed.is_equal()
    screenshot(browser, PICTURES, "repaired-by-the-card")


def test_a_lost_slot_is_recreated_by_the_pipelines_button(browser, browsed):
    """Which unpauses the DAG first, and then wants a reason."""
    for suite in browsed.suites.glob("*.yml"):
        suite.unlink()  # A resync fails by the expectations that fail, too.
    browsed.source.execute("select pg_drop_replication_slot('browsed_cdc')")
    change(browsed)
    run = browsed.client.wait("browsed_cdc", browsed.client.trigger("browsed_cdc"))
    assert run.state == "failed"
    browser.get(address(browsed, "pipeline"))
    assert "The slot lost changes" in text_of(browser)
    press(browser, "Unpause browsed_resync")
    reason = wait(browser).until(presence_of_element_located((By.NAME, "reason")))
    screenshot(browser, PICTURES, "slot-lost")
    press(browser, "Recreate the slot")
    # The browser sends no form without the reason.
    assert browser.execute_script("return document.activeElement.name") == "reason"
    reason.send_keys("the slot was dropped by mistake")
    press(browser, "Recreate the slot")
    running = (By.CSS_SELECTOR, "a[href*='/dags/browsed_resync/runs/manual__']")
    href = wait(browser).until(presence_of_element_located(running)).get_attribute("href")
    run_id = unquote(href.rpartition("/")[2])
    assert browsed.client.wait("browsed_resync", run_id).state == "success"
    assert browsed.is_equal()
    browser.get(address(browsed, "pipeline"))
    assert "lost changes" not in text_of(browser)


def test_who_isnt_logged_in_sees_nothing(stack, browsed):
    with open_browser() as stranger:
        stranger.get(f"{stack.url}/waldelta/p/browsed")
        deadline = time.monotonic() + 10
        while "public.orders" not in stranger.page_source and time.monotonic() < deadline:
            if "login" in stranger.current_url or "Not authenticated" in stranger.page_source:
                break
        assert "public.orders" not in stranger.page_source
