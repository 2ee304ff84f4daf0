"""A step in a CUDA graph, recorded once and replayed."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import first_line
from .step import Step


class Captured:
    """A step in a CUDA graph: what was recorded once is replayed, without Python and without launches.

    The calls that warm it up (compilation, autotuning) leave no trace: weights, optimiser, sums and random
    states are put back, also if the step cannot be captured.
    """

    def __init__(self, step: Step, *, warm_up: int = 3) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # detached: a clone with a gradient would tie the weights to the stream it was made on
        kept, random = [t.detach().clone() for t in step.state()], torch.cuda.get_rng_state()
        try:
            self._warm_up(step, kept, warm_up)
            self._record(step)
        except BaseException:
            _renew_generator()
            raise
        finally:
            torch.cuda.set_rng_state(random)
            _put_back(step, kept)

    def _warm_up(self, step: Step, kept: list[Tensor], times: int) -> None:
        """Each call takes the same batch: there may be no other one left in this epoch."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        buffers = step.buffers()
        with torch.cuda.stream(stream):
            for _ in range(times):
                step()
                check_in_place(buffers, step.buffers())
                _put_back(step, kept)
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, step: Step) -> None:
        # thread_local: what other threads do (the compiler's, a data loader's) does not spoil the recording
        # The outer context brings the current stream back, which a failed capture does not.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self.graph, capture_error_mode="thread_local"),
        ):
            step()

    def __call__(self) -> None:
        """Replay."""
        self.graph.replay()


def check_in_place(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """A graph reads and writes the tensors it was recorded with."""
    if any(old is not new for old, new in zip(before, after, strict=True)):
        raise RuntimeError(
            "a network's forward puts another tensor in the place of a buffer; write into it, by copy_"
        )


def captured(step: Step) -> Step | Captured:
    """The step in a graph; as it is, with a warning that says why, if it cannot be captured."""
    try:
        return Captured(step)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = first_line(error.__context__ or error)  # ending a failed capture is an error of its own
        warnings.warn(f"the step runs without a CUDA graph, and slower: {reason}", stacklevel=4)
        step.one_stream()
        return step


@torch.no_grad()
def _put_back(step: Step, kept: list[Tensor]) -> None:
    for tensor, value in zip(step.state(), kept, strict=True):
        tensor.copy_(value)


def _renew_generator() -> None:
    """Give CUDA's generator a state of its own: a failed capture leaves the old one waiting for its graph."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
