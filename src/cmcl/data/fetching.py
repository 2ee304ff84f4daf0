"""Download a set from its own site: with a progress bar, checked, and going on where it was cut off."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from .._files import digest
from ..telling import first_line
from .files import data_root, nearest
from .published import ICOSEG_SITE, PUBLISHED

try:
    import fcntl
except ImportError:  # Windows, where a file in use cannot be renamed anyway
    fcntl = None  # type: ignore[assignment]

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
        by_hand = f"Download that set by hand from {ICOSEG_SITE}."
        cure = by_hand if name == "icoseg" else nearest(name, list(PUBLISHED))
        raise ValueError(f"name must be a set with files to fetch. Got {name!r}. {cure}")
    facts = PUBLISHED[name]
    address = (site or facts.site).rstrip("/")
    return [
        _fetch_file(f"{address}/{Path(path).name}", data_root(root) / path, md5, progress)
        for path, md5 in facts.downloads.items()
    ]


def _fetch_file(url: str, path: Path, md5: str, progress: bool) -> Path:
    pooch = _import_pooch()
    if path.exists():
        if digest(path, "md5") == md5:
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

        with _alone(self.part) if fcntl else nullcontext():
            self.part.touch()
            self._try(url, requests)
            self.part.replace(output_file)

    def _try(self, url: str, requests: Any) -> None:
        """Download, or say in one line what went wrong and what to do."""
        try:
            self._download(url, requests)
        except requests.HTTPError as error:
            message = f"{url} must be served by the site. Got: {first_line(error)}."
            raise ConnectionError(f"{message} Try again later, or name another site.") from None
        except (requests.RequestException, EOFError) as error:
            have = self.part.stat().st_size
            message = f"{url} must arrive whole. Got {have:,} bytes, then: {first_line(error)}."
            raise ConnectionError(f"{message} Run the command again: it goes on from there.") from None
        except OSError as error:
            message = f"{self.part} must be written whole. Got: {error.strerror or error}."
            raise OSError(f"{message} Make room and run the command again: it goes on from there.") from None

    def _download(self, url: str, requests: Any) -> None:
        have = self.part.stat().st_size
        # identity: the checksum is that of the file, not of what it unpacks to
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=30) as response:
            if response.status_code == 416:  # nothing is missing any more; the checksum has the last word
                return
            response.raise_for_status()
            # a server may also ignore the range and send all
            start = _first_byte(response) if response.status_code == 206 else 0
            if start in (0, have):
                with self.part.open("ab" if start else "wb") as file:
                    self._copy(response, file, start)
                return
        if not have:
            raise requests.HTTPError(f"a part of the file, from byte {start} on, which was not asked for")
        self.part.write_bytes(b"")  # another part than the rest: ask for all of it
        self._download(url, requests)

    def _copy(self, response: Any, file: Any, have: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and "Content-Encoding" not in response.headers else None
        with Progress(*columns, console=Console(stderr=True), disable=not self.progress) as bar:
            task = bar.add_task(self.part.name.removesuffix(".part"), total=total, completed=have)
            for block in response.iter_content(_BLOCK):
                file.write(block)
                bar.advance(task, len(block))
        if total not in (None, file.tell()):
            raise EOFError(f"the end, though {total:,} were announced")


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Keep other downloads away from `part`; if it stays empty, it is removed.

    The system lets go of the lock when this process ends, however it ends.
    """
    handle = os.open(part, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(handle, part):  # the other download has ended since, and renamed what is open here
            raise BlockingIOError
    except BlockingIOError:
        os.close(handle)
        message = f"{part} must belong to one download at a time. Got another at work."
        raise BlockingIOError(f"{message} Wait for it to end, then run the command again.") from None
    try:
        yield
    finally:
        if _is_at(handle, part) and not part.stat().st_size:
            part.unlink()
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(handle), path.stat())


def _first_byte(response: Any) -> int | None:
    """Where the part that a site sends begins: `Content-Range: bytes 100-999/1000`."""
    first = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdecimal() else None


def _import_pooch() -> Any:
    try:
        import pooch
        import requests  # noqa: F401  (pooch can do without it, the downloads here cannot)
    except ImportError:
        message = "fetching data needs the packages pooch and requests. Got neither or only one."
        raise ImportError(f"{message} Install them with: pip install 'confident-mcl[fetch]'.") from None
    pooch.get_logger().setLevel(logging.WARNING)
    return pooch
