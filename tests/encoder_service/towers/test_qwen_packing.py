"""Any images and videos in one batch of a Qwen tower have the features that each has alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expected_errors import expect_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cornplug.checkpoints.model_family import PIXEL_NORM
from cornplug.encoder_service.formats.messages import WireTensor
from cornplug.encoder_service.towers.qwen2_vl import Qwen25VlTower
from cornplug.errors import EncoderRefused
from devkit import checkpoints

from ..conftest import to_wire
from ..tower_rig import Halves

RECIPES: dict[str, Callable[[Path], Path]] = {
    "qwen2_vl": checkpoints.qwen2_vl,
    "qwen2_5_vl": checkpoints.qwen2_5_vl,
    "qwen3_vl": checkpoints.qwen3_vl,
}
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}


@pytest.fixture(scope="module", params=RECIPES)
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Halves]:
    name: str = request.param
    return name, Halves.load(RECIPES[name](tmp_path_factory.mktemp("packing") / name))


def medium(name: str, kind: str, grid: tuple[int, int, int], seed: int) -> dict[str, WireTensor]:
    t, h, w = grid
    values = 3 * 2 * PATCH[name] ** 2
    pixels = torch.randn(t * h * w, values, generator=torch.Generator().manual_seed(seed))
    names = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }[kind]
    return dict(zip(names, (to_wire(pixels), to_wire(torch.tensor([t, h, w]))), strict=True))


_side = st.integers(1, 5).map(lambda n: 2 * n)
_picture = st.tuples(st.just("image"), st.tuples(st.just(1), _side, _side))
_video = st.tuples(st.just("video"), st.tuples(st.integers(1, 3), _side, _side))
_batch = st.lists(st.one_of(_picture, _video), min_size=2, max_size=5)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=_batch)
def test_tower_qwen_batch_equals_each_medium_alone(
    tower: tuple[str, Halves], batch: list[tuple[str, tuple[int, int, int]]]
) -> None:
    name, halves = tower
    items = [halves.tower.prepare(medium(name, kind, grid, seed)) for seed, (kind, grid) in enumerate(batch)]
    batched = halves.projector.project(halves.tower.encode(items), items)
    for item, ours, (_, (t, h, w)) in zip(items, batched, batch, strict=True):
        alone = halves.projector.project(halves.tower.encode([item]), [item])[0]
        assert ours.shape == (t * h * w // 4, halves.projector.hidden_size)
        torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)


def test_tower_qwen_windows_of_one_size_lie_side_by_side(tmp_path: Path) -> None:
    """Two frames of 10 x 10 patches in windows of 4 x 4, then an image of 4 x 8: few calls, not 20."""
    tower = Halves.load(checkpoints.qwen2_5_vl(tmp_path / "m")).tower
    assert isinstance(tower, Qwen25VlTower)
    order, lengths = tower._order_by_window(torch.tensor([[2, 10, 10], [1, 4, 8]]))
    frame = [16] * 4 + [8] * 4 + [4]
    assert lengths == [*frame, *frame, 16, 16]
    assert sorted(order.tolist()) == list(range(232))
    assert [sorted(part.tolist()) for part in order.split([100, 100, 32])] == [
        list(range(0, 100)), list(range(100, 200)), list(range(200, 232)),
    ]  # fmt: skip


def test_tower_qwen_video_of_one_frame_equals_image(tower: tuple[str, Halves]) -> None:
    name, halves = tower
    image, video = (halves.tower.prepare(medium(name, kind, (1, 4, 6), 3)) for kind in ("image", "video"))
    assert image.digests == video.digests
    assert torch.equal(halves.tower.encode([image])[0], halves.tower.encode([video])[0])


def test_tower_qwen_frames_attend_to_themselves_only(tower: tuple[str, Halves]) -> None:
    """Each equals the image of itself."""
    name, halves = tower
    frames = [halves.tower.prepare(medium(name, "image", (1, 4, 4), seed)) for seed in (1, 2)]
    pixels = torch.cat([frame.tensors[0] for frame in frames])
    wire = {"pixel_values_videos": to_wire(pixels), "video_grid_thw": to_wire(torch.tensor([2, 4, 4]))}
    video = halves.tower.encode([halves.tower.prepare(wire)])[0]
    torch.testing.assert_close(video, torch.cat(halves.tower.encode(frames)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"video_grid_thw": [2, 4, 4, 1]}, "video_grid_thw: shape"),
        ({"video_grid_thw": [2, 3, 4]}, "multiples of 2"),
        ({"video_grid_thw": [3, 4, 4]}, "pixel_values_videos: shape"),
        ({"image_grid_thw": [2, 4, 4]}, "image_grid_thw: unknown"),
    ],
)
def test_tower_qwen_bad_video_is_refused_by_field(
    tower: tuple[str, Halves], change: dict[str, list[int]], says: str
) -> None:
    name, halves = tower
    good = medium(name, "video", (2, 4, 4), 0)
    halves.tower.prepare(good)
    with expect_error(EncoderRefused, reason="bad_input", match=says):
        halves.tower.prepare({**good, **{field: to_wire(torch.tensor(v)) for field, v in change.items()}})


NORM = torch.tensor([[0.0146, 0.0150, 0.0142], [-1.7923, -1.7521, -1.4802]])


def raw_medium(name: str, kind: str, grid: tuple[int, int, int], seed: int) -> dict[str, WireTensor]:
    t, h, w = grid
    pixels = torch.randint(
        0, 256, (t * h * w, 3 * 2 * PATCH[name] ** 2), dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    made = medium(name, kind, grid, seed)
    return {**made, next(iter(made)): to_wire(pixels), PIXEL_NORM: to_wire(NORM)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tower_qwen_raw_pixels_give_the_bits_of_normalised_pixels(
    tower: tuple[str, Halves], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Alone and beside an item that the processor has normalised."""
    name, halves = tower
    if dtype != torch.float32:
        halves = Halves.load(RECIPES[name](tmp_path / name), dtype=dtype)
    raw = [raw_medium(name, kind, (1, 4, 6), i) for i, kind in enumerate(("image", "video"))]
    cast = []
    for one in raw:
        pixels = halves.tower.prepare(one).tensors[0].float().view(24, 3, -1)
        ready = (pixels * NORM[0].view(1, 3, 1) + NORM[1].view(1, 3, 1)).view(24, -1)
        kept = {key: value for key, value in one.items() if key != PIXEL_NORM}
        cast.append({**kept, next(iter(kept)): to_wire(ready)})
    others = [medium(name, "image", (1, 2, 2), 9)]
    found, wanted = (
        halves.tower.encode([halves.tower.prepare(one) for one in [*media, *others]]) for media in (raw, cast)
    )
    assert found[0].dtype == dtype
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("change", ["no_norm", "norm_of_floats", "channels", "shape", "dtype"])
def test_tower_qwen_bad_norm_is_refused(tower: tuple[str, Halves], change: str) -> None:
    name, halves = tower
    made = raw_medium(name, "image", (1, 2, 2), 1)
    if change == "no_norm":
        del made[PIXEL_NORM]
    elif change == "norm_of_floats":
        made = {**medium(name, "image", (1, 2, 2), 1), PIXEL_NORM: to_wire(NORM)}
    else:
        wrong = {"channels": torch.ones(2, 5), "shape": torch.ones(3, 3), "dtype": NORM.double()}[change]
        made[PIXEL_NORM] = to_wire(wrong)
    with expect_error(EncoderRefused, reason="bad_input", match=PIXEL_NORM):
        halves.tower.prepare(made)
