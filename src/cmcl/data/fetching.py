"""Download a set from its own site: with a progress bar, checked, and going on where it was cut off."""

import hashlib
import logging
from pathlib import Path
from typing import Any

from .files import data_root, nearest
from .published import PUBLISHED

_BLOCK = 1 << 16


def fetch(
    name: str, *, root: str | Path | None = None, site: str | None = None, progress: bool = True
) -> list[Path]:
    """Bring the published files of a set under `root`; those already there are left as they are.

    Args:
        name: "cifar10" or "svhn".
        root: where the sets live; without it `CMCL_DATA`, then `~/.cache/cmcl`.
        site: another address to download the same files from.
        progress: show a bar.
    """
    if name not in PUBLISHED:
        raise ValueError(
            f"name must be a set with a site of its own. Got {name!r}. {nearest(name, list(PUBLISHED))}"
        )
    facts = PUBLISHED[name]
    address = (site or facts.site).rstrip("/")
    return [
        _fetch_file(f"{address}/{Path(path).name}", data_root(root) / path, md5, progress)
        for path, md5 in facts.downloads.items()
    ]


def file_md5(path: Path) -> str:
    """md5, because that is what the sites published; it tells damage, not forgery."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _fetch_file(url: str, path: Path, md5: str, progress: bool) -> Path:
    pooch = _import_pooch()
    if path.exists():
        if file_md5(path) == md5:
            return path
        message = f"{path} must be the published file (md5 {md5}) or not be there. Got other bytes."
        raise ValueError(f"{message} Look at it with `cmcl data check`, or move it away to download again.")
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        pooch.retrieve(url, f"md5:{md5}", path.name, path.parent, downloader=_Download(part, progress))
    except ValueError as error:  # pooch has deleted the file
        message = f"{url} must have the published checksum. Got other bytes ({error})."
        raise ValueError(f"{message} Try again later.".replace("\n", " ")) from None
    return path


class _Download:
    """A downloader for pooch that keeps what has arrived in `part` and asks for the rest only."""

    def __init__(self, part: Path, progress: bool) -> None:
        self.part = part
        self.progress = progress

    def __call__(self, url: str, output_file: str, _pooch: Any) -> None:
        import requests

        try:
            self._download(url, requests)
        except requests.RequestException as error:
            have = self.part.stat().st_size if self.part.exists() else 0
            message = f"{url} must arrive whole. Got {have:,} bytes, then: {_first_line(error)}."
            raise ConnectionError(f"{message} Run the command again: it goes on from there.") from None
        except OSError as error:
            message = f"{self.part} must be written whole. Got: {error.strerror or error}."
            raise OSError(f"{message} Make room and run the command again: it goes on from there.") from None
        self.part.replace(output_file)

    def _download(self, url: str, requests: Any) -> None:
        have = self.part.stat().st_size if self.part.exists() else 0
        # identity: the checksum is that of the file, not of what it unpacks to
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=30) as response:
            if response.status_code == 416:  # nothing is missing any more; the checksum has the last word
                return
            response.raise_for_status()
            continues = response.status_code == 206  # a server may also ignore the range and send all
            with self.part.open("ab" if continues else "wb") as file:
                self._copy(response, file, have if continues else 0)

    def _copy(self, response: Any, file: Any, have: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        total = have + int(response.headers.get("Content-Length", 0)) or None
        with Progress(*columns, console=Console(stderr=True), disable=not self.progress) as bar:
            task = bar.add_task(self.part.name.removesuffix(".part"), total=total, completed=have)
            for block in response.iter_content(_BLOCK):
                file.write(block)
                bar.advance(task, len(block))


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")


def _import_pooch() -> Any:
    try:
        import pooch
        import requests  # noqa: F401  (pooch can do without it, the downloads here cannot)
    except ImportError:
        message = "fetching data needs the packages pooch and requests. Got neither or only one."
        raise ImportError(f"{message} Install them with: pip install 'confident-mcl[fetch]'.") from None
    pooch.get_logger().setLevel(logging.WARNING)
    return pooch
