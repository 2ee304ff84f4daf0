"""Runs of one's own on digits, trained for two steps and recorded."""

import torch
from torch import nn

import cmcl


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def recorded(folder, network, method, *, members=3, task=None, seed=0, images=None, **settings):
    train, test = (cmcl.data.load("digits", split=split) for split in ("train", "test"))
    train = train[:images]
    torch.manual_seed(0)
    ensemble = cmcl.Ensemble(network, members, **settings)
    recipe = cmcl.Recipe(method=method, members=members, overlap=1, steps=2, batch_size=16, optimizer="adam")
    options = cmcl.Options(quiet=True)
    result = cmcl.fit(ensemble, train, recipe=recipe, out=folder, task=task, seed=seed, options=options)
    return cmcl.record(folder, ensemble, test, recipe=recipe, result=result)
