"""The questions to the apps: real photographs, a house preamble, and several questions."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from checkpoints import App, Apps

from devkit.photos import Photo, photos

# JPEG and PNG, landscape, portrait and square.
IMAGES: Final = ("rocket.jpg", "astronaut.png", "coffee.png", "grace_hopper.jpg")
ARCHIVED: Final = ("ihc.png", "chelsea.png")
WARM_UP: Final = ("camera.png", "motorcycle_left.png")

BOTH_APPS: Final = "two apps, one tower"
FRESH_ENGINE: Final = "a fresh engine"
OTHER_FAMILY: Final = "another family, same service"

# Apps put their rules before the image, as prefix caching wants it: a few hundred tokens.
PREAMBLE: Final = (
    "You look at photographs for people who cannot see them. Say first what kind of scene it is and "
    "where it may have been taken; then name what stands in front, from left to right, and what lies "
    "behind. Give colours only when they help to tell things apart. Never guess at a person's name, "
    "age or mood. When something is cut off by the edge, say so. When the light is poor, say so as "
    "well. Use short sentences and everyday words, and stop when the question has been answered. "
)
WARM_UP_PREAMBLE: Final = (
    "This is a rehearsal before the doors open. Nobody reads the answer, so it may be of any kind; what "
    "matters is that every kernel has run once at about the size that the real questions have. Look at "
    "the image, describe it in a general way, and do not think long about it. Then wait for the next "
    "one, which will come soon, and treat it in the very same manner until the rehearsal is over. "
)
FIRST: Final = (
    "Please describe this image for somebody who has just joined the call and cannot see the screen.",
    "What would you move, remove or light in another way, if you were to take this photograph again?",
)
AGAIN: Final = "Which three words would you file this image under, so that it is found again next year?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question of one app about one image."""

    act: str
    app: App
    image: Photo
    question: str
    preamble: str

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as an OpenAI client sends it."""
        data = base64.b64encode(self.image.data).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:{self.image.mime};base64,{data}"}}
        return [
            {"role": "system", "content": self.preamble},
            {"role": "user", "content": [image, {"type": "text", "text": self.question}]},
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """Two engines, started together, and their questions."""

    apps: tuple[App, App]
    warm_up: tuple[Request, ...]
    """Uncounted requests about other images, so that no counted one pays for a first compile."""
    requests: tuple[Request, ...]


def sittings(apps: Apps) -> tuple[Sitting, Sitting]:
    """The whole demo's requests in their order, the same for stock engines and for shared ones.

    In the second sitting `helpdesk` has a fresh engine. Its warm-up also repeats questions that
    its predecessor answered: the path that loads KV is then warm as well.
    """
    first, second = WARM_UP
    return (
        Sitting(
            apps=(apps.helpdesk, apps.catalogue),
            warm_up=(*_warm_up(apps.helpdesk, first), *_warm_up(apps.catalogue, first)),
            requests=_both_apps(apps),
        ),
        Sitting(
            apps=(apps.helpdesk, apps.archive),
            warm_up=(
                *_warm_up(apps.helpdesk, second),
                *_warm_up(apps.helpdesk, first),
                *_warm_up(apps.archive, first),
            ),
            requests=(*_fresh_engine(apps), *_other_family(apps)),
        ),
    )


def _both_apps(apps: Apps) -> tuple[Request, ...]:
    """Two questions about each image, the apps taking turns at coming first."""
    asked: list[Request] = []
    for n, image in enumerate(IMAGES):
        turn = (apps.helpdesk, apps.catalogue)[:: 1 if n % 2 == 0 else -1]
        asked += [_request(BOTH_APPS, app, image, text) for text in FIRST for app in turn]
    return tuple(asked)


def _fresh_engine(apps: Apps) -> tuple[Request, ...]:
    """A new question about each image, and one that was asked before."""
    asked = [_request(FRESH_ENGINE, apps.helpdesk, image, AGAIN) for image in IMAGES]
    return (*asked, _request(FRESH_ENGINE, apps.helpdesk, IMAGES[0], FIRST[0]))


def _other_family(apps: Apps) -> tuple[Request, ...]:
    """Another kind of tower, served by the same encoder process."""
    return tuple(_request(OTHER_FAMILY, apps.archive, p, text) for p in ARCHIVED for text in FIRST)


def _warm_up(app: App, image: str) -> tuple[Request, ...]:
    return tuple(_request("warm-up", app, image, text, WARM_UP_PREAMBLE) for text in FIRST)


def _request(act: str, app: App, image: str, question: str, preamble: str = PREAMBLE) -> Request:
    """Raises RuntimeError naming the remedy when the packages with the images are missing."""
    photo = next(photo for photo in _photos() if photo.name == image)
    return Request(act=act, app=app, image=photo, question=question, preamble=preamble)


@cache
def _photos() -> list[Photo]:
    return photos()
