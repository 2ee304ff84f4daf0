"""The ensemble in a LightningModule: nothing but the loss is ours.

python examples/lightning_loop.py
"""

import lightning
import torch
from plain_loop import data, network
from torch import Tensor
from torch.utils.data import DataLoader

import cmcl


class Specialists(lightning.LightningModule):
    """Trains an ensemble, and logs who learns how much."""

    def __init__(self, ensemble: cmcl.Ensemble, overlap: int = 3) -> None:
        super().__init__()
        self.ensemble, self.overlap = ensemble, overlap

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        loss = cmcl.confident_oracle_loss(self.ensemble(images), labels, overlap=self.overlap)
        self.log_dict({f"learned_by/{m}": v.float().mean() for m, v in enumerate(loss.assignment)})
        return loss.total

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """The accuracy on a batch; Lightning averages."""
        images, labels = batch
        answer = self.ensemble.predict(images)
        self.log("accuracy", 1 - cmcl.metrics.top1_error(answer.member_probs, labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimiser."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(epochs: int = 10, **options: object) -> float:
    """Train five members; returns the accuracy on the test images."""
    lightning.seed_everything(0, verbose=False)
    train, test = data()
    model = Specialists(cmcl.Ensemble(network, 5, share_after="1"))
    trainer = lightning.Trainer(max_epochs=epochs, accumulate_grad_batches=2, logger=False, **options)
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
    (scores,) = trainer.test(model, DataLoader(test, batch_size=100), verbose=False)
    return scores["accuracy"]


if __name__ == "__main__":
    accuracy = main(enable_checkpointing=False)
    print(f"accuracy {accuracy:.3f}")
    assert accuracy > 0.92
