import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cmcl import cli
from cmcl.data import fetching, load, published
from cmcl.data.fetching import _alone, _Download, fetch

pytest.importorskip("pooch")
pytest.importorskip("requests")


class Site(ThreadingHTTPServer):
    """Serves `content` on 127.0.0.1, with the faults that are asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = {}
        self.cut_after = None  # bytes, then the connection is closed
        self.knows_ranges = True
        self.shift = 0  # bytes by which a part begins too late
        self.status = None  # instead of an answer
        self.requests = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.requests.append((self.path, wanted))
        body = self.server.content.get(self.path.lstrip("/"))
        if body is None or self.server.status:
            self.send_error(self.server.status or 404)
            return
        start = (
            int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.knows_ranges else 0
        )
        if start >= len(body):
            self.send_error(416)
            return
        start += self.server.shift if start else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        end = len(body) if self.server.cut_after is None else start + self.server.cut_after
        self.wfile.write(body[start:end])

    def log_message(self, *_):
        """Silence."""


@pytest.fixture
def site(tmp_path, cifar, monkeypatch):
    """A site with a small CIFAR-10, published with its true checksum."""
    source = tmp_path / "source"
    source.mkdir()
    content = cifar.write_archive(source).read_bytes()
    facts = replace(
        published.PUBLISHED["cifar10"],
        downloads={"cifar-10-python.tar.gz": hashlib.md5(content).hexdigest()},
    )
    monkeypatch.setitem(published.PUBLISHED, "cifar10", facts)
    with Site() as server:
        server.content["cifar-10-python.tar.gz"] = content
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def get(site, root):
    return fetch("cifar10", root=root, site=site.url, progress=False)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_download_can_be_loaded(site, root):
    (path,) = get(site, root)
    assert names(root) == ["cifar-10-python.tar.gz"]
    assert path.read_bytes() == site.content["cifar-10-python.tar.gz"]
    assert len(load("cifar10", root=root)) == 100


def test_the_command(site, root, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["cmcl", "data", "fetch", "cifar10", "--root", str(root), "--site", site.url]
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    out, err = capsys.readouterr()
    assert out == f"{root / 'cifar-10-python.tar.gz'}\n"
    assert "cifar-10-python.tar.gz" in err  # the bar


def test_what_is_there_is_not_downloaded_again(site, root):
    get(site, root)
    get(site, root)
    assert len(site.requests) == 1


def test_a_cut_connection_is_continued(site, root):
    site.cut_after = 100_000
    with pytest.raises(ConnectionError, match=r"must arrive whole. Got [\d,]+ bytes.* it goes on from there"):
        get(site, root)
    assert names(root) == ["cifar-10-python.tar.gz.part"]
    have = (root / "cifar-10-python.tar.gz.part").stat().st_size
    assert have > 0
    site.cut_after = None
    get(site, root)
    assert site.requests[-1] == ("/cifar-10-python.tar.gz", f"bytes={have}-")
    assert names(root) == ["cifar-10-python.tar.gz"]
    assert len(load("cifar10", root=root)) == 100


def test_a_site_that_ignores_ranges_sends_all_again(site, root):
    site.cut_after = 100_000
    with pytest.raises(ConnectionError):
        get(site, root)
    site.cut_after, site.knows_ranges = None, False
    get(site, root)
    assert len(load("cifar10", root=root)) == 100


def test_a_site_that_sends_another_part_is_asked_for_all(site, root):
    root.mkdir()
    (root / "cifar-10-python.tar.gz.part").write_bytes(site.content["cifar-10-python.tar.gz"][:1000])
    site.shift = 5
    get(site, root)
    assert [wanted for _, wanted in site.requests] == ["bytes=1000-", None]
    assert len(load("cifar10", root=root)) == 100


def test_bytes_are_counted_here_too(tmp_path):
    """Some versions of the packages underneath take the end of a connection for the end of the file."""

    class Short:
        headers = {"Content-Length": "10"}  # noqa: RUF012

        def iter_content(self, _):
            yield b"12345"

    with (tmp_path / "x.part").open("wb") as file, pytest.raises(EOFError, match="though 10 were announced"):
        _Download(tmp_path / "x.part", progress=False)._copy(Short(), file, 0)


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_site_that_refuses_promises_nothing(site, root, status):
    root.mkdir()
    part = root / "cifar-10-python.tar.gz.part"
    part.write_bytes(b"begun")
    site.status = status
    with pytest.raises(ConnectionError, match=f"must be served by the site. Got: {status}") as caught:
        get(site, root)
    assert "goes on from there" not in str(caught.value)
    assert part.read_bytes() == b"begun"


def test_two_downloads_do_not_write_one_part(site, root):
    root.mkdir()
    part = root / "cifar-10-python.tar.gz.part"
    with _alone(part):
        part.write_bytes(b"begun")
        with pytest.raises(BlockingIOError, match="one download at a time. Got another at work. Wait"):
            get(site, root)
        assert part.read_bytes() == b"begun"
        assert site.requests == []
        part.unlink()
    get(site, root)
    assert names(root) == ["cifar-10-python.tar.gz"]


def test_a_part_that_another_download_has_just_finished(root, monkeypatch):
    root.mkdir()
    part = root / "x.part"
    monkeypatch.setattr(fetching.fcntl, "flock", lambda *_: part.rename(root / "x"))
    with pytest.raises(BlockingIOError, match="Got another at work"), _alone(part):
        pytest.fail("the lock is of a file that has gone")
    assert names(root) == ["x"]


def test_a_part_that_is_already_whole(site, root):
    root.mkdir()
    (root / "cifar-10-python.tar.gz.part").write_bytes(site.content["cifar-10-python.tar.gz"])
    get(site, root)
    assert names(root) == ["cifar-10-python.tar.gz"]


def test_a_wrong_checksum_leaves_nothing(site, root):
    site.content["cifar-10-python.tar.gz"] = b"something else"
    with pytest.raises(ValueError, match="must have the published checksum. Got other bytes") as caught:
        get(site, root)
    assert "\n" not in str(caught.value)
    assert names(root) == []


def test_a_part_of_something_else_is_thrown_away(site, root):
    root.mkdir()
    (root / "cifar-10-python.tar.gz.part").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="published checksum"):
        get(site, root)
    get(site, root)
    assert len(load("cifar10", root=root)) == 100


def test_a_file_of_the_user_is_never_overwritten(site, root):
    root.mkdir()
    (root / "cifar-10-python.tar.gz").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"cmcl data check.*move it away"):
        get(site, root)
    assert (root / "cifar-10-python.tar.gz").read_bytes() == b"mine"


def test_a_missing_page(site, root):
    site.content.clear()
    with pytest.raises(ConnectionError, match="404"):
        get(site, root)
    assert names(root) == []


def test_nobody_answers(root):
    with pytest.raises(ConnectionError, match="must arrive whole. Got 0 bytes"):
        fetch("cifar10", root=root, site="http://127.0.0.1:9", progress=False)
    assert names(root) == []


FETCH = """
import resource, sys
from dataclasses import replace
from cmcl.data import published
from cmcl.data.fetching import fetch
root, url, md5, limit = sys.argv[1:]
if int(limit):  # a write beyond this size fails
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
published.PUBLISHED["cifar10"] = replace(
    published.PUBLISHED["cifar10"], downloads={"cifar-10-python.tar.gz": md5}
)
fetch("cifar10", root=root, site=url, progress=False)
"""


def fetch_elsewhere(site, root, limit=0):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    md5 = hashlib.md5(site.content["cifar-10-python.tar.gz"]).hexdigest()
    command = [sys.executable, "-c", FETCH, str(root), site.url, md5, str(limit)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_a_file_that_may_not_grow(site, root):
    result = fetch_elsewhere(site, root, limit=70_000)
    assert "must be written whole. Got: File too large" in result.stderr.splitlines()[-1]
    assert names(root) == ["cifar-10-python.tar.gz.part"]
    get(site, root)
    assert len(load("cifar10", root=root)) == 100


def test_a_full_disk(site, root):
    """A real one: a file system of 64 KiB."""
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(root)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs an administrator")
    try:
        result = fetch_elsewhere(site, root)
        assert "Got: No space left on device. Make room and run" in result.stderr.splitlines()[-1]
        assert names(root) == ["cifar-10-python.tar.gz.part"]
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_missing_packages_are_named_with_the_command_that_installs_them(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install 'confident-mcl\[fetch\]'"):
        fetch("cifar10", root=root, progress=False)


def test_only_sets_with_a_site_can_be_fetched(root):
    with pytest.raises(ValueError, match="Got 'digits'. Valid names: cifar10, svhn"):
        fetch("digits", root=root)
    with pytest.raises(ValueError, match="Download that set by hand from http://chenlab"):
        fetch("icoseg", root=root)
