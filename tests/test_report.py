"""The report: what it shows is what was measured, nothing from outside gets through, and a real browser opens it offline."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from typer.testing import CliRunner

from oneround.cli import app
from oneround.compare import compare
from oneround.data import Dataset, dataset_from_arrays
from oneround.diagnose import diagnose
from oneround.errors import RecipeError, RunError
from oneround.finished import find_runs
from oneround.reading import load, read_yaml
from oneround.report import report
from oneround.report.again import command
from oneround.report.charts import Bar, Series, bar_chart, line_chart
from oneround.report.heat import heat_map
from oneround.report.record import read
from oneround.report.scales import scale_for
from oneround.simulate import run

HOSTILE = "<script>alert(1)</script>"
VOID = {"meta", "link"}


class Page(HTMLParser):
    """An HTML file taken apart; refuses one whose elements do not close as they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.cell = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.cell = True

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.cell:
            self.tables[-1][-1][-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def rows(self, *starts: str) -> list[list[str]]:
        """Table rows that begin like this."""
        return [row for table in self.tables for row in table if row[: len(starts)] == list(starts)]

    def row(self, *starts: str) -> list[str]:
        rows = self.rows(*starts)
        assert rows, starts
        return rows[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, digits: Dataset) -> Path:
    """A real run with λ, three clients and three snapshots, whose first class has a hostile name."""
    train, test = digits.train, digits.test
    data = dataset_from_arrays(
        "arrays", train.pixels.numpy().transpose(0, 2, 3, 1)[:400], train.labels.numpy()[:400],
        test.pixels.numpy().transpose(0, 2, 3, 1)[:100], test.labels.numpy()[:100], class_names=(HOSTILE, *map(str, range(1, 10))),
    )  # fmt: skip
    changes = {
        "data": "arrays", "model.encoder": {"kind": "cnn", "width": 4}, "partition.clients": 3, "partition.alpha": 0.3,
        "training.epochs": 3, "training.batch_size": 64, "snapshots": 1, "trace.every": 1,
        "fusion": ["iffi", "average", "typicality-gated"], "local.workers": 1,
    }  # fmt: skip
    place = tmp_path_factory.mktemp("report") / "run"
    run(load("v12", changes.items()), place, data=data)
    return place


def copy_of(folder: Path, place: Path, method: str, partition: int, gain: float = 0.0) -> Path:
    """The same run under another name, on another partition, a little better."""
    shutil.copytree(folder, place)
    recipe = (place / "recipe.yaml").read_text()
    (place / "recipe.yaml").write_text(
        recipe.replace("method: etf-attenuated", f"method: {method}").replace("partition: 1\n", f"partition: {partition}\n")
    )  # fmt: skip
    told = json.loads((place / "result.json").read_text())
    told["partition"] = f"{partition:064d}"
    for each in told["rules"].values():
        each["accuracy"] += gain
    (place / "result.json").write_text(json.dumps(told))
    return place


@pytest.fixture(scope="module")
def sweep(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on four partitions; the second is better by about five points, every time."""
    place = tmp_path_factory.mktemp("sweep")
    for partition in range(1, 5):
        copy_of(folder, place / f"a{partition}", "plain", partition, 0.001 * partition)
        copy_of(folder, place / f"b{partition}", "better", partition, 0.05 + 0.002 * partition)
    return place


# --- what it says ----------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_result(folder: Path) -> None:
    told = json.loads((folder / "result.json").read_text())
    page = Page(report([folder]))
    for name, score in told["rules"].items():
        shown = [f"{100 * value:.2f}" if value is not None else "–" for value in score["per_class"]]
        assert page.rows(name, f"{100 * score['accuracy']:.2f}", *shown)
    matrices = [_matrix(table) for table in page.tables if table[0][0].startswith("image shows")]
    assert matrices == [told["rules"]["iffi"]["confusion"], *(score["confusion"] for score in told["clients"].values())]
    assert page.row("down (broadcasts)")[1] == f"{told['bytes_down']:,}"
    assert page.row("up (uploads)")[1] == f"{told['bytes_up']:,}"
    counts = json.loads((folder / "partition.json").read_text())["class_counts"]
    for number, row in enumerate(counts):
        assert page.row(f"client_00{number}", *map(str, row))


def _matrix(table: list[list[str]]) -> list[list[int]]:
    return [[int(cell) for cell in row[1:]] for row in table[1:]]


def test_curves_are_those_of_the_log(folder: Path) -> None:
    record, page = read(folder), Page(report([folder]))
    for epoch in (1, 2, 3):
        shown = [f"{record.curves[rule][epoch]:.2f}" for rule in ("iffi", "average", "typicality-gated")]
        assert page.row(str(epoch), *shown)
        raw = [f"{record.trace('lambda_raw')[client][epoch]:.4g}" for client in record.clients]
        assert page.row(str(epoch), *raw)


def test_every_part_is_there_and_every_chart_has_words_and_data(folder: Path) -> None:
    page = Page(report([folder]))
    for heading in ("Result", "Findings", "Who holds what", "Accuracy over local training", "Weight of alignment λ", "Loss terms",
                    "Gradient cosines", "Classes: fused model and clients", "Communication", "Environment and how to repeat it"):  # fmt: skip
        assert heading in page.texts
    figures = page.count("figure")
    assert figures > 15
    assert page.count("desc") == page.count("figcaption") == figures
    assert page.count("h1") == 1
    for text in ("Schedule s(p)", "Loss terms of client_002", "Confusion of client_000", "The resolved recipe"):
        assert text in page.texts
    assert len(report([folder])) < 1_500_000


def test_what_comes_from_files_is_escaped(folder: Path) -> None:
    text = report([folder])
    assert "<script" not in text
    assert HOSTILE in Page(text).text
    assert "script" not in {name for name, _ in Page(text).tags}
    assert "http" not in re.sub("http-equiv", "", text), "no address of anything"


def test_a_run_that_is_not_finished_says_so(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "half"
    shutil.copytree(folder, place)
    (place / "result.json").unlink()
    lines = (place / "metrics.jsonl").read_text().splitlines()
    (place / "metrics.jsonl").write_text(
        "\n".join(line for line in lines if json.loads(line)["epoch"] < 3) + '\n{"torn'
    )
    page = Page(report([place]))
    assert "Not finished" in page.texts
    assert f"oneround run {place} --resume" in page.texts
    assert "Classes: fused model and clients" not in page.texts
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "recipe.yaml", bare)
    assert "Not finished" in Page(report([bare])).texts


def test_the_command_gives_the_same_recipe(folder: Path) -> None:
    recipe = load("v12", [("training.epochs", 7), ("alignment.weight.rate", 0.2), ("fusion", ["iffi", "average"])])
    told = command(recipe)
    assert told is not None
    assert told.startswith("oneround run etf-attenuated --set")
    assert "training.epochs=7" in told
    assert command(load("v12", [("method", "mine")])) is None
    page = Page(report([folder]))
    shown = next(text for text in page.texts if text.startswith("method: etf-attenuated"))
    assert read_yaml(shown, "recipe") == read(folder).recipe.plain()


def test_a_sweep_has_the_verdicts_of_compare(sweep: Path) -> None:
    page = Page(report([sweep], "plain"))
    (group,) = compare(find_runs([sweep]), "plain")
    verdict = group.comparisons["better · iffi"].verdict(1.0)
    assert "better by" in verdict
    assert page.row("better")[-1] == verdict
    assert f" against plain: {verdict}" in page.texts
    assert page.row("plain")[-1] == "baseline"
    assert any("Told in full: 2 of 8 runs" in text for text in page.texts)
    for name in ("a1", "b4"):
        assert any("finished" in row for row in page.rows(name))


def test_a_sweep_of_one_method_compares_its_rules(sweep: Path) -> None:
    page = Page(report([sweep / "a1", sweep / "a2"]))
    assert "typicality-gated" in {row[0].split(" · ")[-1] for table in page.tables for row in table}
    assert any(row[-1] == "baseline" for table in page.tables for row in table)


def test_a_sweep_under_way_is_reported(sweep: Path, tmp_path: Path) -> None:
    place = tmp_path / "under_way"
    shutil.copytree(sweep, place)
    (place / "b3" / "result.json").unlink()
    page = Page(report([place]))
    assert any("epoch 3 of 3" in row for row in page.rows("b3"))
    assert any("only partitions that all have are compared" in text for text in page.texts)
    for name in ("a1", "a2", "b4"):
        (place / name / "result.json").unlink()
    assert Page(report([place / "a3", place / "b1"])), "nothing in common is no reason to fail"


def test_mistakes_are_one_line(sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        report([tmp_path / "nowhere"])
    with pytest.raises(RunError, match="no run in"):
        report([tmp_path])
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(RunError, match=r"kept\.json: a file; a report needs run folders"):
        report([tmp_path / "kept.json"])
    with pytest.raises(RecipeError, match="--baseline nobody"):
        report([sweep], "nobody")


# --- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(("result.json", "rules", value) for value in ([], {}, {"iffi": {}})),
        *(("result.json", "rules.iffi.accuracy", value) for value in (math.nan, "0.5", 7)),
        ("result.json", "rules.iffi.confusion", "x"),
        ("result.json", "rules.iffi.confusion", [[1]]),
        ("result.json", "clients.client_000.per_class", None),
        ("result.json", "remarks", None),
        ("result.json", "partition", 3),
        ("environment.json", "packages", None),
        *(("partition.json", "class_counts", value) for value in ([[1]], "abc", [], [[1, 2], [3]])),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_line(folder: Path, tmp_path: Path, name: str, key: str, value: Any) -> None:
    shutil.copytree(folder, tmp_path / "run")
    told = json.loads((tmp_path / "run" / name).read_text())
    *path, last = key.split(".")
    node = told
    for step in path:
        node = node[step]
    node[last] = value
    (tmp_path / "run" / name).write_text(json.dumps(told))
    assert name in said("report", tmp_path / "run")
    assert (name in said("compare", tmp_path / "run")) == (name != "partition.json")
    assert diagnose(tmp_path / "run").run.counts.keys() == diagnose(folder).run.counts.keys()


def said(command: str, place: Path) -> str:
    """What a command refuses a folder with: one line that names the file, what is wrong and what to do."""
    done = CliRunner().invoke(app, [command, str(place), "--out", str(place / "out.md")])
    if done.exit_code == 0:
        return ""
    assert isinstance(done.exception, RunError), done.exception
    assert re.fullmatch(r"\S+\.json: damaged \(.*\); remove it( and make it again with .*)?", str(done.exception))
    return str(done.exception)


def test_damaged_lines_of_the_log_are_skipped(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    _, *lines = [json.loads(line) for line in log.read_text().splitlines()]  # the first is lost
    without = {
        "epoch": ["event", "client", "epoch", "gradients"],
        "client": ["client"],
        "snapshot": ["accuracy", "rule"],
    }
    for kind, keys in without.items():
        whole = [line for line in lines if line.get("event") == kind and set(keys) <= line.keys()]
        for key, line in zip(keys, whole, strict=False):
            line.pop(key)
    next(line for line in lines if "gradients" in line)["gradients"] = {"features": {}}
    next(line for line in lines if "lambda_raw" in line)["lambda_raw"] = "much"
    log.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + b"\xff\xfe\n[]\n3\n")
    for words in (
        ["report"],
        ["compare"],
        *(["compare", "--layout", layout] for layout in ("lambda", "rounds", "peaks", "gradients")),
    ):
        done = CliRunner().invoke(app, [*words, str(tmp_path / "run"), "--out", str(tmp_path / "out.md")])
        assert done.exit_code == 0, (words, done.exception)
    assert diagnose(tmp_path / "run").looked == diagnose(folder).looked
    log.write_text("")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "out.md")]).exit_code == 0


def test_charts_hold_hard_values() -> None:
    odd = {1: float("inf"), 2: 1e-9, 3: 1e12, 4: 0.0, 5: float("nan"), 6: None}
    text = line_chart("odd", [Series("a", odd), Series("none", {})], "epoch", "λ", log=True)
    assert "1 value of 0 or less" in text
    assert "2 values not finite" in text
    assert "nan" not in "".join(re.findall(r' (?:d|x|y|points)="[^"]*"', text))
    for drawn in (
        line_chart("flat", [Series("a", {1: 0.0, 2: 0.0})], "epoch", "loss"),
        line_chart("one", [Series("a", {4: 3.0})], "epoch", "loss"),
        line_chart("nothing", [], "epoch", "loss"),
        heat_map("many", list(map(str, range(120))), list(map(str, range(120))), [[3] * 120] * 120, ("a", "b"), "told"),
        heat_map("empty", ["a"], ["b"], [[None]], ("a", "b"), "told"),
        bar_chart("both ways", [Bar("a", -3.0, margin=1.0, dots=(-4.0, 2.0)), Bar("b", 0.0)], "points"),
    ):
        assert Page(drawn).count("svg")


def test_scales_end_on_round_numbers() -> None:
    assert scale_for([0.3, 9.2], 0, 100).ticks == [0, 2, 4, 6, 8, 10]
    assert scale_for([0.003, 900], 0, 100, log=True).ticks == [0.01, 0.1, 1, 10, 100, 1000]
    assert scale_for([3.0], 0, 100, log=True).takes(0.0) is False


def test_colours_can_be_read_in_light_and_dark() -> None:
    style = (Path(__file__).parent.parent / "src/oneround/report/style.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in style.split("@media screen")[:2])
    for scheme in (light, dark):
        for name, least in (("ink", 7), ("soft", 4.5), ("link", 4.5), *((f"c{at}", 3) for at in range(7))):
            for paper in ("paper", "panel"):
                assert contrast(scheme[name], scheme[paper]) >= least, (name, scheme[name])
        assert contrast(scheme["on"], scheme["heat"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of luminances."""

    def luminance(colour: str) -> float:
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


# --- in a browser ----------------------------------------------------------------------------------------------------


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
def pages(folder: Path, sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pages")
    (place / "run.html").write_text(report([folder]), encoding="utf-8")
    (place / "sweep.html").write_text(report([sweep]), encoding="utf-8")
    return {"run": place / "run.html", "sweep": place / "sweep.html"}


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
        told: list[str] = browser.execute_script(
            "const of = (what, key) => getComputedStyle(document.querySelector(what))[key];"
            "return [of('body', 'backgroundColor'), of('body', 'color'), of('.line', 'stroke'), of('svg text', 'fill')]"
        )
        return told

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


def test_the_command_writes_the_file(folder: Path, here: Path) -> None:
    from typer.testing import CliRunner

    told = CliRunner().invoke(app, ["report", str(folder)])
    assert told.exit_code == 0, told.output
    assert Page((here / "report.html").read_text(encoding="utf-8")).count("h1") == 1
    assert CliRunner().invoke(app, ["report", str(folder), "--out", str(here)]).exit_code == 0
