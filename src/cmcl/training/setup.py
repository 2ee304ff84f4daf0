"""What is decided before the first step: device, precision, layout, and the data as the networks see them.

N examples, M members.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.arrays import looks_channels_last
from ..data.batches import epoch_seed
from ..data.dataset import Dataset, split_validation, stratified_subset
from ..data.transforms import MeanStd
from ..ensemble import Ensemble
from ..telling import private_torch, tell
from .config import Options

Data = Dataset | tuple[Tensor, Tensor] | DataLoader[Any]


def find_device(name: str) -> torch.device:
    """The device of that name; "auto": a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} GPU" if torch.cuda.device_count() else "no GPU"
        raise ValueError(
            f"device must be one that torch can use. Got {name!r}, and torch finds {found}. Use 'cpu'."
        )
    return device


@contextmanager
def settings(options: Options, seeds: Sequence[int]) -> Iterator[None]:
    """Random generators of our own, kernels fast or deterministic; afterwards all is as it was."""
    cuda = find_device(options.device).type == "cuda"
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    compiled = cuda if options.compile is None else options.compile
    compiling = compiler_settings() if compiled else nullcontext()
    # generators, streams and graphs are those of the current device
    current = torch.cuda.device(find_device(options.device)) if cuda else nullcontext()
    with compiling, current, torch.random.fork_rng([torch.cuda.current_device()] if cuda else []):
        if cuda:
            torch.cuda.manual_seed(epoch_seed(seeds[0], -1))
        if cuda and options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch insists on it
        torch.backends.cudnn.benchmark = not options.deterministic
        if options.deterministic and not before[1]:  # asking for what holds already loads torch's compiler
            torch.use_deterministic_algorithms(True)
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"the GPU's memory must hold the data, all members and one batch. {error} Lower batch_size "
                "or members, raise accumulate, train fewer seeds together, or pass a DataLoader; at the end "
                "of an epoch, lower Options.evaluation_batch."
            ) from error
        finally:
            torch.backends.cudnn.benchmark = before[0]
            if torch.are_deterministic_algorithms_enabled() != before[1]:
                torch.use_deterministic_algorithms(before[1])


@contextmanager
def compiler_settings() -> Iterator[None]:
    """What torch's compiler must know of us.

    Every recipe is a graph of its own, and one process may train many: torch would stop compiling at 8. The
    backward pass is compiled with the forward pass, so that what fails there, too, can run uncompiled; it may
    not reuse what is saved for it, because adversarial training goes back twice.
    """
    with (
        _patched("torch._dynamo.config", recompile_limit=256),
        _patched("torch._functorch.config", force_non_lazy_backward_lowering=True, donated_buffer=False),
    ):
        yield


def _patched(path: str, **values: Any) -> AbstractContextManager[Any]:
    """A private config module of torch with other values; those that this torch does not have stay out."""
    config = private_torch(path, None)  # slow to import, and not there before the first compilation
    known = {key: value for key, value in values.items() if private_torch(f"{path}.{key}", None) is not None}
    return config.patch(**known) if config is not None and known else nullcontext()


def limited(train: Data, count: int | None) -> Data:
    """What `recipe.subset` leaves of a `Dataset`; nothing to do where the caller saw to it."""
    if count is None or (not isinstance(train, DataLoader) and len(tensors(train)[0]) == count):
        return train
    if not isinstance(train, Dataset):
        raise TypeError(f"train must be a Dataset for recipe.subset. Got {type(train).__name__}.")
    return stratified_subset(train, count)


def hold_out(train: Data, fraction: float) -> tuple[Data, Data | None]:
    """What to train on, and what to choose by: a stratified share of a `Dataset`."""
    if not fraction:
        return train, None
    if not isinstance(train, Dataset):
        raise TypeError(f"train must be a Dataset for recipe.validation > 0. Got {type(train).__name__}.")
    return split_validation(train, fraction)


def place(ensembles: Sequence[Ensemble], train: Data, device: torch.device) -> None:
    """Ensembles on the device, in the layout its convolutions like, with class names and a transform."""
    for ensemble in ensembles:
        ensemble.to(device)
        if isinstance(train, Dataset):
            names = tuple(map(str, train.classes))
            unnamed = names == tuple(map(str, range(len(names))))  # numbers are the names of what has none
            ensemble.classes = None if unnamed else names
        if device.type == "cuda":
            ensemble.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if isinstance(train, DataLoader) or tensors(train)[0].dtype != torch.uint8:
        return
    if not isinstance(train, Dataset) and looks_channels_last(train[0]):
        tell(
            f"images of shape {tuple(train[0].shape)} look like channels last, and are taken for (N,C,H,W). "
            "If the channels are the last axis, pass images.permute(0, 3, 1, 2)."
        )
    transform = ensembles[0].transform or MeanStd().fit(train if isinstance(train, Dataset) else train[0])
    for ensemble in ensembles:
        ensemble.transform = transform


def tensors(data: Dataset | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Images (N, ...) and targets (N, ...)."""
    return (data.images, data.targets) if isinstance(data, Dataset) else data
