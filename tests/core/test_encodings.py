"""Images: encoded a few layers a step, once for all who have them, beside prompts and decoding sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.drive import Bench
from treadle.core.encodings import Encodings
from treadle.core.image import Image, VisionCapabilities, unsplit
from treadle.core.messages import FinishReason, Submit
from treadle.core.plan import Encode, StepPlan
from treadle.core.sequence import Sequence

TOWER = VisionCapabilities(layers=6, quadratic=1000)
WHOLE = VisionCapabilities(layers=6, quadratic=1000, whole=True)


def image(start: int, count: int = 8, hash: bytes = b"cat", patches: int = 24) -> Image:
    return Image(start=start, count=count, hash=hash, shm="pixels", shape=(patches, 3))


def ask(bench: Bench, id_: str, *images: Image, prompt: int = 24, **options: Any) -> Submit:
    return bench.submit(id_, prompt=prompt, images=images, **options)


def seen(bench: Bench, steps: int = 200) -> list[StepPlan]:
    """The plans of all steps until nothing is left to do."""
    plans = []
    for _ in range(steps):
        if not bench.scheduler.has_work:
            return plans
        bench.step()
        plans.append(bench.plan)
    raise AssertionError("still at work")


def test_work_grows_with_patches_and_views_and_faster_where_attention_weighs() -> None:
    vision = VisionCapabilities(layers=10, patch=4, quadratic=100)

    def of(*shape: int) -> int:
        return vision.units(Image(start=0, count=1, hash=b"x", shm="", shape=shape))

    assert of(100, 12) == 20
    assert of(300, 12) == 120
    assert of(3, 100, 12) == 60
    assert of(2, 3, 40, 40) == 40
    assert of(1, 12) == 1, "never nothing"
    assert replace(vision, least=7).units(Image(start=0, count=1, hash=b"x", shm="", shape=(1, 12))) == 7


@pytest.mark.parametrize(("unit_s", "most"), [(0.001, 200), (1.0, 10)])
def test_a_step_has_no_more_small_images_than_fill_its_time(unit_s: float, most: int) -> None:
    """However short steps that encode seem: on a CPU the step before waits until their work is prepared."""
    bench = Bench(vision=replace(TOWER, least=10, unit_s=unit_s))
    bench.runner.encode_s = lambda layers: 1e-6 * layers
    request = ask(bench, "a", *(image(8 * i, hash=b"%d" % i, patches=1) for i in range(30)), prompt=250)
    units = [10 * sum(encode.count for encode in plan.encode) for plan in seen(bench, 2000)]
    assert sum(units) == 30 * 6 * 10
    assert max(units) == most
    bench.assert_undisturbed(request)


def test_a_picture_that_stands_twice_in_a_prompt_is_waited_for_once() -> None:
    bench = Bench(vision=TOWER)
    request = ask(bench, "a", image(0), image(8, hash=b"dog"), image(16), prompt=30)
    seen(bench)
    bench.assert_undisturbed(request)
    assert bench.runner.tower.computed == 12
    assert (bench.statistics().vision.encoded, bench.statistics().vision.reused) == (2, 1)


def test_an_image_is_encoded_in_layers_and_its_prompt_follows() -> None:
    bench = Bench(vision=TOWER)
    request = ask(bench, "a", image(4))
    plans = seen(bench)
    encodes = [encode for plan in plans for encode in plan.encode]
    assert [(encode.id, encode.image) for encode in encodes] == [("a", 0)] * len(encodes)
    assert [encode.start for encode in encodes] == [sum(e.count for e in encodes[:i]) for i in range(len(encodes))]
    assert sum(encode.count for encode in encodes) == 6
    assert [encode.count for encode in encodes][:2] == [1, 1], "pieces grow as their cost becomes known"
    first = next(plan for plan in plans if plan.prefill)
    assert first.prefill[0].count == 4, "the text in front of it does not wait"
    bench.assert_undisturbed(request)
    bench.assert_idle()
    vision = bench.statistics().vision
    assert (vision.encoded, vision.reused, vision.awaited) == (1, 0, 0)


def test_images_are_waited_for_where_the_prompt_comes_to_them() -> None:
    bench = Bench(vision=TOWER)
    ask(bench, "a", image(0), image(12, hash=b"dog"), prompt=30)
    bench.step()
    assert bench.statistics().vision.awaited == 2
    order = [encode.image for plan in seen(bench) for encode in plan.encode]
    assert order == sorted(order), "one after the other"


def test_a_picture_is_encoded_once_for_all_who_have_it() -> None:
    bench = Bench(vision=TOWER)
    requests = [ask(bench, "a", image(4), image(14)), ask(bench, "b", image(9)), ask(bench, "c", image(2, hash=b"dog"))]
    seen(bench)
    for request in requests:
        bench.assert_undisturbed(request)
    assert bench.runner.tower.computed == 12
    assert (bench.statistics().vision.encoded, bench.statistics().vision.reused) == (2, 2)
    again = ask(bench, "d", image(4, hash=b"dog"))
    seen(bench)
    bench.assert_undisturbed(again)
    assert bench.runner.tower.computed == 12, "its features are kept"
    assert bench.statistics().vision.reused == 3


def test_a_second_question_about_an_image_skips_tower_and_prefill() -> None:
    bench = Bench(vision=TOWER, cache=True, block=4)
    bench.submit("a", prompt=tuple(range(40)), images=(image(4, 30),))
    seen(bench)
    bench.runner.tower.most = 0
    bench.runner.tower.trim(())
    again = bench.submit("b", prompt=(*range(36), *range(100, 110)), images=(image(4, 30),))
    plans = seen(bench)
    assert bench.heard["b"].cached == [36]
    assert not any(plan.encode for plan in plans)
    other = bench.submit("c", prompt=(*range(36), *range(100, 110)), images=(image(4, 30, hash=b"dog"),))
    plans = seen(bench)
    assert bench.heard["c"].cached == [4], "another picture shares what is in front of it"
    assert sum(encode.count for plan in plans for encode in plan.encode) == 6
    bench.assert_undisturbed(again)
    bench.assert_undisturbed(other)


def test_sequences_wait_for_one_that_computes_the_same_image_and_not_for_another_picture() -> None:
    bench = Bench(vision=TOWER, cache=True, block=4, share=True)
    prompt = tuple(range(200))
    for id_, hash_ in (("a", b"cat"), ("b", b"cat"), ("c", b"dog")):
        bench.submit(id_, prompt=(*prompt, ord(id_)), images=(image(4, 150, hash=hash_),))
    bench.step()
    joined = [admit.request.id for admit in bench.plan.admit]
    assert joined == ["a", "c"]
    seen(bench)
    assert bench.heard["b"].cached == [200]
    assert bench.runner.tower.computed == 12


@pytest.mark.parametrize(
    ("start", "count", "most", "expected"),
    [
        (0, 3, 99, 3),
        (0, 4, 99, 4),
        (0, 6, 99, 4),
        (4, 3, 99, 8),
        (4, 3, 7, 0),
        (6, 1, 99, 6),
        (4, 8, 99, 8),
        (12, 2, 9, 2),
    ],
)
def test_a_chunk_ends_in_front_of_an_image_or_behind_it(start: int, count: int, most: int, expected: int) -> None:
    assert unsplit([image(4)], start, count, most) == expected


def test_no_chunk_splits_an_image_whose_tokens_see_each_other() -> None:
    bench = Bench(vision=WHOLE, prefill_tokens=16)
    requests = [ask(bench, id_, image(9, 15, hash=id_.encode()), prompt=60) for id_ in "abc"]
    plans = seen(bench)
    for request in requests:
        bench.assert_undisturbed(request)
    assert max(sum(chunk.count for chunk in plan.prefill) for plan in plans) <= 16


def test_memory_for_an_image_is_taken_from_others_who_came_later() -> None:
    """Its tokens need blocks at one time, and those that come free one by one go to decoding sequences."""
    bench = Bench(vision=WHOLE, block=4, blocks=20, prefill_tokens=64)
    for i in range(3):
        bench.submit(f"{i}", prompt=4, max_tokens=40, priority=1)
    for _ in range(20):
        bench.step()
    first = ask(bench, "a", image(4, 40), prompt=50, max_tokens=2)
    seen(bench, 2000)
    bench.assert_undisturbed(first)
    bench.assert_idle()


def test_another_sequence_goes_on_with_an_image_when_one_leaves() -> None:
    bench = Bench(vision=TOWER)
    ask(bench, "a", image(4))
    stays = ask(bench, "b", image(8))
    for _ in range(2):
        bench.step()
    bench.cancel("a")
    seen(bench)
    bench.assert_undisturbed(stays)
    assert bench.runner.tower.computed == 6


def test_an_image_is_dropped_with_the_last_who_waits_for_it() -> None:
    bench = Bench(vision=TOWER)
    ask(bench, "a", image(4))
    bench.step()
    assert bench.plan.encode
    bench.cancel("a")
    bench.run()
    bench.assert_idle()
    assert bench.statistics().vision.awaited == 0
    request = ask(bench, "b", image(4))
    seen(bench)
    bench.assert_undisturbed(request)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_step_that_fails_takes_its_layers_with_it(lookahead: int) -> None:
    bench = Bench(vision=TOWER, lookahead=lookahead)
    requests = [ask(bench, "a", image(4)), ask(bench, "b", image(6)), ask(bench, "c", image(4, hash=b"dog"))]
    times = iter((False, False, True))
    bench.runner.raises_late = lambda plan: bool(plan.encode) and next(times, False)
    seen(bench)
    for request in requests:
        bench.assert_undisturbed(request)
    assert bench.raised == 1
    assert bench.runner.tower.computed > 12
    bench.assert_idle()


def test_a_step_that_fails_with_the_last_layers_leaves_nothing_to_begin_anew() -> None:
    encodings = Encodings(TOWER)
    seq = Sequence.of(Submit(id="a", prompt=(1, 2, 3), max_tokens=1, images=(image(0, 2),)), order=0, now=0.0)
    encodings.join(seq)
    encodes, units = encodings.plan([seq], 1000, decoding=False)
    assert (encodes, units) == ((Encode("a", 0, 0, 6),), 24)
    encodings.void(StepPlan(step=1, encode=encodes), {"a": seq})
    assert encodings.statistics().awaited == 0


def test_an_image_that_makes_each_step_raise_is_found() -> None:
    bench = Bench(vision=TOWER)
    bad = ask(bench, "bad", image(4, hash=b"bad"))
    good = ask(bench, "good", image(4))
    bench.runner.raises = lambda plan: any(encode.id == "bad" for encode in plan.encode)
    seen(bench)
    bench.assert_undisturbed(good)
    finish = bench.heard[bad.id].finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR


def test_others_encode_an_image_that_fails_for_one() -> None:
    """Such as one whose pixels are gone: the other's are elsewhere."""
    bench = Bench(vision=TOWER)
    ask(bench, "a", image(4))
    other = ask(bench, "b", image(6))
    for _ in range(2):
        bench.step()
    bench.runner.failures["a"] = "its pixels are gone"
    bench.runner.tower._layers.clear()
    seen(bench)
    bench.assert_undisturbed(other)
    assert bench.heard["a"].finish is not None


def test_images_are_refused_where_they_can_not_be_computed() -> None:
    for bench, count in ((Bench(), 4), (Bench(vision=WHOLE, prefill_tokens=16), 17)):
        ask(bench, "a", image(0, count))
        bench.step()
        finish = bench.heard["a"].finish
        assert finish is not None
        assert finish.code == "invalid_request"


def _busy(bench: Bench, rows: int = 3) -> None:
    """Rows that decode for a long time, at a cost that is known."""
    bench.runner.cost = lambda prefill, decode: (0.0001 * prefill, 0.01 if decode else 0.0)
    bench.runner.encode_s = lambda layers: 0.001 * layers
    for i in range(rows):
        bench.submit(f"decodes {i}", prompt=2, max_tokens=4000)
    for _ in range(30):
        bench.step()


def test_layers_beside_decoding_sequences_take_no_more_than_chunks_do() -> None:
    bench = Bench(max_running=8, vision=TOWER)
    _busy(bench)
    for i in range(3):
        ask(bench, f"{i}", image(4, hash=b"%d" % i, patches=600), prompt=400, max_tokens=1)
    steps: list[float] = []
    while bench.statistics().vision.encoded < 3:
        before = bench.now
        bench.step()
        steps.append(bench.now - before)
    assert max(steps) <= 2.2 * 0.01
    assert sum(steps) / len(steps) <= 1.5 * 0.01, "they keep their rate"


@pytest.mark.parametrize("count", [1, 6])
def test_prompts_with_images_that_one_step_could_end_delay_none_as_texts_of_that_length_do(count: int) -> None:
    """P3"""
    longest = {}
    for kind in ("image", "text"):
        bench = Bench(max_running=12, vision=TOWER)
        _busy(bench)
        for known in (400, 90):  # so that the cost of a chunk is
            ask(bench, f"known {known}", prompt=known, max_tokens=1)
            while bench.heard[f"known {known}"].finish is None:
                bench.step()
        for i in range(count):
            pictures = (image(4, 80, hash=b"%d" % i, patches=600),) if kind == "image" else ()
            ask(bench, f"{i}", *pictures, prompt=90, max_tokens=1)
        steps: list[float] = []
        while any(bench.heard[f"{i}"].finish is None for i in range(count)):
            before = bench.now
            bench.step()
            steps.append(bench.now - before)
        longest[kind] = max(steps)
    assert longest["image"] <= 1.75 * 0.01 < longest["text"]


@pytest.mark.untraced
@pytest.mark.parametrize(("decoding", "most"), [(0, 4), (1, 1)])
def test_beside_decoding_sequences_one_with_images_joins_a_step(decoding: int, most: int) -> None:
    """P3: to admit it takes the host a part of a step, and so many at once took three."""
    bench = Bench(vision=TOWER, max_running=16)
    for i in range(decoding):
        bench.submit(f"decodes {i}", prompt=4, max_tokens=60)
    for _ in range(3 * decoding):
        bench.step()
    requests = [ask(bench, f"i{i}", image(4, hash=b"%d" % i)) for i in range(4)]
    texts = [bench.submit(f"t{i}", prompt=8) for i in range(3)]
    joins = [[admit.request.id for admit in plan.admit] for plan in seen(bench) if plan.admit]
    assert [sum(id_.startswith("i") for id_ in some) for some in joins] == [most] * (4 // most)
    assert [id_ for some in joins for id_ in some if id_.startswith("i")] == ["i0", "i1", "i2", "i3"]
    assert {id_ for id_ in joins[0] if id_.startswith("t")} == {"t0", "t1", "t2"}, "texts wait for none of them"
    for request in (*requests, *texts):
        bench.assert_undisturbed(request)
    bench.assert_idle()


@pytest.mark.parametrize(("decoding", "most"), [(False, 2), (True, 1)])
def test_beside_decoding_sequences_no_image_begins_where_one_ends(decoding: bool, most: int) -> None:
    """P3: an image's first layers and its last ones take the host longer than those between."""
    encodings = Encodings(TOWER)
    seqs = [
        Sequence.of(
            Submit(id=f"{i}", prompt=(1, 2, 3), max_tokens=1, images=(image(0, 2, hash=b"%d" % i),)), order=i, now=0.0
        )
        for i in range(2)
    ]
    for seq in seqs:
        encodings.join(seq)
    steps, units = [], TOWER.units(image(0, 2)) * 4
    while any(seq.awaited_images for seq in seqs):
        encodes, spent = encodings.plan(seqs, units, decoding=decoding)
        assert 0 < spent <= units
        steps.append([(encode.id, encode.count) for encode in encodes])
    assert max(map(len, steps)) == most
    assert steps[:2] == [[("0", 4)], [("0", 2), ("1", 2)][:most]]


@pytest.mark.parametrize("seed", range(20))
def test_neither_text_nor_images_starve(seed: int) -> None:
    """With ever more of the other kind, each request gets its first token after a bounded number of steps."""
    chance = random.Random(seed)
    bench = Bench(max_running=12, vision=chance.choice((TOWER, WHOLE)), lookahead=chance.choice((0, 1)))
    _busy(bench, rows=chance.choice((0, 2)))
    flood, victim = chance.choice((("text", "image"), ("image", "text")))
    number, running, waiting, ages = 0, set[str](), dict[str, int](), list[int]()

    def send(kind: str, id_: str) -> None:
        length = chance.randint(40, 300)
        pictures = (image(4, 16, hash=id_.encode(), patches=chance.choice((24, 600))),) if kind == "image" else ()
        bench.submit(id_, prompt=length, images=pictures, max_tokens=1)

    for step in range(1500):
        running = {id_ for id_ in running if bench.heard[id_].finish is None}
        while len(running) < 6:
            number += 1
            running.add(f"flood {number}")
            send(flood, f"flood {number}")
        if step % 60 == 0:
            send(victim, f"victim {step}")
            waiting[f"victim {step}"] = step
        bench.step()
        for id_ in [id_ for id_ in waiting if bench.heard[id_].finish is not None]:
            ages.append(step - waiting.pop(id_))
    assert len(ages) >= 20
    assert max(ages, default=0) <= 400
    assert all(1500 - step <= 400 for step in waiting.values())
