"""Requests with images for tiny vision models, and what mlx-vlm answers them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.shared_pixels import SharedPixels
from tests.support.tiny_vision import BREAK, END, IMAGE, START, make_reference, make_vision, pixels_of
from tests.support.vision_reference import generate
from treadle.core.image import Image
from treadle.core.messages import Submit
from treadle.runner.build import build
from treadle.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class Picture:
    """A random picture, one of those of `size` that a family has."""

    seed: int
    size: int = 0


@dataclass
class Asked:
    """A request, and the pixels of its images."""

    submit: Submit
    pixels: list[np.ndarray]


@dataclass
class VisionModel:
    """A family's tiny model: the folder, a runner over it, and mlx-vlm's own model."""

    family: str
    folder: Path
    shared: SharedPixels
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, family: str, shared: SharedPixels, **options: Any) -> VisionModel:
        return cls(family, make_vision(folder, family), shared, options)

    @cached_property
    def runner(self) -> ModelRunner:
        return build(self.folder, max_running=8, **self.options)

    @cached_property
    def reference(self) -> Any:
        return make_reference(self.family)

    def ask(
        self, id_: str, *pictures: Picture, text: int = 0, head: int = 5, tail: int = 4, tokens: int = 10, **more: Any
    ) -> Asked:
        """A request with `pictures` between text, which differs by the seed `text`. Marks between rows of an image's
        tokens are in it where the family has such."""
        chance = np.random.default_rng(text)
        prompt, images, pixels = chance.integers(1, 200, head).tolist(), [], []
        for picture in pictures:
            made, grid, count = pixels_of(self.family, picture.seed, picture.size)
            prompt.append(START)
            start = len(prompt)
            prompt += self._placeholders(count, grid)
            images.append(
                Image(
                    start=start,
                    count=len(prompt) - start,
                    hash=hashlib.sha256(f"{picture}".encode()).digest(),
                    shm=self.shared.put(made),
                    shape=made.shape,
                    grid=grid,
                )
            )
            pixels.append(made)
            prompt += [END, *chance.integers(1, 200, tail).tolist()]
        more.setdefault("max_wait_s", 1e9)
        return Asked(Submit(id=id_, prompt=tuple(prompt), max_tokens=tokens, images=tuple(images), **more), pixels)

    def _placeholders(self, count: int, grid: Sequence[Sequence[int]]) -> list[int]:
        if self.family not in ("pixtral", "mistral3"):
            return [IMAGE] * count
        side = 8 if self.family == "pixtral" else 16
        rows, columns = grid[0][0] // side, grid[0][1] // side
        marked = ([IMAGE] * columns + [BREAK]) * rows
        return marked[:-1]

    def expected(self, asked: Asked) -> list[int]:
        """mlx-vlm's tokens for the request alone."""
        submit = asked.submit
        return generate(self.family, self.reference, submit.prompt, submit.images, asked.pixels, submit.max_tokens)
