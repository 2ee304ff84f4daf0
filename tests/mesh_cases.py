"""Trainings for test_mesh.py, by `torchrun ... mesh_cases.py DEVICE FOLDER CASE...`.

Process 0 writes FOLDER/CASE--MESH.pt, for every mesh of that many processes.
"""

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cmcl import Ensemble, Options, Recipe, fit
from cmcl.training import loop
from cmcl.training.config import Augment
from cmcl.training.mesh import Mesh, launched, rank

M, CLASSES, N, STEPS = 5, 4, 50, 20
RECIPE = Recipe(members=M, overlap=3, batch_size=12, steps=STEPS, lr=0.05, weight_decay=1e-3, sharing=False)
SHARED = replace(RECIPE, sharing=True, labels="sampled", samples=2)
MESHES = {
    1: ["members=1,data=1"],
    2: ["members=2,data=1", "members=1,data=2"],
    4: ["members=4,data=1", "members=2,data=2", "members=1,data=4"],
}


class Plain(nn.Module):
    """A convolution, shared after it, and two layers."""

    norm = nn.Identity

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), self.norm(4), nn.ReLU())
        self.trunk = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.Unflatten(1, (4, 4)), self.norm(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(16, CLASSES),
        )  # fmt: skip

    def forward(self, x):
        return self.trunk(self.stem(x))


class AnyNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of inputs of any number of axes."""

    def _check_input_dim(self, x):
        pass


class Normed(Plain):
    """With batch normalisation."""

    norm = AnyNorm


class Synced(Plain):
    """With batch normalisation that asks for the statistics of all processes."""

    norm = nn.SyncBatchNorm


class Dropped(Plain):
    """With dropout."""

    norm = staticmethod(lambda channels: nn.Dropout(0.3))


def ensemble(network=Plain, *, sharing=False, seed=0):
    torch.manual_seed(seed)
    return Ensemble(network, M, share_after="stem" if sharing else None)


def data(n=N, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 1, 6, 6, generator=generator)
    targets = torch.arange(n) % CLASSES
    images[:, 0, 0, :] += targets[:, None]
    return images, targets


def loader(batch_size, n=N):
    return DataLoader(TensorDataset(*data(n)), batch_size, shuffle=True)


# Of each case: the recipe, the network, the training data, more for `fit`.
CASES = {
    "ie": (replace(RECIPE, method="ie"), Plain, data(), {}),
    "mcl": (replace(RECIPE, method="mcl", overlap=1), Plain, data(), {}),
    "cmcl-shared-sampled": (SHARED, Plain, data(), {}),
    "uneven-loader": (replace(SHARED, steps=None, epochs=4.0, batch_size=11), Plain, loader(11, 48), {}),
    "batchnorm": (replace(SHARED, labels="exact"), Normed, data(), {}),
    "syncbatchnorm": (replace(SHARED, labels="exact"), Synced, data(), {}),
    "accumulated": (replace(SHARED, batch_size=10, accumulate=2, clip_norm=0.5), Plain, data(), {}),
    "relaxed": (replace(RECIPE, rule="relaxed", evolve=0.5, warm_start=1, epochs=5, steps=None), Plain, data(), {}),
    "annealed": (replace(RECIPE, rule="annealed", overlap=1, beta=0.5), Plain, data(), {}),
    "adam": (replace(SHARED, optimizer="adamw", lr=0.01, schedule="cosine"), Plain, data(), {}),
    "muon": (replace(SHARED, optimizer="muon", lr=0.01), Plain, data(), {}),
    "ema": (replace(SHARED, ema=0.2), Normed, data(), {}),
    "augmented": (replace(RECIPE, augment=Augment(flip=True, crop=1, mixup=0.4, jitter=0.1)), Plain, data(), {}),
    "adversarial": (replace(RECIPE, method="ie", adversarial=0.05), Normed, data(), {}),
    "auto": (replace(RECIPE, overlap="auto"), Plain, data(), {}),
    "dropout": (SHARED, Dropped, data(), {}),
    "bf16": (SHARED, Plain, data(), {"precision": "bf16"}),
}  # fmt: skip


def train(case, mesh=None, *, out=None, resume=False, **options):
    """The rows, the errors and the weights of a case."""
    recipe, network, train_data, more = CASES[case]
    own = ensemble(network, sharing=recipe.sharing)
    settings = Options(quiet=True, device="cpu", mesh=mesh, evaluation_batch=7, evaluate_every=2, **more)
    result = fit(
        own,
        train_data,
        recipe=recipe,
        seed=3,
        test=data(33, seed=2),
        out=out,
        resume=resume,
        options=replace(settings, **options),
    )
    kept = {name: getattr(result, name) for name in ("rows", "scores", "steps", "overlap_errors")}
    return kept | {"weights": own.state_dict()}


@contextmanager
def counted():
    """What the run inside the block has shipped, and what its plan expected of a step."""
    check, kept = loop.preflight, {}

    class Counted(Mesh):
        def __init__(self, *given):
            super().__init__(*given)
            kept["mesh"] = self

    def remember(*given, **named):
        kept["plan"] = check(*given, **named)
        return kept["plan"]

    loop.preflight, loop.Mesh = remember, Counted
    yield kept
    loop.preflight, loop.Mesh = check, Mesh


def on_gpu():
    """How a case trains on a GPU, alone or in several processes, to be comparable: float32, without a graph."""
    torch.backends.cudnn.allow_tf32 = False
    return {
        "device": "cuda",
        "precision": "float32",
        "deterministic": True,
        "capture": False,
        "compile": False,
    }


def main(device, folder, *cases):
    options = on_gpu() if device == "cuda" else {}
    for case in cases:
        for mesh in MESHES[launched()]:
            with counted() as kept:
                outcome = train(case, mesh, out=Path(folder) / f"{case}--{mesh}", **options)
            outcome["bytes"] = kept["mesh"].shipped, kept["plan"].traffic.total
            if rank() == 0:
                torch.save(outcome, Path(folder) / f"{case}--{mesh}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
