"""Drafts for requests with images, of models that read text alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.core.drive import PLAIN, VERIFYING
from tests.runner.drafting.rows import Row
from tests.runner.looped import Looped
from tests.runner.vision.asked import Picture, VisionModel
from tests.support.shared_pixels import SharedPixels
from treadle.core.messages import Image, Submit
from treadle.runner.drafting.row_text import text_of
from treadle.runner.forward.positions import SequencePositions
from treadle.runner.loading.draft import DraftModel
from treadle.runner.loading.step_costs import StepCosts
from treadle.runner.vision.positions import axes_positions

PROMPT = (1, 2, 3, 9, 9, 9, 9, 4, 5)
IMAGE = Image(start=3, count=4, hash=b"a", shm="", shape=(), grid=((1, 4, 4),))


@pytest.mark.parametrize("merge", [0, 2])
def test_a_draft_model_has_the_text_of_a_prompt_at_its_positions(merge: int) -> None:
    row = Row("a", [*PROMPT, 6, 7], request=Submit("a", PROMPT, 9, images=(IMAGE,)))
    if merge:
        row.positions = SequencePositions(axes_positions(len(PROMPT), (IMAGE,), merge))
    text = text_of(row)
    assert text is not None
    assert (list(text), text.lead, len(text)) == ([1, 2, 3, 4, 5, 6, 7], 3, 7)
    assert (text[1], text[-1], list(text[2:6]), list(text[6:9])) == (2, 7, [3, 4, 5, 6], [7])
    assert np.array_equal(text.positions, [0, 1, 2, 5, 6] if merge else [0, 1, 2, 7, 8])
    assert len(text) + text.ahead == (9 if merge else 11)
    row.tokens.append(8)
    assert text[-1] == 8


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_requests_with_images_are_drafted_for_and_gain_the_same(
    family: str, tmp_path: Path, shared: SharedPixels
) -> None:
    model = VisionModel.make(tmp_path / family, family, shared, speculate="draft", draft=DraftModel(tmp_path / family))
    runner = model.runner
    assert runner.capabilities().details["draft model"].endswith("by a prompt's text alone, as it reads no images")
    runner._costs = StepCosts(plain=PLAIN, verifying=VERIFYING)
    loop = Looped(runner)
    asked = model.ask("image", Picture(1), text=1, tokens=40)
    text = model.ask("text", head=20, tokens=40)
    loop.run(asked.submit, text.submit)
    assert {id_: loop.tokens(id_) for id_ in ("image", "text")} == {
        one.submit.id: model.expected(one) for one in (asked, text)
    }
    drafted = {output.id: output.drafted for outputs in loop.outputs.values() for output in outputs if output.drafted}
    assert drafted.keys() == {"image", "text"}
    assert runner.statistics().drafter.kv_bytes == 0
    runner.close()
