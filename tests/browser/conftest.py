"""A real browser: the system's chromium, driven by playwright. `make test-browser` runs these."""

import shutil

import pytest

from cmcl import report
from report_samples import changed, made_record, save_results, save_run, whole_paper

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def pytest_configure(config):
    config.addinivalue_line("markers", "browser: drives a real browser; `make test-browser` runs these")


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program)
        yield started
        started.close()


@pytest.fixture(scope="session")
def page_file(tmp_path_factory):
    """A report with everything in it, and with names that would like to be programs."""
    for library in ("altair", "vl_convert", "jinja2"):
        pytest.importorskip(library)
    folder = tmp_path_factory.mktemp("report")
    records = [r for r in whole_paper(1) if not r.name.startswith("svhn-vggnet17")]  # some cells stay open
    results = save_results(folder / "results", records)
    for name in ("digits-ie", "digits-mcl", "digits-cmcl"):
        save_run(folder / "runs" / name, made_record(name), classes=[f"{NASTY}{i}" for i in range(10)])
    save_run(folder / "runs" / "shapes", made_record("shapes-cmcl", classes=2))
    save_run(folder / "runs" / "nasty", changed(made_record("digits-cmcl", 7, device=NASTY), name=NASTY))
    return report.write([results, folder / "runs"], folder / "report.html")


@pytest.fixture
def open_page(browser, page_file):
    """Open the report; what the browser complains about or asks for goes into `problems`."""
    contexts = []

    def open_page(*, width=1280, theme="light", script=True):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, java_script_enabled=script
        )
        contexts.append(context)
        page = context.new_page()
        page.problems = []
        page.on("console", lambda message: page.problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: page.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: page.problems.append(f"dialog: {dialog.message}"))
        page.on(
            "request", lambda asked: page.problems.append(f"request: {asked.url}") if _leaves(asked) else None
        )
        page.goto(page_file.as_uri())
        if script:
            page.wait_for_selector("html[data-ready]")
        return page

    def _leaves(asked):
        return asked.url != page_file.as_uri() and not asked.url.startswith("data:")

    yield open_page
    for context in contexts:
        context.close()
