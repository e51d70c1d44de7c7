"""What a consortium can do: train together privately, pool its data, keep to itself, or do without privacy.

All train the same linear layer by the same number of steps with the same learning rate and expected batch, from zero.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import d2pfed
from benchmarks.consortium.data import SILOS, Split
from d2pfed.accounting import Unit

COLLUDERS = 6  # of 20 silos: a third, rounded down
BATCH = 256  # most records that are expected in a step, over all silos
CLIP = 1.0
LR = {"patients": 2.0, "digits": 4.0}  # found on splits that are not among those of the table
STEPS = 200

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Score:
    """What a model makes of the test records."""

    accuracy: float
    auroc: float


@dataclass(frozen=True, slots=True)
class Setting:
    """A split, and what is asked for."""

    split: Split
    epsilon: float
    seed: int
    directory: Path
    steps: int = STEPS

    @property
    def rate(self) -> float:
        """The chance of a record to be in a step: one over the number of batches, as Opacus' loader has it."""
        return 1 / math.ceil(len(self.split.train) / BATCH)

    @property
    def delta(self) -> float:
        """The failure probability: records^-1.1."""
        return float(len(self.split.train) ** -1.1)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return LR[self.split.records.name]

    def examples(self, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features and classes of some records."""
        return self.split.records.features[index], self.split.records.labels[index]

    def layer(self) -> nn.Linear:
        """Return the layer that is trained, at zero."""
        layer = nn.Linear(self.split.records.features.shape[1], self.split.records.classes)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        return layer

    def score(self, layer: nn.Module) -> Score:
        """Return the layer's accuracy and AUROC (of digits: the mean over one digit against the others)."""
        features, labels = self.examples(self.split.test)
        with torch.no_grad():
            outputs = layer(features).softmax(1)
        shown = outputs[:, 1] if self.split.records.classes == 2 else outputs
        auroc = roc_auc_score(labels.numpy(), shown.numpy(), multi_class="ovr")
        return Score(float((outputs.argmax(1) == labels).float().mean()), float(auroc))


def target(setting: Setting) -> d2pfed.PrivacyTarget:
    """Return the target of the consortium: records, against the server and a third of the silos."""
    return d2pfed.PrivacyTarget(
        unit=Unit.RECORD,
        epsilon=setting.epsilon,
        delta=setting.delta,
        against=d2pfed.SERVER,
        colluders=COLLUDERS / SILOS,
        records=len(setting.split.train),
        batch_rate=setting.rate,
        clip=CLIP,
        spare=0,
    )


def together(setting: Setting) -> Score:
    """Train by `d2pfed.fit` over the silos."""
    result = d2pfed.fit(
        setting.layer(),
        [setting.examples(silo) for silo in setting.split.silos],
        privacy=target(setting),
        rounds=setting.steps,
        lr=setting.lr,
        directory=setting.directory / "together",
    )
    return setting.score(result.module)


@cache
def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the noise that Opacus' accountant asks for."""
    from opacus.accountants.utils import get_noise_multiplier  # noqa: PLC0415 - of the extra `peers`

    return float(
        get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant="prv",
            epsilon_tolerance=0.001,
        )
    )


def own_noise(setting: Setting) -> float:
    """Return the noise multiplier of a trusted party who trains on all records."""
    return noise_multiplier(setting.epsilon, setting.delta, setting.rate, setting.steps)


def pooled(setting: Setting) -> Score:
    """Train by Opacus' DP-SGD on the pooled records, which somebody is trusted with."""
    return setting.score(dp_sgd(setting, own_noise(setting)))


def pooled_at_our_noise(setting: Setting) -> Score:
    """Train by Opacus' DP-SGD on the pooled records, with the noise that all silos of ours add."""
    return setting.score(dp_sgd(setting, own_noise(setting) * math.sqrt(SILOS / (SILOS - COLLUDERS))))


def dp_sgd(setting: Setting, noise: float) -> nn.Module:
    """Return the layer after DP-SGD by Opacus, with Poisson batches."""
    from opacus import PrivacyEngine  # noqa: PLC0415 - of the extra `peers`

    torch.manual_seed(setting.seed)
    layer = setting.layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=setting.lr)
    data = TensorDataset(*setting.examples(setting.split.train))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            module=layer,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=BATCH),
            noise_multiplier=noise,
            max_grad_norm=CLIP,
        )
        taken = 0
        while taken < setting.steps:
            for features, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(layer(features), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                taken += 1
                if taken == setting.steps:
                    break
    return cast("nn.Module", layer)


def each_adds_its_own(setting: Setting) -> Score:
    """Train by DP-SGD in every silo, one step a round, and average: each silo adds all of the noise itself."""
    return setting.score(_clipped_sgd(setting, [own_noise(setting) * CLIP] * SILOS, setting.split.silos, CLIP))


def alone(setting: Setting) -> Score:
    """Train in each silo by itself, without privacy, as its model stays there; the mean over silos by size."""
    scores = [setting.score(_clipped_sgd(setting, [0.0], (silo,), math.inf)) for silo in setting.split.silos]
    weights = np.array([len(silo) for silo in setting.split.silos], float)
    mean = [
        float(np.average([getattr(s, name) for s in scores], weights=weights)) for name in ("accuracy", "auroc")
    ]
    return Score(*mean)


def without_privacy(setting: Setting) -> Score:
    """Train on all records, without clip or noise."""
    return setting.score(_clipped_sgd(setting, [0.0], (setting.split.train,), math.inf))


def _clipped_sgd(setting: Setting, noise: list[float], silos: tuple[np.ndarray, ...], clip: float) -> nn.Linear:
    """Return a linear layer after steps whose records are clipped one by one and summed by silo, with their noise.

    The gradient of a linear layer is an outer product, so its norm is that of its factors.
    """
    generator = torch.Generator().manual_seed(setting.seed)
    layer = setting.layer()
    parts = [setting.examples(silo) for silo in silos]
    rate = 1 / math.ceil(sum(map(len, silos)) / BATCH)
    divisor = rate * sum(map(len, silos))
    with torch.no_grad():
        for _ in range(setting.steps):
            step_weight, step_bias = torch.zeros_like(layer.weight), torch.zeros_like(layer.bias)
            for (features, labels), width in zip(parts, noise, strict=True):
                drawn = torch.rand(len(labels), generator=generator) < rate
                own, wanted = features[drawn], labels[drawn]
                error = layer(own).softmax(1)
                error[torch.arange(len(wanted)), wanted] -= 1
                norms = error.norm(dim=1) * (own.square().sum(1) + 1).sqrt()
                error *= (clip / norms.clamp_min(1e-12)).clamp_max(1.0)[:, None]
                step_weight += error.T @ own + width * torch.randn(layer.weight.shape, generator=generator)
                step_bias += error.sum(0) + width * torch.randn(layer.bias.shape, generator=generator)
            layer.weight.sub_(setting.lr * step_weight / divisor)
            layer.bias.sub_(setting.lr * step_bias / divisor)
    return layer


SYSTEMS: dict[str, Callable[[Setting], Score]] = {
    "d2pfed, 20 silos": together,
    "DP-SGD on pooled data": pooled,
    "DP-SGD on pooled data, our noise": pooled_at_our_noise,
    "DP-SGD in each silo, averaged": each_adds_its_own,
    "each silo alone, not private": alone,
    "pooled, not private": without_privacy,
}
WITHOUT_EPSILON = ("each silo alone, not private", "pooled, not private")
