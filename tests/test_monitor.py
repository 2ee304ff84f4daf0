"""Telemetry worked out by hand, rows without gaps or doubles, and the alarm for dead members."""

import json
import math
import sys

import pytest
import torch

from cmcl._files import DiskFullError
from cmcl.objectives import confident_oracle_loss
from cmcl.training.monitor import Monitor, TelemetryFile

CPU = torch.device("cpu")
LN2 = math.log(2)


def h(p):
    """The entropy of (p, 1 - p)."""
    return -(p * math.log(p) + (1 - p) * math.log(1 - p))


def count(monitor, probs, targets, *, overlap=1, beta=1.0, ignore_index=None):
    """Count a batch of predictions, (M, B) probabilities of class 0."""
    p = torch.tensor(probs, dtype=torch.float64)
    logits = torch.stack([p, 1 - p], 2).log() + 5.0  # not log-probabilities
    targets = torch.tensor(targets)
    loss = confident_oracle_loss(logits, targets, beta=beta, overlap=overlap, ignore_index=ignore_index)
    monitor.count(loss, logits, targets, beta=beta, ignore_index=ignore_index)
    return loss


class TestByHand:
    """Two members, two classes. Probabilities of class 0, and in brackets the specialist of each example.

    The score of a member is task - KL. For a probability q of the true class, task = -ln q and
    KL = -ln 2 - (ln q + ln(1 - q)) / 2, so the score is ln 2 + (ln(1 - q) - ln q) / 2: it falls with q.
    """

    PROBS = ((0.9, 0.8, 0.3), (0.6, 0.5, 0.1))
    TARGETS = (0, 0, 1)  # true-class probabilities: [0.9] 0.6, [0.8] 0.5, 0.7 [0.9]

    def kl(self, q):
        return -LN2 - (math.log(q) + math.log(1 - q)) / 2

    def test_one_batch(self):
        monitor = Monitor(2, 2, 1, CPU)
        loss = count(monitor, self.PROBS, self.TARGETS)
        monitor.count_step(torch.tensor(2.0))
        assert loss.assignment.tolist() == [[True, True, False], [False, False, True]]
        row = monitor.row()
        task = -(math.log(0.9) + math.log(0.8) + math.log(0.9)) / 3
        kl = (self.kl(0.6) + self.kl(0.5) + self.kl(0.7)) / 3
        assert row["task"] == pytest.approx(task, rel=1e-6)
        assert row["kl"] == pytest.approx(kl, rel=1e-6)
        assert row["loss"] == pytest.approx(task + kl, rel=1e-6)
        assert row["specialist_entropy"] == pytest.approx((h(0.9) + h(0.8) + h(0.9)) / 3, rel=1e-6)
        assert row["nonspecialist_entropy"] == pytest.approx((h(0.6) + h(0.5) + h(0.7)) / 3, rel=1e-6)
        assert row["specialist_fraction"] == pytest.approx([2 / 3, 1 / 3])
        # member 0 learns both examples of class 0 and none of class 1
        assert row["specialist_fraction_by_class"] == [[1.0, 0.0], [0.0, 1.0]]
        assert row["gradient_norm"] == 2.0

    def test_two_batches_of_different_size(self):
        """Every example has the same weight; gradient norms have one per step."""
        monitor = Monitor(2, 2, 1, CPU)
        count(monitor, self.PROBS, self.TARGETS)
        monitor.count_step(torch.tensor(2.0))
        count(monitor, [[0.7], [0.9]], [0])  # specialist: member 1
        monitor.count_step(torch.tensor(4.0))
        row = monitor.row()
        assert row["specialist_fraction"] == [0.5, 0.5]
        assert row["specialist_fraction_by_class"] == [
            pytest.approx([2 / 3, 0]),
            pytest.approx([1 / 3, 1]),
        ]
        entropies = h(0.6) + h(0.5) + h(0.7) + h(0.7)
        assert row["nonspecialist_entropy"] == pytest.approx(entropies / 4, rel=1e-6)
        assert row["specialist_entropy"] == pytest.approx((3 * h(0.9) + h(0.8)) / 4, rel=1e-6)
        assert row["task"] == pytest.approx(-(3 * math.log(0.9) + math.log(0.8)) / 4, rel=1e-6)
        assert row["gradient_norm"] == 3.0
        monitor.reset()
        assert monitor.row()["specialist_fraction"] == [0.0, 0.0]

    def test_overlap_of_all(self):
        monitor = Monitor(2, 2, 2, CPU)
        count(monitor, self.PROBS, self.TARGETS, overlap=2)
        row = monitor.row()
        assert (row["specialist_fraction"], row["nonspecialist_entropy"], row["kl"]) == ([1.0, 1.0], 0, 0)

    def test_ignored_examples_have_no_specialist(self):
        monitor = Monitor(2, 1, 1, CPU)
        count(monitor, self.PROBS, [0, 9, 1], ignore_index=9)
        row = monitor.row()
        assert row["specialist_fraction"] == [0.5, 0.5]
        assert "specialist_fraction_by_class" not in row
        assert row["specialist_entropy"] == pytest.approx(h(0.9), rel=1e-6)
        assert row["nonspecialist_entropy"] == pytest.approx((h(0.6) + h(0.7)) / 2, rel=1e-6)

    def test_dense_entropy_is_the_mean_over_pixels(self):
        p = torch.tensor([[[0.9, 0.5]], [[0.4, 0.4]]])  # (M, B, pixels)
        logits = torch.stack([p, 1 - p], 2).log() + 5.0  # not log-probabilities
        targets = torch.zeros(1, 2, dtype=torch.long)
        monitor = Monitor(2, 1, 1, CPU)
        monitor.count(confident_oracle_loss(logits, targets, beta=1.0), logits, targets, beta=1.0)
        row = monitor.row()
        assert row["specialist_fraction"] == [1.0, 0.0]
        assert row["specialist_entropy"] == pytest.approx((h(0.9) + LN2) / 2, rel=1e-6)
        assert row["nonspecialist_entropy"] == pytest.approx(h(0.4), rel=1e-6)

    def test_a_class_that_is_masked_out(self):
        """Its logit is -inf: it adds nothing to the entropy, and an infinite KL that is not used is no divergence."""
        logits = torch.tensor([[[1.0, 1.0, -math.inf]], [[0.0, 3.0, -math.inf]]])  # (M, B, C)
        targets, monitor = torch.tensor([0]), Monitor(2, 3, 1, CPU)
        monitor.count(confident_oracle_loss(logits, targets, beta=0.0, overlap=1), logits, targets, beta=0.0)
        assert monitor.count_step(torch.tensor(1.0)) == 0
        assert monitor.row()["specialist_entropy"] == pytest.approx(LN2)
        assert monitor.diverged.tolist() == [math.inf, math.inf]

    def test_more_loss_of_the_same_examples(self):
        monitor = Monitor(2, 2, 1, CPU)
        loss = count(monitor, self.PROBS, self.TARGETS)
        monitor.count_more(torch.tensor(1.5), 3)
        assert monitor.row()["loss"] == pytest.approx(loss.total.item() + 1.5)


class TestDivergence:
    def step(self, monitor, value=1.0, norm=1.0):
        p = torch.tensor([[0.9], [0.6]])
        logits = (torch.stack([p, 1 - p], 2).log() + 5.0) * torch.tensor([1.0, value]).reshape(2, 1, 1)
        targets = torch.zeros(1, dtype=torch.long)
        loss = confident_oracle_loss(torch.nan_to_num(logits), targets, beta=1.0)
        loss = loss._replace(task=loss.task * torch.tensor([[1.0], [value]]), kl=loss.kl * value)
        monitor.count(loss, logits, targets, beta=1.0)
        monitor.count_step(torch.tensor(norm))

    def test_the_first_step_of_each_member(self):
        monitor = Monitor(2, 2, 1, CPU)
        for value in (1.0, 1.0, math.nan, math.nan):
            self.step(monitor, value)
        assert monitor.diverged.tolist() == [math.inf, 2.0]
        assert monitor.count_step(torch.tensor(1.0)) == 1

    def test_a_gradient_alone_is_of_all_members(self):
        monitor = Monitor(2, 2, 1, CPU)
        for norm in (1.0, math.inf, 1.0):
            self.step(monitor, norm=norm)
        assert monitor.diverged.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:.*under a tenth")
class TestDeadMembers:
    # 4 members, overlap 1: the fair share is 0.25, a tenth of it 0.025.
    def dead(self, monitor, fractions):
        row = {"specialist_fraction": fractions}
        monitor.find_dead_members(row)
        return row.get("dead_members", [])

    def test_after_three_epochs_and_once(self):
        monitor = Monitor(4, 1, 1, CPU)
        with pytest.warns(UserWarning, match="under a tenth") as seen:
            found = [self.dead(monitor, [0.5, 0.4, 0.08, 0.02]) for _ in range(6)]
        assert (found, len(seen)) == ([[], [], [3], [], [], []], 1)

    def test_again_only_after_it_recovered(self):
        monitor = Monitor(2, 1, 1, CPU)
        found = [self.dead(monitor, [1 - f, f]) for f in (0, 0, 0, 0, 0.3, 0, 0, 0.3, 0, 0, 0)]
        assert found == [[], [], [1], [], [], [], [], [], [], [], [1]]

    def test_the_border_and_the_overlap(self):
        for fraction, dead in ((0.05, []), (0.049, [1])):  # a tenth is not under a tenth
            monitor = Monitor(2, 1, 1, CPU)
            assert [self.dead(monitor, [0.9, fraction]) for _ in range(3)][-1] == dead
        for overlap, dead in ((1, [3]), (3, [2, 3])):  # 0.025 and 0.075
            monitor = Monitor(4, 1, overlap, CPU)
            assert [self.dead(monitor, [1.0, 0.93, 0.07, 0.0]) for _ in range(3)][-1] == dead


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    file = TelemetryFile(path)
    for step in (10, 20, 30):
        file.write({"epoch": step // 10, "step": step, "name": "é\u2028"})
    assert steps(path) == [10, 20, 30]
    return path


class TestFile:
    @pytest.mark.parametrize(("step", "kept"), [(0, []), (10, [10]), (25, [10, 20]), (99, [10, 20, 30])])
    def test_resumed_without_later_rows(self, written, step, kept):
        TelemetryFile(written, step=step).write({"epoch": 9, "step": 100})
        assert steps(written) == [*kept, 100]

    @pytest.mark.parametrize("cut", [1, 2, 9, 23])
    def test_a_torn_last_line(self, written, cut):
        written.write_bytes(written.read_bytes()[:-cut])
        TelemetryFile(written, step=30).write({"epoch": 4, "step": 40})
        assert steps(written) == [10, 20, *([30] if cut == 1 else []), 40]

    @pytest.mark.parametrize(
        "line",
        [
            b"\xff\xfe",
            b"7",
            b"null",
            b'{"loss": 1}',
            b'{"step": null}',
            b"[" * 9999,
            b'{"step": 1%s}' % (b"0" * 400),
        ],
    )
    def test_lines_that_are_no_rows(self, written, line):
        written.write_bytes(written.read_bytes() + line + b"\n")
        TelemetryFile(written, step=99)
        assert steps(written) == [10, 20, 30]

    def test_a_device_is_not_read(self, tmp_path):
        (tmp_path / "t.jsonl").symlink_to("/dev/zero")
        with pytest.raises(ValueError, match="t.jsonl must be a file"):
            TelemetryFile(tmp_path / "t.jsonl")

    def test_numbers_that_json_does_not_have(self, tmp_path):
        file = TelemetryFile(tmp_path / "t.jsonl")
        file.write({"epoch": 1, "loss": math.nan, "norms": {"a": [math.inf, 1.5]}, "wins": (-math.inf,)})
        found = json.loads((tmp_path / "t.jsonl").read_text(), parse_constant=pytest.fail)
        assert found == {"epoch": 1, "loss": None, "norms": {"a": [None, 1.5]}, "wins": [None]}

    def test_all_or_nothing(self, written, monkeypatch):
        def killed(handle):
            raise KeyboardInterrupt

        monkeypatch.setattr("os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            TelemetryFile(written, step=20)
        assert steps(written) == [10, 20, 30]

    def test_a_full_disk(self, written, monkeypatch):
        file = TelemetryFile(written, step=30)

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(written), "open", full)
        with pytest.raises(DiskFullError, match=r"telemetry.jsonl must fit on its disk.*Free some space"):
            file.write({"epoch": 6})


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own imports
class TestTensorBoard:
    def shown(self, folder):
        """What TensorBoard reads from its folder: {(name, step): value}."""
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        names = events.Tags()["scalars"]
        return {(name, event.step): event.value for name in names for event in events.Scalars(name)}

    def test_scalars_by_name_and_resumed(self, tmp_path):
        pytest.importorskip("tensorboard")
        path, board = tmp_path / "t.jsonl", tmp_path / "board"
        file = TelemetryFile(path, tensorboard=board)
        for epoch in (1, 2, 3):
            row = {"epoch": epoch, "seed": 4, "wins": [0.25, epoch], "kl": {"a": 2.0}, "top1": None}
            file.write(row | {"step": 5 * epoch})
        file.close()
        expected = {("wins/0", e): 0.25 for e in (1, 2, 3)} | {("wins/1", e): e for e in (1, 2, 3)}
        expected |= {("step", e): 5 * e for e in (1, 2, 3)}
        assert self.shown(board) == expected | {("kl/a", e): 2.0 for e in (1, 2, 3)}
        file = TelemetryFile(path, tensorboard=board, step=7)
        file.write({"epoch": 2, "wins": [0.25, 9.0]})
        file.close()
        assert {k: v for k, v in self.shown(board).items() if k[0] == "wins/1"} == {
            ("wins/1", 1): 1,
            ("wins/1", 2): 9,
        }

    def test_not_installed(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(ImportError, match="pip install tensorboard"):
            TelemetryFile(tmp_path / "t.jsonl", tensorboard=tmp_path)
