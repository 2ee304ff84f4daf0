"""A loop with Accelerate, on one device or many: `accelerate launch examples/accelerate_loop.py`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from plain_loop import data, network
from torch.utils.data import DataLoader

import cmcl


def main(epochs: int = 10, **options: object) -> float:
    """Train five members; returns the accuracy on the test images."""
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    set_seed(0)
    train, test = data()
    ensemble = cmcl.Ensemble(network, 5, share_after="1")
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.01)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    test_loader = DataLoader(test, batch_size=100)
    model, optimizer, loader, test_loader = accelerator.prepare(ensemble, optimizer, loader, test_loader)
    for _ in range(epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                logits = model(images)  # (5, 32, 10)
                loss = cmcl.confident_oracle_loss(logits, labels)
                accelerator.backward(loss.total)
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
    ensemble = accelerator.unwrap_model(model)
    right = []
    for images, labels in test_loader:
        answer = ensemble.predict(images).probs.argmax(1)
        right.append(accelerator.gather_for_metrics(answer == labels))
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    accuracy = main()
    print(f"accuracy {accuracy:.3f}")
    assert accuracy > 0.92
