import numpy as np
import pytest
import torch

from d2pfed.errors import ConfigError
from d2pfed.learning import Examples, StoredClients, Task
from reproduction.leaves import dead_leaves
from reproduction.patches import PatchFeatures, linear_model, over_features, width_of

SIDE = 12


@pytest.fixture(scope="module")
def features() -> PatchFeatures:
    return PatchFeatures.made_up(6, SIDE, seed=3)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return dead_leaves(600, SIDE, seed=11)


def spread_of(rows: torch.Tensor) -> float:
    """The largest variance along any direction, in units of the mean one: 1 if all are alike."""
    variances = torch.linalg.eigvalsh(torch.cov(rows.T))
    return float(variances.max() / variances.mean())


def test_made_up_images_repeat_from_their_seed_and_lie_within_one():
    once, again, other = (dead_leaves(8, SIDE, seed) for seed in (1, 1, 2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)
    assert not torch.equal(once, other)
    assert once.shape == (8, 3, SIDE, SIDE)
    assert once.abs().max() < 1


def test_neighboring_pixels_of_made_up_images_are_alike(images):
    def likeness(pixels: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack([pixels[..., 1:].flatten(), pixels[..., :-1].flatten()]))[0, 1])

    assert likeness(images) > 0.7
    assert abs(likeness(torch.randn(images.shape, generator=torch.Generator().manual_seed(0)))) < 0.1


def test_every_row_has_the_stated_width_and_one_length(features, images):
    rows = features(images)
    assert rows.shape == (600, width_of(6))
    torch.testing.assert_close(rows.norm(dim=1), rows.norm(dim=1)[:1].expand(600))


def test_features_are_those_of_the_mirror_image(features, images):
    torch.testing.assert_close(features(images), features(images.flip(-1)))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(features(images), features(images.flip(-2)))


def test_features_of_an_image_do_not_depend_on_the_others(features, images):
    torch.testing.assert_close(features(images)[7:8], features(images[7:8]), rtol=1e-4, atol=1e-4)


def test_features_depend_on_the_seed_alone(images):
    one, two, other = (PatchFeatures.made_up(2, SIDE, seed)(images[:4]) for seed in (5, 5, 6))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert not torch.allclose(one, other)


def test_decorrelation_evens_out_the_directions_of_images_it_has_not_seen(features, images):
    plain = PatchFeatures(features.filters, features.centre, torch.eye(width_of(6)))
    assert spread_of(features(images)) < 6
    assert spread_of(plain(images)) > 6


def test_a_task_over_features_keeps_clients_and_labels(features, images):
    labels = torch.arange(600) % 2
    rows = tuple(np.array_split(np.arange(500) * 7 % 500, 7))
    task = Task(
        name="made up",
        clients=StoredClients(Examples(images, labels), rows),
        validation=Examples(images[500:550], labels[500:550]),
        test=lambda: Examples(images[550:], labels[550:]),
        classes=2,
        input_shape=(3, SIDE, SIDE),
        description="Made up.",
    )
    turned = over_features(task, features)
    assert turned.clients.population == 7
    for client in range(7):
        before, after = task.clients.examples(client), turned.clients.examples(client)
        torch.testing.assert_close(after.labels, before.labels)
        torch.testing.assert_close(after.inputs, features(before.inputs), rtol=1e-4, atol=1e-4)
    assert turned.input_shape == (width_of(6),)
    torch.testing.assert_close(turned.test().inputs, features(images[550:]), rtol=1e-4, atol=1e-4)


def test_a_linear_model_begins_at_zero():
    model = linear_model(5, 3)
    assert model.dimension == 18
    assert not model.initial().any()


@pytest.mark.parametrize(("count", "side", "rule"), [(0, 12, "filters"), (1, 4, "side")])
def test_impossible_features_are_refused(count, side, rule):
    with pytest.raises(ConfigError, match=f"{rule}.* at least .* got"):
        PatchFeatures.made_up(count, side, seed=0)


def test_of_all_directions_the_widest_are_kept(images):
    every, few = (PatchFeatures.made_up(2, SIDE, 5, kept) for kept in (None, 3))
    torch.testing.assert_close(few.decorrelation, every.decorrelation[:, -3:])
    assert few(images).shape == (len(images), 3)
    for kept in (0, width_of(2) + 1):
        with pytest.raises(ConfigError, match=r"kept must be in \[1, 16\] for 2 filters"):
            PatchFeatures.made_up(2, SIDE, 5, kept)
