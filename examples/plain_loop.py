"""Your own PyTorch loop: mixed precision, a gradient scaler, gradient accumulation, a learning-rate schedule.

python examples/plain_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cmcl

PIECES = 2  # batches that one update is accumulated over


def data() -> tuple[TensorDataset, TensorDataset]:
    """Images (N, 1, 8, 8) in 0..1 and their digits: 1,500 to learn from, 297 to be tested on."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def network() -> nn.Module:
    """A member: any module will do."""
    head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10))
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), head)


def main(epochs: int = 10) -> float:
    """Train five members; returns the accuracy on the test images."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    train, test = data()
    loader = DataLoader(train, batch_size=32, shuffle=True)
    ensemble = cmcl.Ensemble(network, 5, share_after="1").to(device)
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    for _ in range(epochs):
        for step, (images, labels) in enumerate(loader, 1):
            with torch.autocast(device, dtype):
                logits = ensemble(images.to(device))  # (5, 32, 10)
                loss = cmcl.confident_oracle_loss(logits, labels.to(device))
            scaler.scale(loss.total / PIECES).backward()
            if step % PIECES == 0 or step == len(loader):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        schedule.step()
    answer = ensemble.predict(test.tensors[0])
    return 1 - cmcl.metrics.top1_error(answer.member_probs, test.tensors[1])


if __name__ == "__main__":
    accuracy = main()
    print(f"accuracy {accuracy:.3f}")
    assert accuracy > 0.92
