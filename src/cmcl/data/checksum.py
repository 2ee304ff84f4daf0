"""Checksums of tensors: of what they hold, never of the files they came from."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 26  # bytes hashed at a time, so that a set on the GPU is not copied over whole


def tensor_checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        # An empty tensor cannot be viewed as bytes, and has none to hash.
        for chunk in torch.split(tensor.flatten().view(torch.uint8), _CHUNK) if tensor.numel() else ():
            digest.update(chunk.cpu().numpy().data)
    return digest.hexdigest()


def json_checksum(value: Any) -> str:
    """sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
