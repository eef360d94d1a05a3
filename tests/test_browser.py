"""Notebooks and the report page as a person uses them: a real browser without a window.

Needs the extra `browser` and a Chromium or Chrome with its driver (Debian: chromium,
chromium-driver); no network. Pictures of what was on the page are kept in runs/browser/.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from pfl_papers.explore import sources
from tools import gates
from tools.notebooks import NOTEBOOKS, ROOT

pytestmark = pytest.mark.slow

CHROME = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
DRIVER = shutil.which("chromedriver") or shutil.which("chromium-driver")
PICTURES = ROOT / "runs" / "browser"
SETTINGS = {  # all cells in the page, no question about news, no look for updates
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """JupyterLab's folder, with a copy of the notebook that is opened."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def runs(home) -> Path:
    return home / "runs"


@pytest.fixture(scope="module")
def driver():
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: pip install -e .[browser]"
    )
    if not (CHROME and DRIVER):
        pytest.skip(
            "no Chromium or Chrome with its driver here "
            "(Debian: apt install chromium chromium-driver)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = CHROME
    for word in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "disable-gpu",
        "window-size=1400,1800",
    ):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    browser = webdriver.Chrome(options=options, service=service)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def lab(home, runs):
    """The address of explore.ipynb in a JupyterLab whose settings and run store are the test's."""
    port, token = free_port(), secrets.token_hex(16)
    shutil.copy(NOTEBOOKS / "explore.ipynb", home)
    for name, values in SETTINGS.items():
        file = home / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    hidden = (
        "PYTEST_VERSION",
        "PYTEST_CURRENT_TEST",
        "PFL_HEADLESS",
        "JPY_SESSION_NAME",
        "MPLBACKEND",
    )
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    env |= {
        "PFL_RUNS": str(runs),
        "PFL_OFFLINE": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYTHONPATH": str(ROOT),
    }
    places = dict(
        JUPYTER_CONFIG_DIR="config",
        JUPYTER_DATA_DIR="data",
        JUPYTER_RUNTIME_DIR="runtime",
        IPYTHONDIR="ipython",
    )
    places |= dict(JUPYTERLAB_SETTINGS_DIR="settings", JUPYTERLAB_WORKSPACES_DIR="workspaces")
    env |= {name: str(home / folder) for name, folder in places.items()}
    words = [
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}",
    ]
    words += ["--ip=127.0.0.1", "--no-browser", "--allow-root", f"--ServerApp.root_dir={home}"]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *words], cwd=home, env=env, stdout=log, stderr=log
        )
    try:
        for _ in range(3000):
            time.sleep(0.2)
            assert server.poll() is None, (home / "log").read_text()
            try:
                urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/api/status?token={token}", timeout=60
                ).close()
                break
            except OSError:  # not yet
                continue
        yield f"http://127.0.0.1:{port}/lab/tree/explore.ipynb?reset&token={token}"
    finally:
        server.terminate()
        server.wait(600)


class Page:
    """What a person does and sees: one notebook in one browser."""

    def __init__(self, driver):
        self.driver = driver

    def until(self, seen, seconds: float = 180):
        """Wait for `seen()` to give something, and return it; if it never does, keep a picture."""
        from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        try:
            return WebDriverWait(self.driver, seconds, 0.2, [StaleElementReferenceException]).until(
                lambda _: seen()
            )
        except TimeoutException:
            self.keep("0-failed")
            raise

    def all(self, xpath: str):
        return self.driver.find_elements("xpath", xpath)

    def one(self, xpath: str):
        return self.until(lambda: next(iter(self.all(xpath)), None))

    def panel(self, label: str) -> str:
        """The panel that has a control of this label."""
        return (
            f"//label[normalize-space()='{label}']/ancestor::div[contains(@class, 'widget-box')][2]"
        )

    def slide(self, panel: str, label: str, key: str) -> None:
        handle = self.one(
            f"{panel}//label[normalize-space()='{label}']/..//div[contains(@class, 'noUi-handle')]"
        )
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", handle)
        handle.send_keys(key)

    def chosen(self, label: str) -> list[str]:
        """What lists of this label have chosen, from the top of the page."""
        lists = self.all(f"//label[normalize-space()='{label}']/..//select")
        return [e.find_element("css selector", "option:checked").text for e in lists]

    def choose(self, panel: str, label: str, option: str) -> None:
        options = f"{panel}//label[normalize-space()='{label}']/..//option"
        self.until(lambda: next((e for e in self.all(options) if e.text == option), None)).click()

    def text(self, panel: str) -> str:
        return self.one(f"{panel}//div[contains(@class, 'widget-html-content')]").text

    def picture(self, panel: str) -> str:
        return next((e.get_attribute("src") for e in self.all(f"{panel}//img")), "")

    def press(self, word: str) -> None:
        self.until(
            lambda: (
                (b := self.one(f"//button[normalize-space()='{word}']")).is_enabled()
                and (b.click() or True)
            )
        )

    def keep(self, name: str, panel: str = "") -> None:
        """A picture of the page, with the panel in sight."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        if panel:
            self.driver.execute_script(
                "arguments[0].scrollIntoView({block: 'center'})", self.one(panel)
            )
        self.driver.save_screenshot(str(PICTURES / f"{name}.png"))


def run_all(driver, lab: str) -> Page:
    """The notebook, opened and run from top to bottom; none of its cells failed."""
    page = Page(driver)
    driver.get(lab)
    # The kernel is there.
    page.one("//*[contains(@class, 'jp-StatusBar-TextItem') and contains(., '| Idle')]")
    page.one("//div[@class='lm-MenuBar-itemLabel' and text()='Run']").click()
    page.one("//li[@data-command='runmenu:run-all']").click()
    cells = json.loads((NOTEBOOKS / "explore.ipynb").read_text())["cells"]
    code = sum(cell["cell_type"] == "code" and bool(cell["source"]) for cell in cells)
    prompt = "//div[contains(@class, 'jp-CodeCell')]//div[contains(@class, 'jp-InputPrompt')]"
    page.until(lambda: sum(e.text[1:-2].isdigit() for e in page.all(prompt)) == code, 600)
    failed = "contains(@data-mime-type, 'stderr') or contains(@data-mime-type, 'error')"
    assert [e.text for e in page.all(f"//div[{failed}]")] == []
    return page


def all_views_are_there(page):
    page.keep("1-opened", page.panel("Partition"))
    shown = [
        e.get_attribute("src") for e in page.all("//div[contains(@class, 'widget-html')]//img")
    ]
    assert len(shown) == 5 and all(source.startswith("data:image/png") for source in shown)
    assert "FedAvg" in page.text(page.panel("Smoothing"))


def the_best_evidence_is_chosen_and_missing_data_are_marked(page):
    (source, *_), (data, *_) = (page.chosen(label) for label in ("Results", "Data"))
    assert source == sources.title(sources.best(sources.names())) and data == "digits"
    panel = page.panel("Partition")
    listed = [e.text for e in page.all(f"{panel}//label[text()='Data']/..//option")]
    assert "Omniglot (not on this computer)" in listed


def curves_move_to_another_axis(page):
    panel = page.panel("Smoothing")
    before = page.picture(panel)
    page.choose(panel, "Against", "Megabytes sent and received")
    page.until(lambda: "against='megabytes'" in page.text(panel) and page.picture(panel) != before)
    page.keep("3-megabytes", panel)


def a_slider_moved_by_keys_changes_picture_and_code(page):
    panel = page.panel("α")
    before = page.picture(panel)
    assert "'alpha': 0.1}" in page.text(panel)
    page.slide(panel, "α", "\ue014")  # arrow to the right
    page.until(lambda: "'alpha': 0.2}" in page.text(panel) and page.picture(panel) != before)
    page.one(f"{panel}//button[normalize-space()='Copy as code']").click()
    page.one(f"{panel}//button[normalize-space()='Copied']")
    page.keep("2-slider", panel)


def run_stop_and_run_again(page, runs):
    panel, other = page.panel("Rounds"), page.panel("α")
    for _ in range(9):
        page.slide(panel, "Rounds", "\ue014")
    page.until(lambda: "rounds=1000" in page.text(panel))
    page.press("Run")
    page.until(lambda: "running: round" in page.text(panel))
    first = page.picture(panel)
    assert first.startswith("data:image/png")
    page.until(lambda: page.picture(panel) != first)
    page.keep("4-running", panel)

    page.slide(other, "α", "\ue014")  # the notebook stays usable
    page.until(lambda: "'alpha': 0.5}" in page.text(other))
    assert "running" in page.text(panel)

    page.press("Stop")
    page.until(lambda: "stopped: round" in page.text(panel))
    page.keep("5-stopped", panel)
    (checkpoint,) = runs.glob("store/*.part/checkpoint.pt")
    reached = int(page.text(panel).split("stopped: round ")[1].split()[0])

    page.press("Run")
    page.until(lambda: "running: round" in page.text(panel))
    again = int(page.text(panel).split("running: round ")[1].split()[0])
    assert again > reached and checkpoint.exists()
    page.keep("6-again", panel)
    page.press("Stop")
    page.until(lambda: "stopped: round" in page.text(panel))


def test_explore_in_a_browser(driver, lab, runs):
    page = run_all(driver, lab)
    all_views_are_there(page)
    the_best_evidence_is_chosen_and_missing_data_are_marked(page)
    a_slider_moved_by_keys_changes_picture_and_code(page)
    curves_move_to_another_axis(page)
    run_stop_and_run_again(page, runs)


def test_the_report_in_a_browser(driver, reported):
    driver.get_log("browser")  # what other pages said
    driver.get((reported / "figures" / "report.html").as_uri())
    page = Page(driver)
    page.keep("7-report")
    first = page.one("//table[contains(@class, 'counts')]").rect
    assert first["y"] + first["height"] < 900  # on the first screen
    assert not any(d.get_attribute("open") for d in page.all("//details"))
    links = [a.get_attribute("href").split("#")[1] for a in page.all("//a[contains(@href, '#')]")]
    assert {"fedper", "speed", "read", "fedaghn-quick-digits-claims"} <= set(links)
    for target in links[:9]:
        page.one(f"//nav//a[@href='#{target}']").click()
        page.until(lambda target=target: driver.find_element("id", target).is_displayed())
    asked = driver.execute_script(ASKED)
    assert [e for e in asked if not e.startswith("data:")] == []
    assert driver.get_log("browser") == []


ASKED = "return performance.getEntriesByType('resource').map(e => e.name)"


def test_the_site_in_a_browser(driver, tmp_path):
    """The build itself fails on a warning, a broken inner link, or a request to another computer."""
    subprocess.run([sys.executable, "-m", *gates.docs(tmp_path)], cwd=ROOT, check=True)
    driver.get_log("browser")  # what other pages said
    for page, shown in {
        "README": "//h1",
        "docs/own": "//h2[contains(., 'A method')]",
        "docs/own_data": "//table",
        "docs/runs": "//pre[contains(., 'against')]",
        "docs/generated/methods/fedaghn": "//*[local-name()='math']",
        "notebooks/fedaghn": "//table",
        "docs/generated/api/index": "//a[contains(@href, 'Experiment')]",
    }.items():
        driver.get((tmp_path / f"{page}.html").as_uri())
        Page(driver).one(shown)
        asked = driver.execute_script(ASKED)
        assert [e for e in asked if not e.startswith(("data:", "file:"))] == [], page
        said = [e for e in driver.get_log("browser") if e["level"] != "INFO"]  # of its own scheme
        assert said == [], page


# -- the site --------------------------------------------------------------------------------------

CUT = """
const box = e => e.getBoundingClientRect(), scrolls = e => /auto|scroll/.test(getComputedStyle(e).overflowX);
const out = [];
document.querySelectorAll('details').forEach(d => d.open = true);
for (const t of document.querySelectorAll('article table')) {
  const p = t.parentElement;
  if (box(t).right > box(p).right + 1 && !scrolls(p)) out.push('table: ' + t.innerText.slice(0, 60));
  if (box(p).right > innerWidth + 1) out.push('box: ' + t.innerText.slice(0, 60));
}
for (const p of document.querySelectorAll('.highlight-bash pre'))
  if (p.scrollWidth > p.clientWidth + 1) out.push('shell: ' + p.innerText.slice(0, 60));
if (document.documentElement.scrollWidth > innerWidth + 1) out.push('page is wider than the window');
return out;
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The site of three pages with wide tables, many pictures and lines of a shell."""
    out = tmp_path_factory.mktemp("site")
    pages = "docs/results.md,docs/comparison.md,docs/tour.md,docs/errors.md,README.md"
    command = "-q -b html -c docs -D".split()
    subprocess.run(
        [sys.executable, "-m", "sphinx", *command, f"include_patterns={pages}", ".", str(out)],
        cwd=ROOT,
        capture_output=True,
        check=False,  # links to pages that are left out are warnings
    )
    return out


@pytest.mark.parametrize("width", [1400, 700])
@pytest.mark.parametrize("page", ["results", "comparison", "tour", "errors"])
def test_nothing_of_the_site_is_cut(driver, built, page, width):
    size = dict(width=width, height=1200, deviceScaleFactor=1, mobile=False)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        driver.get((built / "docs" / f"{page}.html").as_uri())
        assert driver.execute_script(CUT) == []
        PICTURES.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(PICTURES / f"site-{page}-{width}.png"))
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_figures_of_the_results_are_thumbnails_that_open(driver, built):
    driver.get((built / "docs" / "results.html").as_uri())
    found = driver.execute_script(
        "document.querySelectorAll('details').forEach(d => d.open = true);"
        "return [...document.querySelectorAll('ul.gallery a')].map("
        "a => [a.href, a.querySelector('img').clientWidth, a.hasAttribute('download')])"
    )
    assert len(found) > 40
    for address, width, download in found:
        assert Path(address.removeprefix("file://")).is_file() and 0 < width <= 150
        assert not download
    bare = "a.download[href$='.png'], a[download][href$='.png']"
    assert driver.execute_script(f'return document.querySelectorAll("{bare}").length') == 0
