"""treadle.Engine: the engine in somebody's own asyncio program, over a real model on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.aio import in_loop
from tests.support.tiny import make_tiny
from treadle import Engine
from treadle.errors import (
    Busy,
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelError,
    ServerStopping,
    StartFailed,
)

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 50_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end token, so that only limits end what it says."""
    return make_tiny(tmp_path_factory.mktemp("library") / "tiny", architecture="qwen3", context=60_000, eos=False)


@contextlib.asynccontextmanager
async def engine_of(folder: Path, **settings: Any) -> AsyncGenerator[Engine, None]:
    """A started engine; every slot must be free in the end."""
    async with Engine(folder, threads=1, **settings) as engine:
        yield engine
        await asyncio.wait_for(engine.client.idle(), 20)


def owners() -> int:
    return sum(thread.name == "treadle-owner" for thread in threading.enumerate())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


@in_loop
async def test_all_ways_to_ask_give_the_same_answer(folder: Path) -> None:
    async with engine_of(folder) as engine:
        whole = await engine.generate("Hello", **GREEDY)
        assert whole.prompt_tokens == 5
        assert len(whole.tokens) == 24
        assert whole.finish_reason == "length"
        assert "".join([text async for text in engine.stream("Hello", **GREEDY)]) == whole.text
        assert tuple([token async for token in engine.tokens("Hello", **GREEDY)]) == whole.tokens
        assert await engine.generate(list(b"Hello"), **GREEDY) == whole
        pieces = [piece async for piece in engine.pieces("Hello", **GREEDY)]
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


@in_loop
async def test_a_draft_model_changes_no_answer(folder: Path, tmp_path: Path) -> None:
    """Greedy and drawn, several at once; status names it."""
    draft = make_tiny(tmp_path / "draft", layers=1, seed=3, eos=False)
    ways = [GREEDY | {"temperature": heat, "seed": i} for i, heat in enumerate((0.0, 0.7, 1.0))]

    async def ask(engine: Engine) -> list[tuple[int, ...]]:
        prompts = (list(range(3 + 50 * i)) for i in range(len(ways)))
        asked = (engine.generate(prompt, **way) for prompt, way in zip(prompts, ways, strict=True))
        return [whole.tokens for whole in await asyncio.gather(*asked)]

    async with engine_of(folder, speculate="off") as engine:
        wanted = await ask(engine)
    async with engine_of(folder, draft=str(draft)) as engine:
        for _ in range(3):
            assert await ask(engine) == wanted
        status = engine.status()
    assert status["speculation"]["drafters"] == ["lookup", "draft"]
    assert status["capabilities"]["details"]["draft model"].startswith("draft (llama, ")


@in_loop
async def test_messages_are_rendered_with_the_models_template(folder: Path) -> None:
    async with engine_of(folder) as engine:
        chat = await engine.generate([{"role": "user", "content": "Hello"}], **GREEDY)
        assert chat.prompt_tokens == len("?user\nHello?\n?assistant\n")
        assert chat.text != (await engine.generate("Hello", **GREEDY)).text


@in_loop
async def test_messages_are_read_as_leniently_as_in_http(folder: Path) -> None:
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "So?"},
    ]
    echoed: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "finish_reason": "stop", "provider_specific_fields": {}},
        {"role": "user", "content": "So?", "id": "x"},
    ]
    async with engine_of(folder) as engine:
        assert await engine.generate(echoed, **GREEDY) == await engine.generate(plain, **GREEDY)
        with pytest.raises(InvalidRequest, match=r"prompt\[0\]\.tool_calls\[0\]\.function is null"):
            await engine.generate([{"role": "assistant", "tool_calls": [{}]}], **GREEDY)
        begun = await engine.generate([plain[0], {"role": "assistant", "content": "We", "prefix": True}], **GREEDY)
        assert begun.prompt_tokens == len("?user\nHello?\n?assistant\nWe")


@in_loop
async def test_many_at_once_are_each_as_alone(folder: Path) -> None:
    """B1, and Fidelity."""
    prompts = [f"{'word ' * n}end" for n in range(8)]
    async with engine_of(folder) as engine:
        together = await asyncio.gather(*(engine.generate(prompt, **GREEDY) for prompt in prompts))
        assert together == [await engine.generate(prompt, **GREEDY) for prompt in prompts]
        seeded: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24}
        first, *_ = await asyncio.gather(*(engine.generate(prompt, **seeded) for prompt in prompts))
        assert first == await engine.generate(prompts[0], **seeded)


@in_loop
async def test_leaving_a_stream_early_cancels_it(folder: Path) -> None:
    """B6: the one slot is free for the next at once, however the stream was left."""
    async with engine_of(folder, max_running=1) as engine:
        async for _ in engine.stream("Hello", **ENDLESS):
            break
        assert len((await engine.generate("next", **GREEDY)).tokens) == 24
        async with contextlib.aclosing(engine.tokens("Hello", **ENDLESS)) as tokens:
            await anext(tokens)
        await asyncio.wait_for(engine.client.idle(), 20)
        assert engine.status()["admission"]["ended"]["cancelled"] == 2


@in_loop
async def test_a_cancelled_caller_frees_its_slot(folder: Path) -> None:
    async with engine_of(folder, max_running=1) as engine:
        task = asyncio.create_task(engine.generate("Hello", **ENDLESS))
        await until(lambda: engine.status()["admission"]["running"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await engine.generate("next", **GREEDY)).tokens) == 24


@in_loop
async def test_stop_strings_end_the_text_before_them(folder: Path) -> None:
    async with engine_of(folder) as engine:
        whole = await engine.generate("Hello", **GREEDY)
        stop = next(c for c in whole.text[1:] if c.isascii())
        for given in (stop, [stop, "never"]):
            stopped = await engine.generate("Hello", stop=given, **GREEDY)
            assert stopped.text == whole.text.partition(stop)[0]
            assert stopped.finish_reason == "stop"
            assert stopped.tokens == whole.tokens[: len(stopped.tokens)]


@in_loop
async def test_what_is_wrong_is_said_and_costs_nothing(folder: Path) -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("Hello", {"temprature": 1}, "unknown argument 'temprature'; did you mean 'temperature'"),
        ("Hello", {"zzz": 1}, "unknown argument 'zzz'; known: .*top_p"),
        ("Hello", {"temperature": -1}, "temperature"),
        ("Hello", {"max_tokens": 0}, "max_tokens"),
        ("Hello", {"n": 2}, "n must be 1"),
        ("Hello", {"cache_salt": ""}, "cache_salt"),
        ("Hello", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("", {}, "empty"),
        ([], {}, "empty"),
        ([261], {}, "261"),
        ([-1], {}, "-1"),
        (["Hello"], {}, "prompt"),
        (5, {}, "prompt"),
        (None, {}, "prompt"),
        (b"Hello", {}, r"a prompt is text, not bytes: decode it, or give list\(prompt\)"),
        (bytearray(b"Hello"), {}, "not bytearray"),
        (memoryview(b"Hello"), {}, "not memoryview"),
        ([{"role": "user"}], {}, "content"),
        ([{"role": "user", "content": 5}], {}, "content"),
    ]
    async with engine_of(folder) as engine:
        for prompt, sampling, named in wrong:
            with pytest.raises(InvalidRequest, match=named):
                await engine.generate(prompt, **sampling)
        with pytest.raises(ContextLengthExceeded):
            await engine.generate("x" * 70_000)
        assert engine.status()["admission"]["rows"] == 0


@in_loop
async def test_a_full_engine_says_busy_at_once(folder: Path) -> None:
    """D1."""
    async with engine_of(folder, max_running=1, max_waiting=0) as engine:
        async with contextlib.aclosing(engine.tokens("Hello", **ENDLESS)) as tokens:
            await anext(tokens)
            with pytest.raises(Busy) as refused:
                await engine.generate("too many", **GREEDY)
            assert refused.value.retry_after_s is not None
        await engine.client.idle()
        assert len((await engine.generate("next", **GREEDY)).tokens) == 24


@in_loop
async def test_jobs_run_on_the_owner_between_steps(folder: Path) -> None:
    """A6, A3: a caller that is cancelled hears of it once the job has unwound, and the engine goes on."""
    async with engine_of(folder) as engine:
        running = asyncio.create_task(engine.generate("Hello", **GREEDY))
        memory = await engine.client.jobs.run("memory")
        assert memory
        assert all(type(value) is int for value in memory.values())
        with pytest.raises(InvalidRequest, match="known: memory"):
            await engine.client.jobs.run("unknown")
        called: list[str] = []
        cancelled = asyncio.create_task(engine.client.jobs.run("memory", on_cancel=lambda: called.append("once")))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert called == ["once"]
        assert engine.client.jobs.pending == 0
        assert len((await running).tokens) == 24


@in_loop
async def test_stopping_ends_what_runs_with_an_error(folder: Path) -> None:
    """C3: nobody hangs."""
    engine = await Engine(folder, threads=1).start()
    tasks = [asyncio.create_task(engine.generate(f"{n}", **ENDLESS)) for n in range(3)]
    await until(lambda: engine.status()["admission"]["running"] == 3)
    await engine.stop()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, ServerStopping)
    assert (engine.status()["state"], engine.status()["reason"]) == ("stopped", "the engine was stopped")
    with pytest.raises(ServerStopping):
        await engine.generate("late")
    await engine.stop()


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("stage", ["resolve", "loading"])
@in_loop
async def test_a_stop_while_the_engine_starts_ends_the_start(folder: Path, in_process: bool, stage: str) -> None:
    """C3: a program that has stopped its engine holds no model afterwards."""
    engine = Engine(folder, threads=1, in_process=in_process)
    starting = asyncio.create_task(engine.start())
    if stage == "loading":
        await until(lambda: engine._client is not None)
    else:
        await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(StartFailed, match="stopped before it was ready"):
        await starting
    await until(lambda: owners() == 0)
    await engine.stop()


@in_loop
async def test_an_engine_that_was_not_started_says_so(folder: Path) -> None:
    engine = Engine(folder)
    with pytest.raises(RuntimeError, match="not started"):
        await engine.generate("Hello")
    await engine.stop()


@in_loop
async def test_an_engine_starts_once(folder: Path) -> None:
    async with engine_of(folder) as engine:
        with pytest.raises(RuntimeError, match="once"):
            await engine.start()
    with pytest.raises(RuntimeError, match="once"):
        await engine.start()
    await until(lambda: owners() == 0)


@in_loop
async def test_a_failed_start_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """C1."""
    torn = make_tiny(tmp_path / "torn", layers=1)
    config = json.loads((torn / "config.json").read_text())
    (torn / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(StartFailed, match="torn"):
        await Engine(torn, threads=1).start()
    with pytest.raises(ConfigError, match="context"):
        await Engine(folder, context=1_000_000).start()
    with pytest.raises(ConfigError, match=r"image_hosts.* would do nothing: the model reads text only"):
        await Engine(torn, image_hosts=("images.example.com",)).start()  # before weights are read
    with pytest.raises(ModelError, match="nowhere"):
        await Engine(folder / "nowhere").start()
    with pytest.raises(ConfigError, match="max_running"):
        Engine(folder, max_runing=3)
    for model in (None, 5, b"m", ["m"]):
        with pytest.raises(ConfigError, match="model must be text or a Path, not"):
            Engine(model)  # type: ignore[arg-type]
    await until(lambda: owners() == 0)


@in_loop
async def test_two_engines_at_once(folder: Path, tmp_path: Path) -> None:
    """A1: each has an owner of its own."""
    other = make_tiny(tmp_path / "other", architecture="gemma3", eos=False)
    async with engine_of(folder) as one, Engine(other, threads=1) as two:
        alone = await one.generate("Hello", **GREEDY), await two.generate("Hello", **GREEDY)
        asked = [engine.generate("Hello", **GREEDY) for _ in range(4) for engine in (one, two)]
        assert await asyncio.gather(*asked) == [*alone] * 4
        await two.stop()
        assert await one.generate("Hello", **GREEDY) == alone[0]


@in_loop
async def test_an_engine_in_a_child_process(folder: Path) -> None:
    async with engine_of(folder, in_process=False) as engine:
        assert engine.status()["engine"]["pid"] not in (None, os.getpid())
        assert len((await engine.generate("Hello", **GREEDY)).tokens) == 24


WORK = "engine.generate('Hello', max_tokens=50000)"
ENDS = {
    "inside a stream": "async for text in engine.stream('Hello', max_tokens=50000): break",
    "with work running": f"work = asyncio.gather({WORK}, return_exceptions=True); await asyncio.sleep(0)",
    "by an exception": f"asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel); await {WORK}",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_it_means_to(folder: Path, end: str) -> None:
    """No abort at the interpreter's end (mlx.md), and no noise."""
    program = f"""
import asyncio, contextlib, treadle
async def main():
    async with treadle.Engine({str(folder)!r}, threads=1) as engine:
        {ENDS[end]}
with contextlib.suppress(asyncio.CancelledError):
    asyncio.run(main())
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_a_program_that_never_stops_its_engine_ends_all_the_same(folder: Path) -> None:
    program = f"""
import asyncio, treadle
async def main():
    engine = await treadle.Engine({str(folder)!r}, threads=1).start()
    print((await engine.generate("Hello", max_tokens=5)).finish_reason)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "length\n", "")


def test_a_second_engine_of_a_program_has_the_firsts_blas_and_it_ends_well(folder: Path) -> None:
    program = f"""
import asyncio, treadle
async def main():
    for _ in range(2):
        async with treadle.Engine({str(folder)!r}, threads=1) as engine:
            await engine.generate("Hello", max_tokens=5)
            print(engine.client.capabilities.details["blas"])
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    first, second = ended.stdout.splitlines()
    assert (first, ended.returncode, ended.stderr) == (second, 0, "")


@in_loop
async def test_an_argument_of_the_wrong_type_names_itself(folder: Path) -> None:
    wrong = {
        "stop": (3, True, {}, {"a": 1}, b"x"),
        "stop_token_ids": (3, "12", {}),
        "logit_bias": ("x", [1], 0),
    }
    async with engine_of(folder) as engine:
        for name, values in wrong.items():
            for value in values:
                with pytest.raises(InvalidRequest, match=f"^{name} is") as refused:
                    await engine.generate("hi", max_tokens=2, **{name: value})
                assert refused.value.param == name
