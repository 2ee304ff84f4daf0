"""Checkpoints come back whole after damage, a full disk and a kill at any moment; one process a folder."""

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cmcl
from cmcl._files import DiskFullError
from cmcl.training.checkpoint import Checkpoints, Facts, FolderInUseError, RunFolder, Signals, locked
from cmcl.training.step import TrainState

MOVES = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.T if t.ndim == 2 else t,
    "every other": lambda t: t[::2] if t.ndim else t,
    "expanded": lambda t: t.expand(3, *t.shape),
}


@contextmanager
def python(code, *arguments):
    """A process of its own that runs `code` on this package; it and all that it forked end with the block."""
    source = Path(cmcl.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def content(step):
    return {
        "weights": torch.full((50, 50), float(step)),
        "rng": torch.tensor([step % 256], dtype=torch.uint8),
    }


def facts(step, **more):
    values = {"seconds": step / 10, "recipe": {}, "seed": 0, "task": None, "data": "", "epochs_below": []}
    return Facts(step=step, **values | more)


def save(checkpoints, *steps):
    return [checkpoints.save(content(step), facts(step)) for step in steps]


def assert_is(checkpoint, step):
    assert checkpoint.facts == facts(step)
    assert checkpoint.tensors.keys() == content(step).keys()
    assert all(value.equal(content(step)[key]) for key, value in checkpoint.tensors.items())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(safetensors.torch._TYPES.values(), key=str)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    bits = torch.zeros(shape, dtype=dtype).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256  # any bits, so NaN with any payload too
    tensor = torch.randint(top, (bits,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    return MOVES[draw(st.sampled_from(sorted(MOVES)))](tensor)


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class TestRoundTrip:
    @settings(max_examples=100, deadline=None)
    @given(
        st.dictionaries(st.text(max_size=5).filter(lambda key: key != "__metadata__"), tensors(), max_size=3)
    )
    def test_tensors(self, given):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            checkpoints.save(given, facts(3))
            found = checkpoints.latest()
        assert found.tensors.keys() == given.keys()
        for key, value in given.items():
            assert (found.tensors[key].dtype, found.tensors[key].shape) == (value.dtype, value.shape)
            assert bits(found.tensors[key]).equal(bits(value))

    @settings(max_examples=60, deadline=None)
    @given(st.dictionaries(st.text(), values, max_size=3))
    def test_state(self, state):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder))
            checkpoints.save({}, facts(3, recipe=state))
            assert checkpoints.latest() == ({}, facts(3, recipe=state))

    def test_shared_memory_gradients_and_random_states(self, tmp_path):
        weight = torch.nn.Parameter(torch.randn(4, 4))
        checkpoints = Checkpoints(tmp_path)
        rng = torch.get_rng_state()
        checkpoints.save({"a": weight, "b": weight, "row": weight[1], "rng": rng}, facts(1))
        found = checkpoints.latest().tensors
        assert found["a"].equal(weight)
        assert found["b"].equal(weight)
        assert found["row"].equal(weight[1])
        assert found["rng"].equal(rng)
        found["a"].add_(1)  # nothing read-only, nothing shared any more
        assert found["b"].equal(weight)

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_from_a_gpu_to_the_cpu(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save({"a": torch.arange(4, device="cuda")}, facts(1))
        assert checkpoints.latest().tensors["a"].device.type == "cpu"


class TestFiles:
    def test_the_name_tells_step_and_checksum(self, tmp_path):
        (path,) = save(Checkpoints(tmp_path), 390)
        assert path.name == f"step-00000390-{sha256(path.read_bytes()).hexdigest()[:12]}.safetensors"
        assert names(tmp_path) == [path.name]

    def test_none_yet(self, tmp_path):
        assert Checkpoints(tmp_path / "new" / "folder").latest() is None

    def test_the_last_two_are_kept(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        paths = save(checkpoints, *range(0, 50, 10))
        assert names(tmp_path) == [path.name for path in paths[-2:]]
        assert_is(checkpoints.latest(), 40)

    def test_the_old_go_only_after_the_new_is_there(self, tmp_path, monkeypatch):
        checkpoints = Checkpoints(tmp_path)
        save(checkpoints, 0, 1)
        seen = []
        unlink = Path.unlink
        monkeypatch.setattr(Path, "unlink", lambda p, **o: (seen.append(names(tmp_path)), unlink(p, **o)))
        save(checkpoints, 2)
        assert seen
        assert all(any(name.startswith("step-00000002") for name in there) for there in seen)

    def test_more_than_eight_digits(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        save(checkpoints, 99_999_999, 100_000_000)
        assert_is(checkpoints.latest(), 100_000_000)

    def test_other_files_stay(self, tmp_path):
        foreign = {".other.part", "notes.txt", "step-1.safetensors", "step-00000009-x.part"}
        for name in foreign:
            (tmp_path / name).write_bytes(b"")
        save(Checkpoints(tmp_path), 1, 2, 3)
        assert len(names(tmp_path)) == 2 + len(foreign)
        assert foreign <= set(names(tmp_path))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip_first(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def flip_last(path):
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def empty(path):
    path.write_bytes(b"")


def become_foreign(path, data=b"hello"):
    path.unlink()
    path.with_name(f"{path.name[:14]}{sha256(data).hexdigest()[:12]}.safetensors").write_bytes(data)


def become_another_programs(path):
    become_foreign(path, safetensors.torch.save({"a": torch.zeros(2)}))


def become_a_folder(path):
    path.unlink()
    path.mkdir()


def fail_with(number, path):
    raise OSError(number, os.strerror(number), str(path))


def become(state):
    def damage(path):
        become_foreign(path, safetensors.torch.save({"a": torch.zeros(2)}, metadata={"state": state}))

    return damage


def become_another_step(path):
    path.rename(path.with_name(path.name.replace("step-00000002", "step-00000003")))


def become_endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGES = [
    *(truncate, flip_first, flip_last, empty, become_foreign, become_another_programs),
    *(
        become("[" * 5000 + "]" * 5000),
        become('{"step": ' + "9" * 5000 + "}"),
        become("[]"),
        become('{"step": 2}'),
    ),
    *(become_another_step, become_endless, become_a_folder),
]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_the_one_before_is_used_and_said_so(self, tmp_path, damage):
        checkpoints = Checkpoints(tmp_path)
        first, second = save(checkpoints, 1, 2)
        damage(second)
        with pytest.warns(UserWarning, match="is damaged") as caught:
            assert_is(checkpoints.latest(), 1)
        (message,) = [str(warning.message) for warning in caught]
        assert str(tmp_path / "step-") in message
        assert message.endswith(f"Using {first.name} instead.")

    @pytest.mark.parametrize("damage", DAMAGES[:-1])
    def test_a_damaged_one_does_not_take_a_whole_ones_place(self, tmp_path, damage):
        save(Checkpoints(tmp_path), 1, 2)
        damage(next(tmp_path.glob("step-00000002*")))
        checkpoints = Checkpoints(tmp_path)  # as a resumed run would
        with pytest.warns(UserWarning, match="is damaged"):
            checkpoints.latest()
        save(checkpoints, 3)
        assert [name[:13] for name in names(tmp_path)] == ["step-00000001", "step-00000003"]
        assert_is(checkpoints.latest(), 3)

    def test_a_damaged_one_that_is_written_again_counts_again(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        truncate(save(checkpoints, 1, 2)[1])
        with pytest.warns(UserWarning, match="is damaged"):
            checkpoints.latest()
        save(checkpoints, 2, 3)
        assert [name[:13] for name in names(tmp_path)] == ["step-00000002", "step-00000003"]

    def test_nothing_whole_is_left(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        for path in save(checkpoints, 1, 2):
            truncate(path)
        before = names(tmp_path)
        with pytest.raises(
            ValueError, match=r"All are damaged \(step-00000002.*; step-00000001.* To start anew"
        ):
            checkpoints.latest()
        assert names(tmp_path) == before

    def test_a_disk_that_fails_is_no_damage(self, tmp_path, monkeypatch):
        """It may be back in a minute: nothing may be removed or begun anew until then."""
        checkpoints = Checkpoints(tmp_path)
        save(checkpoints, 1, 2)
        with monkeypatch.context() as failing:
            failing.setattr(Path, "read_bytes", lambda path: fail_with(errno.EIO, path))
            with pytest.raises(OSError, match="step-00000002"):
                checkpoints.latest()
        assert_is(checkpoints.latest(), 2)

    def test_never_unpickled(self, tmp_path):
        data = b"cos\nsystem\n(S'touch hacked'\ntR."
        (tmp_path / f"step-00000001-{sha256(data).hexdigest()[:12]}.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match="All are damaged"):
            Checkpoints(tmp_path).latest()
        assert not Path("hacked").exists()


class TestFullDisk:
    def check(self, folder, cure="Free some space"):
        """With little room in `folder`: a clear error, the checkpoint before intact, no litter."""
        checkpoints = Checkpoints(folder)
        (small,) = save(checkpoints, 1)
        with pytest.raises(DiskFullError, match=rf"step-00000002.* must fit on its disk.*{cure}, then"):
            checkpoints.save({"a": torch.zeros(500_000)}, facts(2))
        assert names(folder) == [small.name]
        assert_is(checkpoints.latest(), 1)
        save(checkpoints, 3)
        assert_is(checkpoints.latest(), 3)

    def test_a_real_one(self, tmp_path):
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to mount a small disk")
        try:
            self.check(tmp_path)
        finally:
            subprocess.run(["umount", tmp_path], check=True)

    def test_a_limit_on_file_sizes(self, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            self.check(tmp_path, "Raise the limit")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def test_of_the_first_checkpoint(self, tmp_path, monkeypatch):
        """There is nothing to resume from, and nobody is told so."""

        def fail(handle):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        checkpoints = Checkpoints(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(DiskFullError, match="then start the run again: it had no checkpoint yet"):
                save(checkpoints, 1)
        save(checkpoints, 1)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(DiskFullError, match="then resume: the checkpoints written before are intact"):
            save(checkpoints, 2)


# Imports once, then forks a run for every line that comes in: "<stage> <how many times to pass it before>".
# At that stage the run says where it is and waits for the kill, so that where the kill lands is certain.
RUN = """
import os, stat, sys, time, warnings
from pathlib import Path
import torch
from cmcl.training.checkpoint import Checkpoints, Facts
warnings.simplefilter("error")  # a kill must not even look like damage

def reach(stage):
    global left
    if stage == wanted:
        left -= 1
    if left < 0:
        print(stage, flush=True)
        time.sleep(60)

def fsync(handle, real=os.fsync):
    reach("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
    real(handle)

def write_bytes(path, data):
    with path.open("wb") as file:
        file.write(data[:len(data) // 2])
        file.flush()
        reach("half")
        file.write(data[len(data) // 2:])

def run(folder):
    checkpoints = Checkpoints(folder)
    last = checkpoints.latest()
    step = last.facts.step if last else 0
    print(os.getpid(), flush=True)
    while True:
        step += 1
        weights = {"weights": torch.full((50, 50), float(step)), "rng": torch.tensor([step % 256], dtype=torch.uint8)}
        checkpoints.save(weights, Facts(step=step, seconds=step / 10, recipe={}, seed=0, task=None, data="", epochs_below=[]))
        reach("saved")

os.fsync, Path.write_bytes = fsync, write_bytes
for line in sys.stdin:
    wanted, left = line.split()[0], int(line.split()[1])
    pid = os.fork()
    if not pid:
        run(Path(sys.argv[1]))
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


class TestKill:
    @pytest.fixture
    def runs(self, tmp_path):
        with python(RUN, tmp_path) as process:
            yield process

    def start(self, runs, stage, passes):
        """Starts a run; returns its pid once it is under way."""
        runs.stdin.write(f"{stage} {passes}\n")
        return int(runs.stdout.readline())

    def kill(self, runs, pid):
        os.kill(pid, signal.SIGKILL)
        assert runs.stdout.readline() == "dead\n"

    def test_at_every_stage_of_a_write(self, runs, tmp_path):
        choose = random.Random(0)
        step = 0  # the last that is on the disk
        for stage in ["half", "file", "folder", "saved"] * 4:
            passes = choose.randrange(4)
            pid = self.start(runs, stage, passes)
            assert runs.stdout.readline() == f"{stage}\n"
            self.kill(runs, pid)
            whole = stage in ("folder", "saved")  # the file was renamed already
            step += passes + (1 if whole else 0)
            assert len(list(tmp_path.glob("*.part"))) == (0 if whole else 1), (
                "the kill landed inside the write"
            )
            for part in tmp_path.glob("*.part"):  # as `RunFolder` does
                part.unlink()
            checkpoints = Checkpoints(tmp_path)
            if step:
                assert_is(checkpoints.latest(), step)
            assert len(names(tmp_path)) <= 3
        save(checkpoints, step + 1)
        assert_is(Checkpoints(tmp_path).latest(), step + 1)
        assert len(names(tmp_path)) == 2

    def test_at_random_moments(self, runs, tmp_path):
        choose = random.Random(1)
        save(Checkpoints(tmp_path), 1)
        step = 1
        for _ in range(10):
            pid = self.start(runs, "never", 0)
            time.sleep(choose.random() / 20)
            self.kill(runs, pid)
            last = Checkpoints(tmp_path).latest()
            assert last.facts.step >= step
            step = last.facts.step
            assert_is(last, step)


# Holds the lock, and has forked a worker as a data loader does.
HOLD = """
import os, sys, time
from pathlib import Path
from cmcl.training.checkpoint import locked
with locked(Path(sys.argv[1])):
    worker = os.fork()
    if worker:
        print(os.getpid(), worker, flush=True)
    time.sleep(60)
"""


class TestLock:
    def test_another_process_is_refused_until_the_first_dies(self, tmp_path):
        with python(HOLD, tmp_path) as holder:
            _, worker = map(int, holder.stdout.readline().split())
            refusal = f"{tmp_path} must be used by one run at a time. It is in use by another process"
            with pytest.raises(FolderInUseError, match=refusal), locked(tmp_path):
                pass
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # lives on, and has no part in the lock
            with locked(tmp_path):
                assert not (tmp_path / ".lock").read_bytes(), "nothing about this machine"

    def test_the_same_process_is_refused_too(self, tmp_path):
        folder = tmp_path / "new"
        with locked(folder), pytest.raises(FolderInUseError, match="in use by another"), locked(folder):
            pass
        with pytest.raises(ZeroDivisionError), locked(tmp_path / "new"):  # released, also by an error
            raise ZeroDivisionError
        with locked(tmp_path / "new"):
            pass


LOOPS = """
import signal, time
from cmcl.training.checkpoint import Signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # in case the tests run in the background of a shell
for _ in range(2):
    with Signals() as signals:
        print("ready", flush=True)
        while not signals.received:
            time.sleep(0.01)
        print(signals.received, "saved", flush=True)
try:
    with Signals() as signals:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
            if signals.received and not hasattr(signals, "seen"):
                print("asked", flush=True)
                signals.seen = True
except KeyboardInterrupt:
    print("at once", flush=True)
"""


class TestSignals:
    def test_signals_from_outside(self):
        with python(LOOPS) as loops:

            def after(number):
                loops.send_signal(number)
                return loops.stdout.readline()

            assert loops.stdout.readline() == "ready\n"
            assert after(signal.SIGINT) == "SIGINT saved\n"
            assert loops.stdout.readline() == "ready\n"
            assert after(signal.SIGTERM) == "SIGTERM saved\n"
            assert loops.stdout.readline() == "ready\n"
            assert after(signal.SIGINT) == "asked\n"
            assert after(signal.SIGINT) == "at once\n"
            assert loops.wait() == 0

    def test_repeated_and_mixed(self):
        with Signals() as signals:
            assert signals.received == ""
            signal.raise_signal(signal.SIGTERM)
            assert signals.received == "SIGTERM"
            signal.raise_signal(signal.SIGTERM)  # a scheduler may repeat itself
            signal.raise_signal(signal.SIGINT)  # the first of its kind
            assert signals.received == "SIGINT"

    def test_handlers_come_back(self):
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in numbers]
        with pytest.raises(ZeroDivisionError), Signals():
            raise ZeroDivisionError
        assert [signal.getsignal(number) for number in numbers] == before

    def test_in_another_thread_it_does_nothing(self):
        before = signal.getsignal(signal.SIGINT)
        seen = []

        def loop():
            with Signals() as signals:
                seen.append((signals.received, signal.getsignal(signal.SIGINT)))

        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
        assert seen == [("", before)]


class TestRunFolder:
    RECIPE = cmcl.Recipe(members=2, steps=4, momentum=0.9)
    OPTIONS = cmcl.Options(device="cpu", quiet=True)

    def state(self, inputs=2):
        return TrainState(cmcl.Ensemble(lambda: nn.Linear(inputs, 2), 2), self.RECIPE, 0, 2, 4)

    def folder(self, path, state, *, resume=False):
        folder = RunFolder(path, self.OPTIONS)
        with folder:
            folder.restore(state, resume, task=None, data="")
            folder.save(state)
        return folder

    def test_a_diverged_run_is_not_saved(self, tmp_path):
        state = self.state()
        state.monitor.losses[1] = torch.nan
        state.monitor.count_step(torch.tensor(0.5))
        state.step = 1
        with pytest.raises(cmcl.Diverged, match=r"member \[1\], .* at step 0"):
            self.folder(tmp_path, state)
        assert Checkpoints(tmp_path / "checkpoints").latest() is None

    def test_a_run_of_other_networks_is_not_resumed(self, tmp_path):
        """Two members differ in their weights and in their momentum."""
        self.folder(tmp_path, self.state())
        with pytest.raises(ValueError, match=r"Got another \S*weight\S*, and 3 more differences"):
            self.folder(tmp_path, self.state(inputs=3), resume=True)
