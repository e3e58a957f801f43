"""The workload `images`: pictures that are the same everywhere, in requests that servers take, and its figures."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.bench.test_measures import round_of, sample
from tests.bench.test_workloads import one
from treadle.bench.measures import workload_figures
from treadle.bench.pictures import Picture, data_url, png
from treadle.bench.plan import PromptMessage, Request
from treadle.bench.run import _needs_chat
from treadle.bench.wire import body_of
from treadle.media.decode import decode, open_image


def test_a_picture_is_an_image_of_its_size_and_its_own() -> None:
    first, second = (png(Picture(70, 50, seed)) for seed in (1, 2))
    images = [decode(open_image(data, "image/png", 10_000)) for data in (first, second)]
    assert [image.size for image in images] == [(70, 50), (70, 50)]
    assert images[0].tobytes() != images[1].tobytes()
    assert png(Picture(70, 50, 1)) == first
    assert len(png(Picture(1024, 1024, 3))) < 200_000


def test_pictures_stand_before_the_question_in_a_request() -> None:
    picture = Picture(8, 8, 1)
    request = Request("1", (PromptMessage("user", "What?", pictures=(picture,)),), 7)
    (message,) = json.loads(body_of(request, "m", "chat", {}))["messages"]
    image, question = message["content"]
    assert question == {"type": "text", "text": "What?"}
    assert image["image_url"]["url"] == data_url(picture)
    assert base64.b64decode(data_url(picture).partition(",")[2]) == png(picture)


def test_each_image_is_asked_about_twice_while_text_decodes() -> None:
    workload = one("images", images=3, c=2, decoders=2, width=64, height=32)
    by_id: dict[str, Any] = {request.id: request for request in workload.requests}
    assert [by_id[f"decoder {i}"].leave.of for i in range(2)] == ["second 2", "second 2"]
    pictures = {id_: request.messages[0].pictures for id_, request in by_id.items() if "decoder" not in id_}
    assert all(pictures[f"first {i}"] == pictures[f"second {i}"] for i in range(3))
    assert len(set(pictures.values())) == 3
    assert {(one.width, one.height) for (one,) in pictures.values()} == {(64, 32)}
    afters = {id_: by_id[id_].after.of for id_ in pictures}
    assert afters == {
        "first 0": "decoder 1",
        "first 1": "decoder 1",
        "first 2": "second 0",
        **{f"second {i}": f"first {i}" for i in range(3)},
    }
    assert _needs_chat([workload]) == workload.name
    assert _needs_chat([one("burst")]) == ""


def test_its_figures_compare_second_questions_and_the_decoders_gaps() -> None:
    decoder = sample("d", role="decoder", piece_s=[0.0, 0.1, 0.2, 0.3, 0.7, 0.8])
    first = sample("first 0", role="first", sent_s=0.35, piece_s=[0.3])
    second = sample("second 0", role="second", sent_s=0.9, piece_s=[0.06])
    assert workload_figures("images", round_of(decoder, first, second)) == pytest.approx(
        {
            "image TTFT p50 s": 0.3,
            "image TTFT max s": 0.3,
            "second question TTFT / first": 0.2,
            "gap p99 / idle gap p99": 4.0,
            "longest gap / idle median": 4.0,
            "rate kept": 0.25,
        }
    )
    assert workload_figures("images", round_of(first)) == {"image TTFT p50 s": 0.3, "image TTFT max s": 0.3}
