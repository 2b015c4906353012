"""Make docs/images/report.png: run a method on the digits, write its report, photograph it in headless Chromium.

python benchmarks/screenshot.py                          the picture in the docs (about a minute on two cores)
python benchmarks/screenshot.py report.html out.png      any report; --width 390 for a phone, --dark, --height 0 for all of it

Needs selenium (the dev extra) and the Debian packages chromium and chromium-driver, or the like.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selenium import webdriver

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "report.png"
RUN = ["run", "v12", "--clients", "3", "--alpha", "0.1", "--epochs", "20", "--set", "training.batch_size=64",
       "--set", "snapshots=2", "--out", "runs/v12"]  # fmt: skip


def photograph(page: Path, picture: Path, width: int, height: int, dark: bool) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or sys.exit("screenshot: install chromium and chromium-driver")
    with tempfile.TemporaryDirectory() as profile:
        for flag in ("--headless=new", "--no-sandbox", "--disable-background-networking", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            size = {"width": width, "height": height or 1000, "deviceScaleFactor": 1, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
            driver.get(page.resolve().as_uri())
            extent = {"captureBeyondViewport": height == 0}
            screenshot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", **extent})
            picture.write_bytes(base64.b64decode(screenshot["data"]))
        finally:
            driver.quit()


def make_report(folder: Path) -> Path:
    """A real run in a folder of its own, so that no path of this machine is in the picture."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    for command in (RUN, ["report", "runs/v12"]):
        subprocess.run([sys.executable, "-m", "oneround.cli", *command], cwd=folder, env=environment, check=True)
    return folder / "report.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=2400)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = options.page or make_report(Path(folder))
        photograph(page, options.picture, options.width, options.height, options.dark)
    print(f"written to {options.picture}")
