"""The encoder service's status page in Chromium."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from devkit.engines import photos, wait_until
from devkit.processes import EncoderProcess

HOSTILE = "<img src=x onerror=document.title='owned'>"
"""Name of an application that must not become markup."""


@pytest.fixture
def browser() -> Iterator[Any]:
    if "CORNPLUG_NO_BROWSER" in os.environ:
        pytest.skip("CORNPLUG_NO_BROWSER is set")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service as Driver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    profile = tempfile.mkdtemp(prefix="cornplug-chromium-")
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--no-proxy-server",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1200,900",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # script/setup installs Debian's driver. Selenium would look for its own on the internet.
    driver = webdriver.Chrome(options, Driver(shutil.which("chromedriver") or "/usr/bin/chromedriver"))
    driver.set_page_load_timeout(20)
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture
def process(models: Mapping[str, Path], short_path: Path) -> Iterator[EncoderProcess]:
    """An encoder service for both models, with an application of a hostile name."""
    settings = short_path / "c.toml"
    settings.write_text(f'[qos.classes.shop]\napps = ["{HOSTILE}"]\n')
    service = EncoderProcess(
        list(models.values()),
        *("--no-store", "--threads", "1"),
        socket=short_path / "e.sock",
        env={"CORNPLUG_CONFIG": str(settings)},
    )
    with service:
        yield service


def restarted(process: EncoderProcess, models: Sequence[Path]) -> EncoderProcess:
    """Another service at the same address."""
    return EncoderProcess(models, "--no-store", "--threads", "1", socket=process.socket, port=process.port)


def becomes_true(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, deadline_s=60, what=what)


def shows(browser: Any, selector: str, text: str) -> None:
    """Wait until the element's text contains `text`."""
    script = f"return document.querySelector({selector!r})?.innerText ?? ''"
    becomes_true(lambda: text in str(browser.execute_script(script)), f"{selector} with {text!r}")


def test_status_page_shows_figures_and_lost_service(
    browser: Any, process: EncoderProcess, models: Mapping[str, Path]
) -> None:
    browser.get(process.url)
    shows(browser, "#state", "serving")
    shows(browser, "#models", "shared by 2")
    shows(browser, "#apps", "Nothing was answered yet")
    shows(browser, "#tiles", "per second")

    def post(**options: Any) -> httpx.Response:
        return httpx.post(f"{process.url}/v1/encode", timeout=60, trust_env=False, **options)

    form: Any = {"data": {"model": str(models["q"])}, "files": {"image": photos()[9].data}}
    assert post(**form, headers={"x-cornplug-app": HOSTILE}).status_code == 200
    assert post(json={"model": "nope", "image": ""}).is_error
    shows(browser, "#apps", HOSTILE)
    shows(browser, "#refusals", "default: ")
    shows(browser, "#facts", "answered\n1")
    assert browser.execute_script("return document.images.length") == 1, "the app's name became an image"
    assert "owned" not in browser.title

    browser.set_window_size(390, 800)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
        "wider than a phone"
    )
    noise = [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]
    assert noise == []

    process.kill()
    shows(browser, "#alarm", "does not answer")
    shows(browser, "#state", "no answer")
    assert browser.execute_script("return document.body.dataset.state") == "lost"
    with restarted(process, list(models.values())):
        shows(browser, "#state", "serving")
        shows(browser, "#apps", "Nothing was answered yet")
