"""Fixed features of a grey image: how strong edges of each direction are in each part of it.

Nothing in them is learned, so they cost no privacy, no noise and no upload, and what is learned behind them can be
small (histograms of oriented gradients: Dalal and Triggs, 2005).
"""

import math

import torch
from torch import nn

CELLS = 7  # on a side
DIRECTIONS = 8
_BLUR = 0.8  # pixels: the scale at which edges are looked for
_NORM = 3.0  # of an image's features; with it the learning rates of pixels serve features too


class OrientedEdges(nn.Module):
    """Turns images (rows, 1, side, side) into features (rows, DIRECTIONS, CELLS, CELLS)."""

    smooth: torch.Tensor
    slope: torch.Tensor
    pool: torch.Tensor
    compass: torch.Tensor

    def __init__(self, side: int) -> None:
        super().__init__()
        pixels, width = torch.arange(float(side)), side / CELLS
        centres = (torch.arange(float(CELLS)) + 0.5) * width - 0.5
        angles = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)
        smooth = _bells(pixels, pixels, _BLUR)
        fixed = {
            "smooth": smooth,
            "slope": smooth * (pixels - pixels[:, None]) / _BLUR**2,
            "pool": _bells(centres, pixels, width / 2),
            "compass": torch.stack([angles.cos(), angles.sin()])[:, :, None, None],
        }
        for name, value in fixed.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return each image's features, centred and of one length; of a blank image zeros."""
        across = self.smooth @ images @ self.slope.T
        down = self.slope @ images @ self.smooth.T
        facing = (across * self.compass[0]).addcmul_(down, self.compass[1]).relu_()
        strength = (self.pool @ facing @ self.pool.T).sqrt()  # the root evens out thin and bold strokes
        centred = strength - strength.mean((-3, -2, -1), keepdim=True)
        length = centred.square().sum((-3, -2, -1), keepdim=True).sqrt()
        return centred * (_NORM / length.clamp(min=1e-6))


def _bells(centres: torch.Tensor, pixels: torch.Tensor, width: float) -> torch.Tensor:
    """Return a row of Gaussian weights around each centre."""
    heights = torch.exp(-((pixels - centres[:, None]) / width).square() / 2)
    heights[heights < 1e-6] = 0  # nothing to see in them, and sums of the tiniest floats take ten times as long
    return heights / (width * math.sqrt(2 * math.pi))
