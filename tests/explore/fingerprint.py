"""What the future of a world depends on, as bytes: two worlds of one fingerprint behave alike from there on.

The walk takes in everything that can be reached: attributes, closures, the frames of coroutines and what they await,
callbacks and timers of the event loop. Nothing is listed by hand but what is left out, so that state which is added to
the engine counts from its first day. Left out, or made relative, is what does not change the future:

- LEFT_OUT: counters and forecasts that are shown and decide nothing here, and what tests keep for themselves.
- Times are told from now, as are step numbers from the scheduler's last one.
- Ids, which come from a counter, are told by the names of their requests.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import itertools
import marshal
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Any

import msgspec

from .turns import START

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "EngineClient": ("clock",),
    "Admission": ("_clock",),
    "Dispatch": ("report", "_groups", "_clock"),
    "Observers": ("_observers",),
    "Gate": ("_counters", "_on_refused"),
    "VirtualQueue": ("_tickets", "_new_id"),
    "Ticket": ("id",),
    "Lease": ("started", "service_s", "certain"),
    "Generation": ("submitted", "wait_s", "last_token"),
    "Supervisor": ("load_s",),
    "Scheduler": ("_prefill_budget", "_counters"),
    "PlanBuilder": ("_prefill_budget", "_counters"),
    "StepAccounting": ("_prefill_budget", "_counters"),
    "EngineLoop": ("_step", "_memory", "_clock", "_beat"),
    "Pending": ("wait_s",),
    "Output": ("wait_s",),
    "StepReport": ("step", "statistics"),
    "HashRunner": ("computed", "stored", "least_room", "cost", "asked"),
    "Jobs": ("_numbers",),
}
HIDDEN = {
    *("World", "Watch", "Condition", "InFlightTable"),
    *("AdmissionLimits", "Capabilities", "GateLimits", "OwnerLimits", "Timeouts", "SchedulerLimits", "Shape"),
}
"""Classes of the tests' own records, whose attributes that matter are walked by themselves, of locks, and of what is
the same in all states of a scenario."""
STEPS = {"last_decode_step", "last_prefill_step", "step"}
"""Attributes of rows, flights and plans that number steps."""
OPAQUE = (types.ModuleType, type, types.BuiltinFunctionType, itertools.count)


class Walker:
    """One walk. `names` says what stands for a string; `now` what times are told from."""

    def __init__(self, now: float, names: Mapping[str, str]) -> None:
        self.flat: list[Any] = []
        self._now = now
        self._names = names
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # or an id could come again within the walk
        self._steps = 0

    def digest(self, *roots: Any) -> bytes:
        for root in roots:
            self.walk(root)
        return hashlib.blake2b(marshal.dumps(self.flat, 2), digest_size=12).digest()

    def walk(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self.flat.append(self._names.get(value, value))
        elif kind is int or value is None or kind is bool or kind is bytes:
            self.flat.append(value)
        elif kind is float:
            self.flat.append(("t", round(value - self._now, 6)) if value > START / 2 else value)
        else:
            how = _HOW.get(kind)
            if how is None:
                how = _HOW[kind] = _how(kind)
            how(self, value)

    def first(self, value: Any) -> bool:
        """Whether `value` is met for the first time; else where it was is told."""
        number = self._seen.get(id(value))
        if number is not None:
            self.flat.append(("again", number))
            return False
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return True

    def items(self, value: Any) -> None:
        self.flat.append((type(value).__name__, len(value)))
        for item in value:
            self.walk(item)

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        self.flat.append(("mapping", len(value)))
        for key, item in value.items():
            self.walk(key)
            self.walk(item)

    def _set(self, value: Set[Any]) -> None:
        """In an order that does not hang on hashes: strings are sorted, and of anything else there is one at most."""
        self.flat.append(("set", len(value)))
        items = list(value)
        if all(isinstance(item, str) for item in items):
            items = sorted(self._names.get(item, item) for item in items)
        elif len(items) > 1:
            raise TypeError(f"a set of {type(items[0]).__name__} has no order to tell it by")
        for item in items:
            self.walk(item)

    def _scheduler(self, scheduler: Any) -> None:
        self._steps = scheduler._counters.steps
        self._attributes(scheduler)

    def _attributes(self, value: Any) -> None:
        kind = type(value)
        self.flat.append(kind.__name__)
        slots, out = _fields_of(kind)
        for name in slots:
            self._attribute(name, getattr(value, name, None))
        for name, item in getattr(value, "__dict__", {}).items():
            if name not in out:
                self._attribute(name, item)

    def _attribute(self, name: str, item: Any) -> None:
        if name in STEPS and type(item) is int:
            self.flat.append(item - self._steps)
        else:
            self.walk(item)

    # What Python keeps of code that waits

    def _function(self, function: types.FunctionType) -> None:
        self.flat.append(function.__qualname__)
        for cell in function.__closure__ or ():
            self.walk(cell.cell_contents)

    def _method(self, method: types.MethodType) -> None:
        self.flat.append(method.__func__.__qualname__)
        self.walk(method.__self__)

    def _coroutine(self, coroutine: types.CoroutineType[Any, Any, Any]) -> None:
        self._frame(coroutine.__qualname__, coroutine.cr_frame)
        self.walk(coroutine.cr_await)

    def _async_generator(self, generator: types.AsyncGeneratorType[Any, Any]) -> None:
        self._frame(generator.__qualname__, generator.ag_frame)
        self.walk(generator.ag_await)

    def _frame(self, name: str, frame: types.FrameType | None) -> None:
        self.flat.append(name)
        if frame is not None:
            self.flat.append(frame.f_lasti)
            self.walk(frame.f_locals)

    def _task(self, task: asyncio.Task[Any]) -> None:
        if task.done():
            self.flat.append("task done")
        else:
            self.flat.append(("task", task.cancelling()))
            self.walk(task.get_coro())

    def _future(self, future: asyncio.Future[Any]) -> None:
        self.flat.append(("future", future.done()))

    def _event(self, event: asyncio.Event) -> None:
        self.flat.append(("event", event.is_set(), tuple(waiter.done() for waiter in event._waiters)))

    def _handle(self, handle: Any) -> None:
        if not handle.cancelled():
            self.walk(getattr(handle, "_when", None))
            self.walk(handle._callback)
            self.walk(handle._args)

    def _loop(self, loop: Any) -> None:
        timers = [timer for _, _, timer in sorted(loop.timers, key=lambda entry: entry[:2]) if not timer.cancelled()]
        self.walk(list(loop.ready))
        self.walk(timers)
        self.walk([task for task in loop.tasks if not task.done()])

    def _weak(self, reference: weakref.ref[Any]) -> None:
        self.walk(reference())

    def name_only(self, value: Any) -> None:
        self.flat.append(type(value).__name__)

    def error(self, error: BaseException) -> None:
        self.flat.append((type(error).__name__, str(error)))

    def enum(self, value: enum.Enum) -> None:
        self.flat.append(value.value)


def fingerprint(now: float, names: Mapping[str, str], *roots: Any) -> bytes:
    """The state that `roots` reach. See the module."""
    return Walker(now, names).digest(*roots)


def _how(kind: type) -> How:
    """How values of a kind are walked. What can't change is walked by value, everything else once."""
    if issubclass(kind, enum.Enum):
        return Walker.enum
    if kind.__name__ in HIDDEN or issubclass(kind, OPAQUE):
        return Walker.name_only
    if issubclass(kind, tuple):
        return Walker.items
    if issubclass(kind, msgspec.Struct):
        return Walker._attributes
    once = _once(kind)

    def walk(walker: Walker, value: Any) -> None:
        if walker.first(value):
            once(walker, value)

    return walk


def _once(kind: type) -> How:
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    if issubclass(kind, Mapping):
        return Walker._mapping
    if issubclass(kind, Set):
        return Walker._set
    if issubclass(kind, (list, deque, array)):
        return Walker.items
    if issubclass(kind, BaseException):
        return Walker.error
    by_name: dict[str, How] = {"TurnLoop": Walker._loop, "Scheduler": Walker._scheduler}
    return by_name.get(kind.__name__, Walker._attributes)


def _fields_of(kind: type) -> tuple[tuple[str, ...], frozenset[str]]:
    """Slots of a kind that are walked, and names of what is left out of it."""
    found = _FIELDS.get(kind)
    if found is None:
        out = frozenset(name for base in kind.__mro__ for name in LEFT_OUT.get(base.__name__, ()))
        slots = getattr(kind, "__struct_fields__", None) or [
            name for base in kind.__mro__ for name in _slots(base) if name not in ("__dict__", "__weakref__")
        ]
        found = _FIELDS[kind] = tuple(name for name in slots if name not in out), out
    return found


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


How = Callable[[Walker, Any], None]
_HOW: dict[type, How] = {}
_FIELDS: dict[type, tuple[tuple[str, ...], frozenset[str]]] = {}
_SPECIAL: dict[type, How] = {
    types.FunctionType: Walker._function,
    types.MethodType: Walker._method,
    types.CoroutineType: Walker._coroutine,
    types.AsyncGeneratorType: Walker._async_generator,
    asyncio.Task: Walker._task,
    asyncio.Future: Walker._future,
    asyncio.Event: Walker._event,
    asyncio.Handle: Walker._handle,
    asyncio.TimerHandle: Walker._handle,
    weakref.ref: Walker._weak,
}
