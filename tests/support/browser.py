"""A real Chromium for the tests of the UI, without a window."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver

# Set where the tests of the UI have to run: without a browser they fail instead of being skipped.
REQUIRED = "WALDELTA_BROWSER"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WINDOW = (1400, 900)


@contextmanager
def open_browser() -> Iterator[WebDriver]:
    """The machine's Chromium, driven by its own chromedriver; nothing is fetched."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = (
            "chromium and chromedriver aren't on PATH (Debian: apt-get install chromium"
            " chromium-driver)"
        )
        if os.environ.get(REQUIRED):
            pytest.fail(missing)
        pytest.skip(missing)
    options = Options()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-proxy-server",
        f"--window-size={_WINDOW[0]},{_WINDOW[1]}",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:  # Chromium's sandbox refuses root; the pages are our own
        options.add_argument("--no-sandbox")
        options.add_argument("--disable-dev-shm-usage")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield opened
    finally:
        opened.quit()


def prefer(browser: WebDriver, scheme: str) -> None:
    """Have the reader prefer ``light`` or ``dark``."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def screenshot(browser: WebDriver, folder: Path, name: str) -> Path:
    """The whole page as a picture, for whoever wants to look at it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    browser.save_screenshot(str(path))
    return path


# Texts whose contrast is below WCAG's 4.5 (3 for large ones), in the browser's own colours.
LOW_CONTRAST = """
const parse = c => { const m = c.match(/[\\d.]+/g).map(Number);
                     // A mixed colour has parts of 1, others have parts of 255.
                     const part = c.startsWith('color(') ? 255 : 1;
                     return [m[0] * part, m[1] * part, m[2] * part, m.length > 3 ? m[3] : 1]; };
const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
const light = c => { const f = v => { v /= 255;
                       return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4); };
                     return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
const page = matchMedia('(prefers-color-scheme: dark)').matches
  ? [18, 18, 18, 1] : [255, 255, 255, 1];
const ground = e => { const up = [];
                      for (; e; e = e.parentElement)
                        up.push(parse(getComputedStyle(e).backgroundColor));
                      return up.reverse().reduce((below, c) => over(c, below), page); };
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const e = walk.currentNode.parentElement,
    text = walk.currentNode.textContent.trim(), s = getComputedStyle(e);
  if (!text || !e.getClientRects().length || s.visibility === 'hidden'
      || e.closest('.visually-hidden, .skip, svg')) continue;
  const back = ground(e), a = light(over(parse(s.color), back)), b = light(back);
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const large = parseFloat(s.fontSize) >= 24
    || (parseFloat(s.fontSize) >= 18.66 && s.fontWeight >= 700);
  if (ratio < (large ? 3 : 4.5))
    found.push([text.slice(0, 60), ratio.toFixed(2), s.color, back.join(',')]);
}
return found;
"""
# How far the page is wider than the window, in pixels: tables scroll by themselves, pages don't.
WIDER = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
# How much of each table is beyond the edge of what it scrolls in.
CUT = "return [...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
# Seconds from the click until everything was loaded.
LOADED = "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd / 1000"
# Words of up to 30 letters and digits that are on two lines, with what they are part of.
SPLIT = """
const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const range = document.createRange();
while (walk.nextNode()) {
  const node = walk.currentNode, parent = node.parentElement;
  if (parent.closest('pre, svg, .visually-hidden, .skip') || !parent.checkVisibility()) continue;
  for (const word of node.data.matchAll(/[\\p{L}\\p{N}]{2,30}/gu)) {
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1)
      found.push(`${word[0]} of ${parent.textContent.trim().slice(0, 80)}`);
  }
}
return found;
"""
