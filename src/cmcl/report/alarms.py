"""Members that won next to nothing for some epochs, as the telemetry noted: the page must not hide them."""

from collections.abc import Sequence

from .gather import Run

CURE = (
    "A member that wins no examples learns nothing, and the ensemble is smaller than it looks. Try a larger "
    "overlap, a smaller beta or a warm start (a few epochs as an independent ensemble)."
)


def alarms(runs: Sequence[Run]) -> list[str]:
    """For each run that had such members, which and since when."""
    found = []
    for run in runs:
        since = {member: row["epoch"] for row in run.rows for member in row.get("dead_members", [])}
        told = [_told(run, member, epoch) for member, epoch in sorted(since.items())]
        found += [f"{run.label}: {'; '.join(told)}."] if told else []
    return found


def _told(run: Run, member: int, epoch: float) -> str:
    text = f"member {member} won next to nothing, noted in epoch {epoch:g}"
    return (
        f"{text}, and recovered later" if _recovered(run, member, epoch) else f"{text} and not mended since"
    )


def _recovered(run: Run, member: int, epoch: float) -> bool:
    """Whether it wins a tenth of its fair share or more at the end, which is what the alarm asks."""
    rates = run.rows[-1].get("win_rates") or []
    later = run.rows[-1]["epoch"] > epoch and member < len(rates)
    return later and rates[member] >= sum(rates) / len(rates) / 10
