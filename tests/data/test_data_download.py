import gc
import hashlib
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from cmcl import cli
from cmcl.data import DATASETS, load
from cmcl.data.download import fetch

pytest.importorskip("pooch")
pytest.importorskip("requests")
# pooch leaves the socket of a failed download to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
NAME = "cifar-10-python.tar.gz"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests += 1
        body = self.server.content.get(self.path.lstrip("/"))
        if body is None or self.server.status:
            self.send_error(self.server.status or 404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cut_after])

    def log_message(self, *_):
        """Silence."""


def publish(monkeypatch, content):
    info = DATASETS["cifar10"]
    downloads = {NAME: hashlib.md5(content).hexdigest()}
    monkeypatch.setitem(DATASETS, "cifar10", replace(info, downloads=downloads))


@pytest.fixture
def site(tmp_path, cifar, monkeypatch):
    """A site on 127.0.0.1 with a small CIFAR-10, whose true checksum is the published one."""
    (tmp_path / "source").mkdir()
    content = cifar.write_archive(tmp_path / "source").read_bytes()
    publish(monkeypatch, content)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.content, server.cut_after, server.status, server.requests = {NAME: content}, None, None, 0
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    gc.collect()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def get(site, root):
    return fetch("cifar10", root=root, site=site.url, progress=False)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_download_can_be_loaded_and_is_not_repeated(site, root):
    (path,) = get(site, root)
    assert names(root) == [NAME]
    assert path.read_bytes() == site.content[NAME]
    assert len(load("cifar10", root=root)) == 100
    assert get(site, root) == [path]
    assert site.requests == 1


def test_the_command(site, root, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["cmcl", "data", "fetch", "cifar10", "--root", str(root), "--site", site.url]
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"{root / NAME}\n"


@pytest.mark.parametrize("fault", ["cut", 403, 404, 500, "nobody", "other bytes"])
def test_a_failed_download_leaves_nothing(site, root, fault):
    error, match, url = ConnectionError, "must be downloaded completely. Got", site.url
    if fault == "cut":
        site.cut_after = 50_000
    elif fault == "nobody":
        url = "http://127.0.0.1:9"
    elif fault == "other bytes":
        site.content[NAME] = b"something else"
        error, match = ValueError, "must have the published checksum"
    else:
        site.status, match = fault, str(fault)
    with pytest.raises(error, match=match) as caught:
        fetch("cifar10", root=root, site=url, progress=False)
    assert "\n" not in str(caught.value)
    assert names(root) == []


def test_a_file_of_the_user_is_never_overwritten(site, root):
    root.mkdir()
    (root / NAME).write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"cmcl data check.*move it away"):
        get(site, root)
    assert (root / NAME).read_bytes() == b"mine"


LIMITED = """
import resource, sys
from cmcl.data.download import _fetch_file
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))  # a larger write fails, as on a full disk
_fetch_file(f"{sys.argv[1]}/cifar-10-python.tar.gz", Path(sys.argv[2]) / "x", sys.argv[3], False)
"""


def test_a_file_that_does_not_fit_leaves_nothing(site, root, run_python):
    result = run_python(LIMITED, site.url, root, hashlib.md5(site.content[NAME]).hexdigest())
    assert "must fit on its disk" in result.stderr.splitlines()[-1]
    assert names(root) == []


def test_missing_packages_and_names_without_downloads(root, monkeypatch):
    with pytest.raises(ValueError, match="Got 'digits'. Valid names: cifar10, svhn"):
        fetch("digits", root=root)
    with pytest.raises(ValueError, match="by hand from http://chenlab"):
        fetch("icoseg", root=root)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install 'confident-mcl\[fetch\]'"):
        fetch("cifar10", root=root, progress=False)
