"""Small networks of the kinds that people bring: look-alikes of well-known ones, in plain torch.

Each entry of KINDS: (network, an input batch, a layer to share after, what shareable_layers suggests).
"""

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    """Of a ResNet: one ReLU that is called twice, a skip, a projection where the size halves."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        identity = x
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


class SqueezeExcitation(nn.Module):
    """Looks at all positions, then weighs the channels."""

    def __init__(self, width):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x):
        return torch.sigmoid(self.fc2(F.silu(self.fc1(self.avgpool(x))))) * x


class MBConv(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        wide = 2 * inputs
        self.block = nn.Sequential(
            nn.Sequential(nn.Conv2d(inputs, wide, 1), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)),
            nn.Sequential(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.BatchNorm2d(wide), nn.SiLU()),
            SqueezeExcitation(wide),
            nn.Sequential(nn.Conv2d(wide, outputs, 1), nn.BatchNorm2d(outputs)),
        )
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.block(x) if self.skips else self.block(x)


class EfficientNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU()),
            MBConv(8, 8),
            MBConv(8, 12, 2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, classes))

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class Permute(nn.Module):
    def __init__(self, *order):
        super().__init__()
        self.order = order

    def forward(self, x):
        return x.permute(self.order)


class CNBlock(nn.Module):
    """Of a ConvNeXt: depthwise convolution, then channels last, a layer scale, a skip."""

    def __init__(self, width):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
            Permute(0, 3, 1, 2),
        )
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x):
        return x + self.layer_scale * self.block(x)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 4, 4), LayerNorm2d(8)),
            nn.Sequential(CNBlock(8), CNBlock(8)),
            nn.Sequential(LayerNorm2d(8), nn.Conv2d(8, 12, 2, 2)),
            nn.Sequential(CNBlock(12)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(LayerNorm2d(12), nn.Flatten(1), nn.Linear(12, classes))

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)))


class EncoderBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask=None):
        h = self.ln_1(x)
        h, _ = self.self_attention(h, h, h, key_padding_mask=mask, need_weights=False)
        x = x + h
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """A class token that is expanded to the batch, a position embedding, sizes that are checked."""

    def __init__(self, classes=4):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 8, 8, 8)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, 8))
        self.blocks = nn.ModuleList([EncoderBlock(8), EncoderBlock(8)])
        self.ln = nn.LayerNorm(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        n, _, h, w = x.shape
        torch._assert(h == 32, f"height must be 32. Got {h}.")
        x = self.conv_proj(x).reshape(n, 8, (h // 8) * (w // 8)).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(n, -1, -1), x], 1) + self.pos_embedding
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)[:, 0])


class TutorialCNN(nn.Module):
    """As tutorials write it: pooling and activations are functions."""

    def __init__(self, classes=4):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 8, 5), nn.Conv2d(8, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 25, 16), nn.Linear(16, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.max_pool2d(F.relu(self.conv3(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.5, self.training))


class Words(nn.Module):
    """A transformer on token ids, 0 for padding."""

    def __init__(self, classes=4):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.blocks = nn.ModuleList([EncoderBlock(8), EncoderBlock(8)])
        self.head = nn.Linear(8, classes)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, padding)
        kept = (~padding).unsqueeze(-1)
        return self.head((x * kept).sum(1) / kept.sum(1))


class UNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.bottom = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.up2 = nn.ConvTranspose2d(8, 8, 2, 2)
        self.merge2 = nn.Conv2d(16, 4, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(4, 4, 2, 2)
        self.out = nn.Conv2d(8, classes, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(self.pool(first))
        y = self.up2(self.bottom(second))
        y = self.up1(F.relu(self.merge2(torch.cat([y, second], 1))))
        return self.out(torch.cat([y, first], 1))


def mlp(classes=4):
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, classes)
    )


def conv1d(classes=4):
    return nn.Sequential(
        nn.Conv1d(2, 6, 5, padding=2),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(6, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


def images(n=3):
    return torch.randn(n, 3, 32, 32)


def vectors(n=3):
    return torch.randn(n, 6)


def series(n=3):
    return torch.randn(n, 2, 20)


def words(n=3):
    tokens = torch.randint(1, 20, (n, 7))
    tokens[1::2, 4:] = 0  # padding
    return tokens


class SamePadding(nn.Conv2d):
    """Pads by a size that it looks at in Python, which torch.fx cannot follow."""

    def forward(self, x):
        short = [max((-(-n // s) - 1) * s + 3 - n, 0) for n, s in zip(x.shape[-2:], self.stride, strict=True)]
        return super().forward(F.pad(x, (0, short[1], 0, short[0])) if max(short) > 0 else x)


class PaddedCNN(nn.Module):
    """Of a converted EfficientNet: the network can be traced, its convolutions cannot."""

    def __init__(self, classes=4):
        super().__init__()
        self.conv1, self.act1 = SamePadding(3, 6, 3, bias=False), nn.SiLU(inplace=True)
        self.conv2, self.act2 = SamePadding(6, 8, 3, stride=2, bias=False), nn.SiLU(inplace=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.act2(self.conv2(self.act1(self.conv1(x))))
        return self.head(x.mean((2, 3)))


KINDS = {
    "resnet": (ResNet, images, "layer1", "relu"),
    "efficientnet": (EfficientNet, images, "features.1", "features.2.block.0"),
    "convnext": (ConvNeXt, images, "features.1", "features.2.0"),
    "vit": (ViT, images, "blocks.0", "blocks.0"),
    "tutorial cnn": (TutorialCNN, images, "conv2", "conv2"),
    "mlp": (mlp, vectors, "1", "1"),
    "1-d cnn": (conv1d, series, "2", "2"),
    "words": (Words, words, "blocks.0", "blocks.0"),
    "padded cnn": (PaddedCNN, images, "act1", "act1"),
    "u-net": (UNet, images, "bottom", "down1"),
}
