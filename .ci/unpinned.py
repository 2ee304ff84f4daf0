"""Run the first Python block of the README, then `fit` with feature sharing: python unpinned.py README.md."""

import re
import sys
import warnings
from pathlib import Path

import torch

import cmcl

warnings.simplefilter("error", FutureWarning)  # what the newest torch is about to remove
block = re.search(r"```python\n(.*?)```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.DOTALL)
assert block, "the README has a Python block"
names: dict[str, float] = {}
exec(compile(block[1], sys.argv[1], "exec"), names)
assert names["top1"] < 15, f"the README's ensemble makes {names['top1']:.1f} % errors"

torch.manual_seed(0)
images, labels = torch.randn(256, 1, 8, 8), torch.randint(4, (256,))
images[torch.arange(256), 0, labels, labels] += 8.0


def network() -> torch.nn.Module:
    """A convolutional network that is split by tracing."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 4),
    )


recipe = cmcl.Recipe(
    members=3, overlap=2, labels="sampled", epochs=8, batch_size=32, optimizer="adam", lr=0.01
)
ensemble = cmcl.Ensemble(network, 3, share_after="2")
cmcl.fit(ensemble, (images, labels), recipe=recipe, options=cmcl.Options(quiet=True))
ensemble.save("saved")
again = cmcl.load("saved", network=network)
probs = again.predict(images).member_probs
assert probs.equal(ensemble.predict(images).member_probs), "a loaded ensemble predicts the same"
error = cmcl.metrics.top1_error(probs, labels)
assert error < 0.3, f"fit with share_after leaves {error:.1%} errors on its training data"
