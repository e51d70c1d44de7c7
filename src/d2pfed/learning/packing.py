"""What is sent to a worker process, as bytes: tensors are copied, each storage once.

Torch would share each tensor through an open file of its own, and a process may hold only so many.
"""

from io import BytesIO
from typing import Any

import torch


def packed(value: object) -> bytes:
    """Return the bytes that `unpacked` takes in another process of this program."""
    whole = BytesIO()
    torch.save(value, whole)
    return whole.getvalue()


def unpacked(data: bytes) -> Any:  # noqa: ANN401 - whatever was packed
    """Return what was packed; for bytes of this program itself."""
    return torch.load(BytesIO(data), weights_only=False)
