"""Download a dataset from its own site with pooch, which checks the md5 and leaves no partial file."""

import logging
from importlib.util import find_spec
from pathlib import Path

from .._files import digest, needing_room
from .._messages import needing_extra
from .registry import DATASETS, data_root, nearest


def fetch(
    name: str, *, root: str | Path | None = None, site: str | None = None, progress: bool = True
) -> list[Path]:
    """Download the published files of a dataset to `root`; files that are there are kept.

    Args:
        name: a dataset that has files to download.
        root: folder that holds the datasets; default: `CMCL_DATA`, then `~/.cache/cmcl`.
        site: another address that serves the same files.
        progress: show a progress bar, if tqdm is installed.
    """
    info, with_files = DATASETS.get(name), [key for key, known in DATASETS.items() if known.downloads]
    if info is None or not info.downloads:
        hint = info.hint if info and info.site else nearest(name, with_files)
        raise ValueError(f"name must be a dataset with files to download. Got {name!r}. {hint}")
    address = (site or info.site).rstrip("/")
    return [
        _fetch_file(f"{address}/{Path(path).name}", data_root(root) / path, md5, progress)
        for path, md5 in info.downloads.items()
    ]


def _fetch_file(url: str, path: Path, md5: str, progress: bool) -> Path:
    if path.exists():
        if digest(path, "md5") == md5:
            return path
        message = f"{path} must be the published file (md5 {md5}) or not exist. Got other bytes."
        raise ValueError(f"{message} Look at it with `cmcl data check`, or move it away to download again.")
    with needing_extra("fetch", "pooch", "requests"):
        import pooch
        import requests
    pooch.get_logger().setLevel(logging.WARNING)
    download = pooch.HTTPDownloader(progressbar=progress and find_spec("tqdm") is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with needing_room(path):
            pooch.retrieve(url, f"md5:{md5}", path.name, path.parent, downloader=download)
    except requests.RequestException as error:
        message = f"{url} must be downloaded completely. Got: {' '.join(str(error).split())}."
        raise ConnectionError(f"{message} Try again later, or name another site.") from None
    except ValueError:  # pooch has deleted the file
        message = f"{url} must have the published checksum. Got other bytes."
        raise ValueError(f"{message} Try again later, or name another site.") from None
    return path
