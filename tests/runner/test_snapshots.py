"""F6 where caches can't be cut (recurrent, hybrid, latent, chunked): prompts go on from snapshots, and end the same."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from tests.cache.oracle import common
from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.reference import reference, references
from tests.runner.test_with_scheduler import POISON, Poisonous
from treadle.core.messages import FinishReason, Submit
from treadle.core.plan import Admit, PrefillChunk, StepPlan
from treadle.runner.forward.segments import KvSequence
from treadle.runner.kv.padded.snapshots import BLOCK, NODE_BYTES, Snapshots
from treadle.runner.loading.model import LoadedModel
from treadle.runner.mlxlm import connect
from treadle.runner.model_runner import ModelRunner

SNAPSHOT_FAMILIES = ["mamba", "deepseek_v3", "llama4"]
CUTS = ["deepseek_v3"]


def some_tokens(seed: int, count: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(256) for _ in range(count))


def request(id_: str, prompt: Sequence[int], max_tokens: int = 12, **options: Any) -> Submit:
    return Submit(id=id_, prompt=tuple(prompt), max_tokens=max_tokens, max_wait_s=1e9, **options)


def loop_of(model: LoadedModel) -> Looped:
    assert model.choice.config.name in ("padded", "serial")
    assert model.choice.config.keep_prefixes
    return Looped(ModelRunner(model), prefill_tokens=512)


# What is reused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SNAPSHOT_FAMILIES)
def test_a_prompt_goes_on_from_the_last_snapshot_on_its_way(tiny: Tiny, family: str) -> None:
    """The same again, one that goes on, and those that part: the first that does leaves a snapshot to the next."""
    model = tiny(family, padded=True)
    loop = loop_of(model)
    trunk, other = some_tokens(1, 200), some_tokens(2, 200)
    answer = loop.run(request("first", trunk, max_tokens=40))["first"]
    turns = {  # reused where a state can't be cut, and where there are keys and values only
        "again": (trunk, 192, 199),
        "longer": (trunk + other[:60], 192, 200),
        "next turn": ((*trunk, *answer, *other[:9]), 239, 239),
        "parts": (trunk[:150] + other[:50], 0, 150),
        "parts as well": (trunk[:150] + other[100:170], 128, 150),
        "parts there too": (trunk[:130] + other[70:90], 128, 130),
        "earlier": (trunk[:70] + other[:20], 0, 70),
        "earlier again": (trunk[:80] + other[20:40], 64, 80),
        "short": (trunk[:40], 0, 39),
        "else": (other, 0, 0),
    }
    for name, (prompt, *reused) in turns.items():
        asked = request(name, prompt)
        got = loop.run(asked)[name]
        assert got == reference(model, asked, got), name
        assert loop.cached(name) == reused[family in CUTS], name


@pytest.mark.parametrize("family", SNAPSHOT_FAMILIES)
def test_a_conversation_goes_on_where_its_last_turn_ended(tiny: Tiny, family: str) -> None:
    """The answer included, but for its last token, which nothing was computed from."""
    model = tiny(family, padded=True)
    loop = loop_of(model)
    prompt, known = some_tokens(3, 50), 0
    for turn in range(4):
        asked = request(f"turn {turn}", prompt, max_tokens=37)
        answer = loop.run(asked)[asked.id]
        assert answer == reference(model, asked, answer)
        assert loop.cached(asked.id) == known
        known = len(prompt) + len(answer) - 1
        prompt = (*prompt, *answer, *some_tokens(turn, 9))


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "llama4"])
def test_who_comes_while_the_prompt_is_read_finds_where_they_part(tiny: Tiny, family: str) -> None:
    """The second waits for it, and the first leaves a snapshot there."""
    model = tiny(family, padded=True)
    loop = Looped(ModelRunner(model), prefill_tokens=100)
    trunk = some_tokens(4, 210)
    first, second, third = (request(f"r{i}", trunk + some_tokens(10 + i, 300)) for i in range(3))
    loop.submit(first)
    loop.step()
    loop.submit(second)
    while not loop.tokens("r1"):
        loop.step()
    answers = loop.run(third)
    assert answers == references(model, (first, second, third), answers)
    assert [loop.cached(id_) for id_ in answers] == [0, 192, 210 if family in CUTS else 192]


@pytest.mark.parametrize("family", [*SNAPSHOT_FAMILIES, "llama"])
@pytest.mark.parametrize("reused", [0, 100])
def test_what_those_who_come_together_share_is_computed_once(tiny: Tiny, family: str, reused: int) -> None:
    """P9: they wait for the first, which leaves one snapshot to all of them, however its chunks fall. It may have gone
    on from an earlier one itself."""
    model = tiny(family, padded=True)
    loop = Looped(ModelRunner(model), prefill_tokens=90)
    trunk = some_tokens(4, 310)
    loop.run(request("before", trunk[: reused + 1], max_tokens=1))
    kept = loop.runner.statistics().prefix.stored
    some = [request(f"r{i}", trunk + some_tokens(10 + i, 60)) for i in range(4)]
    loop.submit(*some)
    loop.step()
    while not any(loop.scheduler._sequences[one.id].joined for one in some[1:]):
        loop.step()
    assert loop.runner.statistics().prefix.stored - kept <= 256 + 370
    answers = loop.run()
    assert [answers[one.id] for one in some] == [reference(model, one, answers[one.id]) for one in some]
    assert all(loop.cached(one.id) in (256, 310) for one in some[1:])


def test_a_mark_that_comes_late_is_where_the_prompts_part(tiny: Tiny) -> None:
    """Behind the last whole block that they share, and before they do not any more."""
    model = tiny("qwen3_next", padded=True)
    loop = Looped(ModelRunner(model), prefill_tokens=30)
    trunk = some_tokens(4, 230)
    first, second = (request(f"r{i}", trunk + some_tokens(10 + i, 30)) for i in range(2))
    loop.submit(first)
    loop.step()
    while loop.scheduler._sequences["r0"].committed_tokens <= 192:
        loop.step()
    loop.submit(second)
    answers = loop.run()
    assert loop.cached("r1") == 230
    assert answers == references(model, (first, second), answers)


def test_rows_in_one_batch_leave_what_they_would_have_left_alone(tiny: Tiny) -> None:
    """Taken out of the middle of a batch that others stay in, and out of a padded one."""
    model = tiny("qwen3_next", padded=True)
    loop = loop_of(model)
    asked = [request(f"r{i}", some_tokens(i, 60 + 30 * i), max_tokens=40 - 9 * i) for i in range(4)]
    answers = loop.run(*asked)
    for one in asked:
        later = request(f"{one.id} later", (*one.prompt, *answers[one.id], 1, 2, 3))
        answer = loop.run(later)[later.id]
        assert answer == reference(model, later, answer)
        assert loop.cached(later.id) == len(one.prompt) + one.max_tokens - 1


@pytest.mark.parametrize("family", ["qwen3_next", "llama4"])
def test_those_of_another_salt_find_nothing(tiny: Tiny, family: str) -> None:
    """One tenant can't probe another's prompts, nor what its own part from."""
    loop = loop_of(tiny(family, padded=True))
    prompt = some_tokens(5, 129)
    for id_, salt, cached in [("a", "x", 0), ("b", "y", 0), ("c", "", 0), ("d", "x", 128), ("e", "y", 128)]:
        loop.run(request(id_, prompt, max_tokens=3, salt=salt))
        assert loop.cached(id_) == cached, id_


@pytest.mark.parametrize("family", SNAPSHOT_FAMILIES)
def test_an_answer_that_is_scored_is_right_and_leaves_the_same(tiny: Tiny, family: str) -> None:
    """Who wants the log-probabilities of its prompt reuses nothing, and others go on from what it leaves."""
    model = tiny(family, padded=True)
    loop = loop_of(model)
    prompt = some_tokens(6, 150)
    loop.run(request("plain", prompt))
    scored = loop.run(request("scored", prompt, prompt_logprobs=0))
    assert scored["scored"] == scored["plain"]
    assert len([one for output in loop.outputs["scored"] for one in output.prompt_logprobs]) == 149


# What is kept -------------------------------------------------------------------------------------------------------


def test_a_request_leaves_few_snapshots(tiny: Tiny) -> None:
    """However long its prompt, and in however many chunks: at the end, where it parts from others, and when it goes."""
    runner = ModelRunner(tiny("mamba", padded=True))
    loop = Looped(runner, prefill_tokens=50)
    loop.run(request("a", some_tokens(7, 900), max_tokens=40))
    assert runner.statistics().prefix.held == 896 + 939
    loop.run(request("b", some_tokens(7, 400) + some_tokens(8, 301), max_tokens=40))
    assert runner.statistics().prefix.held == 896 + 939 + 384 + 640 + 740


@pytest.mark.parametrize("family", SNAPSHOT_FAMILIES)
def test_what_is_kept_and_running_stays_within_the_budget(tiny: Tiny, family: str) -> None:
    model = tiny(family, padded=True)
    budget = 5 * (model.kv.row_bytes + 300 * model.kv.token_bytes)
    runner = ModelRunner(tiny(family, padded=True, memory=budget))
    loop = Looped(runner, max_running=2, prefill_tokens=128)
    for i in range(6):
        loop.submit(request(f"r{i}", some_tokens(i, 250), max_tokens=6), request(f"s{i}", some_tokens(i, 150)))
        loop.step()
        while loop.has_work:
            loop.step()
            statistics = runner.statistics()
            assert statistics.prefix.held_bytes <= budget // 2
            assert statistics.kv_bytes + statistics.prefix.held_bytes <= budget
    assert runner.statistics().prefix.evicted > 0
    assert runner.statistics().prefix.held > 0


def test_a_budget_below_one_snapshot_keeps_none(tiny: Tiny) -> None:
    model = tiny("qwen3_next", padded=True)
    runner = ModelRunner(tiny("qwen3_next", padded=True, memory=model.kv.row_bytes + 150 * model.kv.token_bytes))
    loop = Looped(runner, max_running=1)
    asked = request("a", some_tokens(9, 130))
    for _ in range(2):
        assert loop.run(asked)["a"][-12:] == reference(model, asked)
    assert runner.statistics().prefix.held == 0


def test_what_is_kept_can_be_given_up_and_takes_no_memory_then(tiny: Tiny) -> None:
    runner = ModelRunner(tiny("qwen3_next", padded=True))
    loop = Looped(runner, prefill_tokens=512)

    def memory() -> int:
        """Memory in use behind equal passes of one row: on the CPU the factors of the last rotations stay."""
        loop.run(request("one", some_tokens(9, 2), max_tokens=1))
        runner.forget_prefixes()
        gc.collect()  # what other tests left may go meanwhile
        mx.synchronize()
        return mx.get_active_memory()

    loop.run(*(request(f"warm{i}", some_tokens(i, 300)) for i in range(3)))
    before = memory()
    loop.run(*(request(f"r{i}", some_tokens(i, 300)) for i in range(3)))
    kept = runner.statistics().prefix
    assert kept.held == 3 * (256 + 311)
    assert 0 < mx.get_active_memory() - before <= 1.5 * kept.held_bytes  # buffers are reused for somewhat less
    assert runner.forget_prefixes() == kept.held
    assert runner.statistics().prefix.held_bytes == 0
    assert memory() - before <= 512  # small arrays that MLX's thread holds come and go
    asked = request("again", some_tokens(1, 300))
    loop.run(asked)
    assert loop.cached("again") == 0


def test_a_row_that_failed_leaves_nothing(tiny: Tiny) -> None:
    """Some of its layers may have gone on, and others not."""
    model = tiny("qwen3_next", padded=True)
    runner = ModelRunner(replace(model, module=FailsAt(model.module, 3)))
    prompt = some_tokens(1, 400)
    asked = request("a", prompt)
    for start in (0, 100):
        chunk = PrefillChunk("a", start, len(prompt[start : start + 100]))
        admit = (Admit(request=asked),) if not start else ()
        runner.execute(StepPlan(step=1, admit=admit, prefill=(chunk,)))
    result = runner.execute(StepPlan(step=2, prefill=(PrefillChunk("a", 200, len(prompt[200:300])),)))
    assert [failure.id for failure in result.failures] == ["a"]
    runner.release("a")
    assert runner.statistics().prefix.held == 0
    assert runner.match_prefix(Admit(request=asked)) == 0


class FailsAt:
    """A model whose caches have gone on when it refuses its call number `call`, as one with a wrong argument does."""

    def __init__(self, module: Any, call: int) -> None:
        self._module = module
        self._left = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._module(*args, **kwargs)
        self._left -= 1
        if not self._left:
            raise ValueError("bad shape")
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def test_who_is_released_half_way_leaves_what_it_has(tiny: Tiny) -> None:
    """A client that left, and comes again with the same."""
    model = tiny("mamba", padded=True)
    loop = Looped(ModelRunner(model), prefill_tokens=100)
    loop.submit(request("a", some_tokens(1, 400)))
    loop.step()
    loop.step()
    loop.cancel("a")
    while loop.has_work:
        loop.step()
    again = request("b", some_tokens(1, 400))
    assert loop.run(again)["b"] == reference(model, again)
    assert loop.cached("b") >= 100


def test_warming_up_leaves_nothing_behind(tiny: Tiny) -> None:
    """C2"""
    runner = ModelRunner(tiny("qwen3_next", padded=True))
    runner.warm_up()
    assert runner.statistics().prefix.held_bytes == 0


def test_without_a_prefix_cache_nothing_is_kept(tiny: Tiny) -> None:
    runner = ModelRunner(tiny("mamba", padded=True, prefix_cache=False))
    assert not runner.capabilities().steps.prefix_cache
    loop = Looped(runner)
    for id_ in "ab":
        loop.run(request(id_, some_tokens(1, 300)))
        assert loop.cached(id_) == 0
    assert runner.statistics().prefix.held_bytes == 0


# The snapshots themselves -------------------------------------------------------------------------------------------


def kept_state(value: float) -> list[Any]:
    """A cache with a state of `value`s."""
    from mlx_lm.models.cache import ArraysCache

    cache = ArraysCache(1)
    cache[0] = mx.full((1, 1024), value)
    return [cache]


def value_of(caches: list[Any]) -> float:
    return float(caches[0][0][0, 0].item())


SIZE = 4096
ROOM = 1 << 30


def test_the_deepest_snapshot_that_agrees_completely_is_found() -> None:
    """Also where longer ways with other snapshots agree with more tokens."""
    snapshots = Snapshots(connect())
    tokens = list(some_tokens(1, 300))
    lengths = [64, 70, 100, 128, 127, 200, 250]
    for length in lengths:
        snapshots.store("", tokens[:length], kept_state(length), ROOM, f"r{length}")
    snapshots.store("", [*tokens[:140], 999], kept_state(-1), ROOM, "other")
    for count in range(301):
        found = snapshots.find("", tokens[:count], "asks")
        wanted = max((length for length in lengths if length <= count), default=0)
        assert (0 if found is None else found.tokens) == wanted, count
        assert found is None or value_of(found.caches) == wanted
    assert snapshots.find("", [*tokens[:126], 998], "asks").tokens == 100  # type: ignore[union-attr]


def test_what_was_kept_stays_the_same_whoever_writes_to_what_was_found() -> None:
    snapshots = Snapshots(connect())
    tokens = some_tokens(1, 64)
    snapshots.store("", tokens, kept_state(1), ROOM, "a")
    first = snapshots.find("", tokens, "b")
    assert first is not None
    first.caches[0][0][:] = 2.0
    again = snapshots.find("", tokens, "c")
    assert again is not None
    assert value_of(again.caches) == 1.0


def test_a_snapshot_does_not_keep_the_batch_it_came_from() -> None:
    """A slice of an array keeps all of it, also when it is evaluated."""
    from mlx_lm.models.cache import BatchKVCache, KVCache

    snapshots = Snapshots(connect())
    before = mx.get_active_memory()
    rows = []
    for i in range(16):
        rows.append(KVCache())
        rows[-1].update_and_fetch(*(mx.full((1, 4, BLOCK + i, 32), i),) * 2)
    batch = BatchKVCache.merge(rows)
    states = mx.ones((16, 4, 32, 32)) * 2
    mx.eval(batch.state, states)
    (state,) = kept_state(0)
    state[0] = states[3:4]
    mx.eval(state[0])
    snapshots.store("", some_tokens(1, BLOCK), [batch.extract(0), state], ROOM, "a")
    del rows, batch, states, state
    assert 0 < mx.get_active_memory() - before <= 1.5 * snapshots.statistics().held_bytes


def test_rows_that_join_add_nothing_to_the_budget(tiny: Tiny) -> None:
    """F6: each is marked where its way parts from others', before a pass comes, and also where none does."""
    model = tiny("mamba", padded=True)
    memory = 12 * (model.kv.row_bytes + 256 * model.kv.token_bytes)
    runner = ModelRunner(tiny("mamba", padded=True, memory=memory))
    loop = Looped(runner)
    for i in range(12):
        loop.run(request(f"r{i}", some_tokens(i, 3 * BLOCK), max_tokens=2))
    for i in range(40):
        sequence = KvSequence(f"joins {i}", "", some_tokens(100 + i, 3 * BLOCK))
        runner._rows[sequence.id] = sequence  # type: ignore[assignment]
        runner._backend.admit(sequence)
        assert runner.statistics().prefix.held_bytes <= memory // 2


def test_snapshots_that_others_use_outlive_those_that_nobody_does() -> None:
    """A shared system prompt under a flood of prompts of their own, and its turn comes when nobody asks any more."""
    snapshots = Snapshots(connect())
    room = 8 * (SIZE + 2 * NODE_BYTES)
    shared = some_tokens(1, 2 * BLOCK)
    snapshots.store("", shared, kept_state(1), room, "shared")
    for i in range(40):
        if i % 10 < 3:
            assert snapshots.find("", (*shared, i), f"user {i}") is not None
        snapshots.store("", some_tokens(100 + i, 2 * BLOCK), kept_state(i), room, f"r{i}")
        assert snapshots.statistics().held_bytes <= room
    for i in range(200):
        snapshots.store("", some_tokens(1000 + i, 2 * BLOCK), kept_state(i), room, f"s{i}")
    assert snapshots.find("", (*shared, 1), "late") is None


def test_the_turns_of_a_conversation_are_given_up_oldest_first() -> None:
    """Though the later ones hang on the earlier ones' tokens."""
    snapshots = Snapshots(connect())
    tokens = some_tokens(1, 10 * BLOCK)
    room = 3 * SIZE + 10 * NODE_BYTES
    for turn in range(1, 11):
        snapshots.store("", tokens[: turn * BLOCK], kept_state(turn), room, f"turn {turn}")
        found = snapshots.find("", tokens[: turn * BLOCK], f"turn {turn + 1}")
        assert found is not None
        assert found.tokens == turn * BLOCK


def test_what_does_not_fit_is_not_kept_and_drops_nothing_else() -> None:
    snapshots = Snapshots(connect())
    small, large = some_tokens(1, BLOCK), some_tokens(2, BLOCK)
    snapshots.store("", small, kept_state(1), 2 * SIZE, "a")
    snapshots.store("", large, [*kept_state(1), *kept_state(2)], 2 * SIZE, "b")
    assert snapshots.find("", small, "c") is not None
    assert snapshots.find("", large, "d") is None


def kept_tokens(tokens: Sequence[int]) -> list[Any]:
    """A cache of keys and values, which are the tokens."""
    from mlx_lm.models.cache import KVCache

    cache = KVCache()
    values = mx.array(list(tokens), mx.float32)[None, None, :, None]
    cache.update_and_fetch(values, values)
    return [cache]


def test_keys_and_values_are_cut_to_what_agrees() -> None:
    """From whichever snapshot goes on the same way the longest, at the cost of what agrees."""
    dice = random.Random(1)
    snapshots = Snapshots(connect(), cuts=True)
    stored: list[tuple[int, ...]] = []
    for i in range(30):
        trunk = dice.choice(stored) if stored else ()
        tokens = trunk[: dice.randint(0, len(trunk))] + some_tokens(i, dice.choice([64, 100, 200]))
        stored.append(tokens)
        snapshots.store("", tokens, kept_tokens(tokens), ROOM, f"r{i}")
    for i in range(100):
        trunk = dice.choice(stored)
        asked = trunk[: dice.randint(0, len(trunk))] + some_tokens(100 + i, dice.choice([0, 1, 70]))
        wanted = max(common(asked, tokens) for tokens in stored)
        found = snapshots.find("", asked, "asks")
        assert (0 if found is None else found.tokens) == wanted
        if found is not None:
            assert found.caches[0].state[0].flatten().tolist()[:wanted] == list(asked[:wanted])
            assert found.caches[0].offset == wanted


def test_a_snapshot_that_is_cut_to_be_used_outlives_others_too() -> None:
    snapshots = Snapshots(connect(), cuts=True)
    shared = some_tokens(1, 3 * BLOCK)
    room = 8 * (8 * len(shared) + 4 * NODE_BYTES)
    snapshots.store("", shared, kept_tokens(shared), room, "shared")
    for i in range(40):
        found = snapshots.find("", (*shared[:100], i), f"user {i}")
        assert found is not None
        assert found.tokens == 100
        other = some_tokens(100 + i, 3 * BLOCK)
        snapshots.store("", other, kept_tokens(other), room, f"r{i}")
    assert snapshots.statistics().evicted > 0


# Anything at all ----------------------------------------------------------------------------------------------------


def conversations(dice: random.Random, count: int) -> list[Submit]:
    """Prompts that begin alike, all of them or some of it, of one of two salts."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(count):
        fresh = tuple(dice.randrange(240) for _ in range(dice.choice([3, 70, 130, 200])))
        if prompts and dice.random() < 0.8:
            trunk = dice.choice(prompts)
            cut = dice.choice([len(trunk), dice.randint(0, len(trunk)), 64, 128, 129])
            fresh = trunk[:cut] + fresh[: dice.choice([1, 40, 80])]
        prompts.append(fresh[:260])
    return [
        request(f"r{i}", prompt, max_tokens=dice.randint(1, 40), salt=dice.choice(["", "", "x"]))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("seed", "family"), [(i % 2, family) for i, family in enumerate(SNAPSHOT_FAMILIES)])
def test_whatever_happens_each_sequence_is_mlx_lms_own(tiny: Tiny, family: str, seed: int) -> None:
    """B7: joins, leaves, cancels, faults and prefix hits in a small budget, with answers that prompts go on from."""
    dice = random.Random(seed)
    model = tiny(family, padded=True)
    memory = 12 * (model.kv.row_bytes + 256 * model.kv.token_bytes)
    small = tiny(family, padded=True, memory=memory)
    runner = ModelRunner(replace(small, module=Poisonous(small.module, random.Random(seed))))
    loop = Looped(runner, max_running=4, prefill_tokens=dice.choice([40, 100, 512]))
    waiting, asked, cancelled = conversations(dice, 14), [], set()
    waiting.insert(3, request("guilty", (*waiting[0].prompt[:100], POISON), max_tokens=5))
    while waiting or loop.has_work:
        while waiting and dice.random() < 0.5:
            asked.append(waiting.pop(0))
            loop.submit(asked[-1])
        if asked and dice.random() < 0.04:
            cancelled.add(dice.choice(asked).id)
            loop.cancel(next(iter(cancelled)))
        if len(asked) < 20 and asked and dice.random() < 0.1:
            before = dice.choice(asked)
            prompt = (*before.prompt, *loop.tokens(before.id), *some_tokens(len(asked), 5))
            asked.append(request(f"t{len(asked)}", prompt, max_tokens=20, salt=before.salt))
            loop.submit(asked[-1])
        loop.step()
        statistics = runner.statistics()
        assert statistics.prefix.held_bytes <= memory // 2
    for one in asked:
        end, got = loop.finish(one.id), loop.tokens(one.id)
        if one.id != "guilty" and end is not FinishReason.ERROR:
            wanted = reference(model, one, got)
            assert got == wanted[: len(got)], one.id
            assert len(got) == len(wanted) or one.id in cancelled
    assert runner.statistics().kv_bytes == 0
    assert runner.statistics().prefix.reused > 0
