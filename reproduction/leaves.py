"""Images that nobody took: discs that hide one another, with the statistics of photographs and no data behind them.

Occlusion by objects of all sizes (dead leaves) gives the edges and the 1/f spectrum of natural images; what is
learned from them about photographs in general costs no privacy.
"""

import math

import torch

_LEAVES = 60
_LEAST_RADIUS = 4.0
_MARGIN = 8  # pixels beyond the border in which a leaf may still have its centre
_TEXTURE = 0.3  # of fractal noise over the leaves' even colours
# The principal axes of colours in photographs: brightness first, then yellow against blue, then green against magenta.
_COLOURS = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
_SPREADS = torch.tensor([1.0, 0.35, 0.15])


def dead_leaves(count: int, side: int, seed: int) -> torch.Tensor:
    """Return colour images of values in (-1, 1), shape (count, 3, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    images = _mix(torch.randn(count, 3, 1, 1, generator=generator)).expand(-1, -1, side, side)
    for _ in range(_LEAVES):
        inside = _leaf(count, side, generator)
        colour = _mix(torch.randn(count, 3, 1, 1, generator=generator))
        images = images * (1 - inside) + colour * inside
    noise = _mix(_fractal(count, side, generator))
    return torch.tanh((images + _TEXTURE * noise / noise.std()) / 2)


def _leaf(count: int, side: int, generator: torch.Generator) -> torch.Tensor:
    """Return one ellipse an image, 1 inside, 0 outside and between at the edge; radii r with density r^-3."""
    uniform = torch.rand(5, count, 1, 1, 1, generator=generator)
    radius = _LEAST_RADIUS * (1 - uniform[0] * (1 - side**-2)) ** -0.5
    across, down = (at * (side + 2 * _MARGIN) - _MARGIN for at in uniform[1:3])
    flat, angle = 0.3 + 0.7 * uniform[3], math.pi * uniform[4]
    places = torch.arange(side, dtype=torch.float32)
    x, y = places - across, places[:, None] - down
    along, over = x * angle.cos() + y * angle.sin(), (y * angle.cos() - x * angle.sin()) / flat
    inside: torch.Tensor = (radius - torch.hypot(along, over) + 0.5).clamp(0, 1)
    return inside


def _fractal(count: int, side: int, generator: torch.Generator) -> torch.Tensor:
    """Return noise whose amplitudes fall with the frequency; cut from a larger field, since that one is periodic."""
    field = 2 * side
    frequency = torch.hypot(torch.fft.fftfreq(field)[:, None], torch.fft.rfftfreq(field))
    frequency[0, 0] = 1 / (2 * field)
    white = torch.fft.rfft2(torch.randn(count, 3, field, field, generator=generator))
    noise: torch.Tensor = torch.fft.irfft2(white / frequency, s=(field, field))
    return noise[..., :side, :side]


def _mix(amounts: torch.Tensor) -> torch.Tensor:
    """Turn amounts of the principal axes into red, green and blue."""
    axes = _COLOURS / _COLOURS.norm(dim=1, keepdim=True) * _SPREADS[:, None]
    return torch.einsum("naij,ac->ncij", amounts, axes)
