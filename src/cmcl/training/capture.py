"""A step in a CUDA graph, recorded once and replayed."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from ..telling import first_line
from .step import Step


class Captured:
    """A step in a CUDA graph: what was recorded once is replayed, without Python and without launches.

    The calls that warm it up (compilation, autotuning) leave no trace: weights, optimiser, sums and random
    states are put back, also if the step cannot be captured.
    """

    def __init__(self, step: Step, *, warm_up: int = 3) -> None:
        self.graph = torch.cuda.CUDAGraph()
        before, random = Before(step), torch.cuda.get_rng_state()
        try:
            self._warm_up(step, before, warm_up)
            self._record(step)
        except BaseException:
            _renew_generator()
            raise
        finally:
            torch.cuda.set_rng_state(random)
            before.put_back()

    def _warm_up(self, step: Step, before: "Before", times: int) -> None:
        """Each call takes the same batch: there may be no other one left in this epoch."""
        stream, buffers = torch.cuda.Stream(), step.buffers()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(times):
                    step()
                    check_in_place(buffers, step.buffers())
                    before.put_back()
        finally:  # what is still under way must not come after what is put back
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


class Before:
    """Everything that a step changes as it was, to be put back."""

    def __init__(self, step: Step) -> None:
        modules = [module for ensemble in step.ensembles for module in ensemble.modules()]
        self.buffers = [(m._buffers, name, buffer) for m in modules for name, buffer in m._buffers.items()]
        # detached: a clone with a gradient would tie the weights to the stream it was made on
        self.values = [(tensor, tensor.detach().clone()) for tensor in step.state()]

    @torch.no_grad()
    def put_back(self) -> None:
        """The same tensors in their places, with the same values."""
        for buffers, name, buffer in self.buffers:
            buffers[name] = buffer
        for tensor, value in self.values:
            tensor.copy_(value)


def check_in_place(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """A graph reads and writes the tensors it was recorded with."""
    replaced = [name for name in {**before, **after} if before.get(name) is not after.get(name)]
    if replaced:
        raise RuntimeError(
            f"the network's forward puts another tensor in the place of its buffer {replaced[0]!r}; write "
            "into it, by copy_"
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


def _renew_generator() -> None:
    """Give CUDA's generator a state of its own: a failed capture leaves the old one waiting for its graph."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
