"""Fail if a page of the built site loads anything from the network: python docs/offline.py site"""

import re
import sys
from pathlib import Path

LOADED = re.compile(  # scripts, styles, pictures and frames; links that a reader may follow are no matter
    r"""<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|srcset|data)=["']?\s*(?:https?:)?//[^>]*>"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|alternate))[^>]*?\bhref=["']?\s*(?:https?:)?//[^>]*>"""
    r"""|url\(["']?\s*(?:https?:)?//[^)]*\)|@import\s+["'](?:https?:)?//[^"']*""",
    re.IGNORECASE,
)


def loaded(site: Path) -> list[str]:
    """What pages and styles load from elsewhere."""
    files = [path for path in sorted(site.rglob("*")) if path.suffix in (".html", ".css")]
    if not files:
        raise FileNotFoundError(f"site must be a folder with pages. Got {site}. Run `mkdocs build` first.")
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return [f"{path}: {found}" for path, text in texts.items() for found in LOADED.findall(text)]


if __name__ == "__main__":
    sys.exit("\n".join(loaded(Path(sys.argv[1]))) or 0)
