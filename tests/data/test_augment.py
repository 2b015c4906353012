"""Views: the crop is a crop, the colours do what they are called, everything is drawn per sample."""

from __future__ import annotations

import colorsys

import pytest
import torch
from torch.nn import functional as F

from oneround.config.sections import Augment
from oneround.data import augment
from oneround.data.augment import (
    COLUMNS,
    FLIP,
    MORE_COLUMNS,
    RATIO,
    columns_of,
    crop,
    draw,
    punched,
    recolour,
    shifted,
    views,
)

STILL = Augment(crop_scale=[1.0, 1.0], crop_ratio=[1.0, 1.0], flip=0.0, jitter=0.0, greyscale=0.0)
LUMA = torch.tensor([0.299, 0.587, 0.114])


def numbers(n: int = 1, **columns: float) -> torch.Tensor:
    drawn = torch.full((n, COLUMNS), 0.5)
    for name, value in columns.items():
        drawn[:, getattr(augment, name)] = value
    return drawn


def images(n: int = 4, channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(0))


def test_a_still_view_is_the_image_normalised() -> None:
    pixels = (images() * 255).to(torch.uint8)
    assert torch.allclose(views(pixels, numbers(4), STILL), pixels / 127.5 - 1, atol=1e-5)


@pytest.mark.parametrize(("left", "top", "side"), [(0, 0, 8), (3, 5, 8), (8, 8, 8), (4, 0, 12)])
def test_a_crop_is_torch_s_own_enlargement_of_that_piece(left: int, top: int, side: int) -> None:
    whole, size = images(), 16
    options = STILL.model_copy(update={"crop_scale": [(side / size) ** 2] * 2})
    drawn = numbers(4, AREA=0.0, LEFT=left / (size - side), TOP=top / (size - side))
    piece = whole[:, :, top : top + side, left : left + side]
    expected = F.interpolate(piece, size=(size, size), mode="bilinear", align_corners=False)
    assert torch.allclose(crop(whole, drawn, options), expected, atol=1e-5)


def test_a_mirror_is_a_mirror() -> None:
    options = STILL.model_copy(update={"flip": 0.5})
    whole = images(2)
    drawn = numbers(2)
    drawn[:, FLIP] = torch.tensor([0.4, 0.6])
    view = crop(whole, drawn, options)
    assert torch.allclose(view[0], whole[0].flip(-1), atol=1e-6)
    assert torch.allclose(view[1], whole[1], atol=1e-6)


def test_area_and_ratio_cover_their_ranges() -> None:
    drawn = draw(2000, torch.Generator().manual_seed(0))
    assert drawn.min() >= 0 and drawn.max() < 1
    spread = crop(torch.linspace(0, 1, 32).expand(2000, 1, 32, 32).clone(), drawn, Augment(flip=0.0))
    widths = (spread[:, 0, 0, -1] - spread[:, 0, 0, 0]) * 31 + 1
    assert 0.35 < float(widths.min()) / 32 < 0.45 and float(widths.max()) / 32 > 0.98
    assert drawn[:, RATIO].std() > 0.25


def turned(name: str, strength: float, **columns: float) -> torch.Tensor:
    """The image with one colour change at its strongest."""
    base = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    options = STILL.model_copy(update={**base, name: strength, "jitter": 1.0})
    return recolour(0.3 + 0.4 * images(), numbers(4, JITTER=0.0, GREY=0.9, **columns), options)


def test_brightness_scales_everything() -> None:
    assert torch.allclose(
        turned("brightness", 0.4, BRIGHTNESS=1.0), (1.4 * (0.3 + 0.4 * images())).clamp(0, 1), atol=1e-5
    )


def test_contrast_scales_what_differs_from_the_mean_luminance() -> None:
    start = 0.3 + 0.4 * images()
    mean = torch.einsum("nchw,c->nhw", start, LUMA).mean((1, 2))[:, None, None, None]
    assert torch.allclose(turned("contrast", 0.4, CONTRAST=0.0), mean + 0.6 * (start - mean), atol=1e-5)


def test_saturation_scales_what_differs_from_grey() -> None:
    start = 0.3 + 0.4 * images()
    grey = torch.einsum("nchw,c->nhw", start, LUMA)[:, None]
    assert torch.allclose(turned("saturation", 0.4, SATURATION=0.0), grey + 0.6 * (start - grey), atol=2e-3)


def test_hue_turns_the_colour_and_keeps_the_luminance() -> None:
    start, after = 0.3 + 0.4 * images(), turned("hue", 0.1, HUE=1.0)
    before_luma, after_luma = (torch.einsum("nchw,c->nhw", x, LUMA) for x in (start, after))
    assert torch.allclose(before_luma, after_luma, atol=2e-3)
    hues = [[colorsys.rgb_to_hsv(*(float(v) for v in x[0, :, i, i]))[0] for i in range(16)] for x in (start, after)]
    turns = [((b - a + 0.5) % 1) - 0.5 for a, b in zip(*hues, strict=True)]
    assert all(abs(abs(turn) - 0.1) < 0.06 for turn in turns), turns
    assert len({turn > 0 for turn in turns}) == 1


def test_greyscale_has_equal_channels() -> None:
    options = STILL.model_copy(update={"greyscale": 1.0})
    view = recolour(images(), numbers(4, GREY=0.0), options)
    assert torch.allclose(view[:, 0], view[:, 1], atol=1e-5) and torch.allclose(view[:, 0], view[:, 2], atol=1e-5)
    assert torch.allclose(view[:, 0], torch.einsum("nchw,c->nhw", images(), LUMA), atol=1e-5)


def test_grey_images_take_brightness_and_contrast_only() -> None:
    one = images(channels=1)
    strong = Augment(flip=0.0, jitter=1.0)
    view = recolour(
        one, numbers(4, JITTER=0.0, BRIGHTNESS=0.5, CONTRAST=0.5, SATURATION=1.0, HUE=1.0, GREY=0.0), strong
    )
    assert torch.allclose(view, one, atol=1e-6)


def test_each_sample_has_its_own_view_unless_a_batch_shares_one() -> None:
    same = (images(1).expand(8, 3, 16, 16) * 255).to(torch.uint8)
    options = Augment(flip=0.5)
    own = views(same, draw(8, torch.Generator().manual_seed(1)), options)
    assert len({tuple(view.flatten()[:50].tolist()) for view in own}) == 8
    shared = views(same, draw(8, torch.Generator().manual_seed(1), per_batch=True), options)
    assert torch.equal(shared, shared[:1].expand_as(shared))


def test_how_often_what_happens() -> None:
    drawn = draw(4000, torch.Generator().manual_seed(2))
    white = torch.ones(4000, 3, 8, 8)
    white[:, 1:] = 0.2
    view = recolour(white, drawn, Augment(flip=0.0, jitter=0.0, greyscale=0.2))
    grey = (view[:, 0] - view[:, 1]).abs().amax((1, 2)) < 1e-4
    assert abs(float(grey.float().mean()) - 0.2) < 0.03


def test_a_shift_moves_whole_pixels_and_mirrors_what_is_missing() -> None:
    row = torch.arange(8.0).expand(1, 1, 8, 8)
    drawn = torch.full((1, COLUMNS + MORE_COLUMNS), 0.5)
    drawn[0, augment.RIGHT] = 0.0
    assert shifted(row, drawn, 0.25)[0, 0, 0].tolist() == [2, 1, 0, 1, 2, 3, 4, 5]
    drawn[0, augment.RIGHT] = 0.999
    assert shifted(row, drawn, 0.25)[0, 0, 3].tolist() == [2, 3, 4, 5, 6, 7, 6, 5]
    drawn[0, augment.DOWN] = 0.0
    assert shifted(row.transpose(2, 3), drawn, 0.25)[0, 0, :, 0].tolist() == [2, 1, 0, 1, 2, 3, 4, 5]


def test_a_hole_is_a_square_of_grey_wherever_it_was_drawn() -> None:
    whole, drawn = torch.ones(2, 3, 10, 10), torch.full((2, COLUMNS + MORE_COLUMNS), 0.5)
    drawn[0, augment.HOLE_X] = drawn[1, augment.HOLE_Y] = 0.0
    holes = punched(whole, drawn, 0.4) == 0
    assert holes[0, 0].sum() == 8 and holes[0, 2, 3:7, 0:2].all() and holes[1, 0, 0:2, 3:7].all()


def test_views_are_shifted_and_punched_where_asked_and_only_then_more_is_drawn() -> None:
    options = STILL.model_copy(update={"shift": 0.25, "hole": 0.5})
    assert columns_of(options) == COLUMNS + MORE_COLUMNS and columns_of(STILL) == COLUMNS
    drawn = draw(4, torch.Generator().manual_seed(1), columns=columns_of(options))
    pixels = (images() * 255).to(torch.uint8)
    still = views(pixels, drawn, STILL)
    assert torch.equal(views(pixels, drawn, options), punched(shifted(still, drawn, 0.25), drawn, 0.5))
