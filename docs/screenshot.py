"""The picture of the report in README, docs/pictures/report.png: python docs/screenshot.py

Runs `cmcl demo` and opens its report in the system's chromium (`make test-browser` installs what it needs).
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "pictures" / "report.png"
WIDTH, HEIGHT = 1000, 860


def main() -> None:
    """Write the picture, with few colours to keep it small."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        subprocess.run([sys.executable, "-m", "cmcl", "demo", "--quiet", "--out", folder], check=True)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto((Path(folder) / "report.html").as_uri())
        page.screenshot(path=PICTURE)
        browser.close()
    Image.open(PICTURE).convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
