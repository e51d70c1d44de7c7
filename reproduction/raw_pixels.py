"""The preprocessing of the paper's authors: pixels that were never divided by 255."""

import torch
from torch import nn

from d2pfed.learning import Model


def standardised(images: torch.Tensor) -> torch.Tensor:
    """Return fractions as bytes that are standardised as if they were fractions, up to 827."""
    return (255 * images - 0.1307) / 0.3081


class _RawPixels(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return standardised(images)


def on_raw_pixels(model: Model) -> Model:
    """Return a sequence of layers behind standardised bytes.

    The paper's authors feed their network so.
    """
    return Model(nn.Sequential(_RawPixels(), *model.module.children()))
