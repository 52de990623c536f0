"""A headless Chromium for tests of the page, and what any page must hold."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE = 60.0
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
#: Why tests of the page are skipped; empty where they can be run.
MISSING = (
    "" if CHROMIUM and DRIVER else "Chromium and its driver are not installed: apt-get install chromium chromium-driver"
)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
#: Roles of what is used, which must all have names.
USED = {"button", "textbox", "combobox", "slider", "checkbox", "spinbutton", "link", "listbox", "dialog"}


class Page:
    """The browser, and ways to find and wait for what it shows."""

    def __init__(self, driver: webdriver.Chrome, downloads: Path) -> None:
        self.driver, self.downloads = driver, downloads

    def open(self, url: str) -> None:
        self.driver.get(url)

    def __getitem__(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def named(self, name: str, tag: str = "button") -> WebElement:
        """The element with this accessible name."""
        found = [each for each in self.all(tag) if each.accessible_name == name]
        assert found, f"no {tag} is named {name!r}: {[each.accessible_name for each in self.all(tag)]}"
        return found[0]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        wait: Any = WebDriverWait(self.driver, PATIENCE, 0.05)
        return wait.until(lambda _driver: condition(), f"waited in vain: {what}")

    def click(self, name: str) -> None:
        self.run("arguments[0].scrollIntoView({block: 'center'})", self[name])
        self[name].click()

    def fill(self, name: str, text: str) -> None:
        self[name].clear()
        self[name].send_keys(text)

    def choose(self, name: str, value: str) -> None:
        self.run(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))",
            self[name],
            value,
        )
        assert self[name].get_property("value") == value

    def emulate(self, *, width: int = 1280, height: int = 900, dark: bool = False, reduced: bool = False) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced else "no-preference"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def console(self) -> list[dict[str, Any]]:
        """What the console has had since it was last asked."""
        return list(self.driver.get_log("browser"))

    def shot(self, name: str) -> None:
        """A picture of the whole page, where ``MMSERVE_SHOTS`` names a folder for people to look at."""
        if folder := os.environ.get("MMSERVE_SHOTS"):
            height, width = self.run("return [document.documentElement.scrollHeight, innerWidth]")
            self.emulated_height(width, height)
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def emulated_height(self, width: int, height: int) -> None:
        size = {"width": width, "height": max(600, height), "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def unnamed(self) -> list[str]:
        """What is used and has no accessible name, by its role and place in the tree."""
        self.driver.execute_cdp_cmd("Accessibility.enable", {})
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            str(node.get("role"))
            for node in nodes
            if not node.get("ignored")
            and node.get("role", {}).get("value") in USED
            and not node.get("name", {}).get("value")
        ]


@contextmanager
def browser(downloads: Path) -> Iterator[Page]:
    """A browser with nothing in it, which saves files to ``downloads``; the test is skipped where there is none."""
    if MISSING:
        pytest.skip(MISSING)
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = str(CHROMIUM)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
        yield Page(driver, downloads)
    finally:
        driver.quit()
