"""A headless Chromium that opens local files and talks to nobody."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

REQUIRED_VARIABLE = "DSPARK_TESTS_NEED_CHROMIUM"  # set where its absence is a failure
_HINT = "found no chromium and chromedriver; on Debian and Ubuntu: apt-get install chromium chromium-driver"
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


def _programs() -> tuple[str, str]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    if os.environ.get(REQUIRED_VARIABLE):
        pytest.fail(f"{_HINT} ({REQUIRED_VARIABLE} is set)")
    pytest.skip(_HINT)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[webdriver.Chrome]:
    """Args: folder: an empty one, for its profile."""
    browser, driver = _programs()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # Without an address of its own it would open its start page, which asks for more.
    for flag in (*_FLAGS, f"--user-data-dir={folder}", "about:blank"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The driver is on this machine: a proxy of the environment must not see it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "localhost,127.0.0.1")
        patch.setenv("no_proxy", "localhost,127.0.0.1")
        found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield found
        finally:
            found.quit()


def resize(browser: webdriver.Chrome, width: int, height: int = 900, scale: float = 1.0) -> None:
    """Give the page this many CSS pixels, also fewer than a window can have."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(browser: webdriver.Chrome, name: str) -> None:
    """Ask for the page's ``light`` or ``dark`` colours."""
    wish = {"features": [{"name": "prefers-color-scheme", "value": name}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)
