"""A real browser opens the report offline, on a phone, in the dark and on paper."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from oneround.report import report


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.fail("the report is tested in a browser: apt-get install chromium chromium-driver", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("--headless=new", "--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def pages(reported_run: Path, reported_sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    run_dir = tmp_path_factory.mktemp("pages")
    (run_dir / "run.html").write_text(report([reported_run]), encoding="utf-8")
    (run_dir / "sweep.html").write_text(report([reported_sweep]), encoding="utf-8")
    return {"run": run_dir / "run.html", "sweep": run_dir / "sweep.html"}


def look(
    browser: webdriver.Chrome, page: Path, *, width: int = 1200, scheme: str = "light", media: str = "screen"
) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(page.as_uri())


def requested(browser: webdriver.Chrome) -> list[str]:
    """Every address the browser asked for since it was last looked at."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_it_opens_offline_without_a_word(browser: webdriver.Chrome, pages: dict[str, Path], name: str) -> None:
    browser.get("about:blank")
    browser.get_log("browser"), requested(browser)
    look(browser, pages[name])
    assert browser.get_log("browser") == []
    assert [url for url in requested(browser) if not url.startswith("data:")] == [pages[name].as_uri()]
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return document.scripts.length") == 0


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_charts_are_drawn_and_named(browser: webdriver.Chrome, pages: dict[str, Path], name: str) -> None:
    look(browser, pages[name])
    charts: list[dict[str, Any]] = browser.execute_script(
        "return [...document.querySelectorAll('figure > svg, figure > .scroll > svg')].map(chart => ({"
        "width: chart.getBoundingClientRect().width, title: chart.querySelector('title')?.textContent,"
        "told: chart.querySelector('desc')?.textContent, role: chart.getAttribute('role'), folded: !!chart.closest('details'),"
        "data: chart.closest('figure').querySelectorAll('details table tbody tr').length}))"
    )
    assert len(charts) > 15
    for chart in charts:
        assert chart["title"] and len(chart["told"]) > 20 and chart["role"] == "img" and chart["data"]
        assert chart["folded"] or chart["width"] > 200
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    pictures = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == "image"]
    assert pictures and all(pictures), "what a screen reader is told"


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_phone_does_not_scroll_sideways(browser: webdriver.Chrome, pages: dict[str, Path], name: str) -> None:
    look(browser, pages[name], width=390)
    browser.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    smallest = browser.execute_script(
        "return Math.min(...[...document.querySelectorAll('.charts:not(.small) > figure:not(.wide) > svg text:not(.small)')]"
        ".map(text => parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)))"
    )
    assert smallest >= 9, "letters in pixels"


def test_dark_is_dark_and_paper_is_white(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    def colours() -> list[str]:
        values: list[str] = browser.execute_script(
            "const of = (what, key) => getComputedStyle(document.querySelector(what))[key];"
            "return [of('body', 'backgroundColor'), of('body', 'color'), of('.line', 'stroke'), of('svg text', 'fill')]"
        )
        return values

    look(browser, pages["run"])
    light = colours()
    look(browser, pages["run"], scheme="dark")
    assert all(one != other for one, other in zip(light, colours(), strict=True))
    look(browser, pages["run"], scheme="dark", media="print")
    assert colours() == light


def test_paper_shows_what_is_folded(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    def visible(what: str) -> bool:
        return bool(browser.execute_script(f"return document.querySelector('{what}').checkVisibility({{contentVisibilityAuto: true}})"))  # fmt: skip

    look(browser, pages["sweep"])
    assert not visible("details.run section")
    look(browser, pages["sweep"], media="print")
    assert visible("details.run section")
    assert not visible("details.data")
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000


def test_the_keyboard_is_enough(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    look(browser, pages["run"])
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    skip = browser.switch_to.active_element
    assert skip.text == "Skip to the content"
    skip.send_keys(Keys.ENTER)
    assert browser.execute_script("return document.activeElement.id") == "content"
    summary = browser.find_element(By.CSS_SELECTOR, "details.data > summary")
    browser.execute_script("arguments[0].focus()", summary)
    assert browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", summary) != "none"
    summary.send_keys(Keys.ENTER)
    assert browser.execute_script("return arguments[0].parentElement.open", summary)
    summary.send_keys(Keys.TAB)
    assert browser.execute_script("return document.activeElement.className") == "scroll", "a wide table can be scrolled"
