"""Layer caches of recurrent layers: what a model finds in place of mlx-lm's `ArraysCache`.

The model's own code runs, on tokens (T, 1). Where it puts a convolution's state before the inputs it gets an array of
no tokens; the convolution itself (`ConvolutionSlots.convolve`, by `mlxlm.recurrent`) reads the inputs before each
token from the batch and from slots. Where it hands its state to mlx-lm's function for a recurrence it hands on a
`StateSlots`, and the routed function calls it. What the model writes back is dropped, as slots are written already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..mlxlm import RecurrentState, defer_norms
from .mixing import Mixing
from .slot_arrays import SlotArrays
from .step import Norm, RecurrentPass, SlotSegment


class Recurrences(Protocol):
    """`RecurrentKernels` and `RecurrentOperations`."""

    def new_pool(self, slots: int, shape: Sequence[int], dtype: Any) -> Any: ...

    def convolve(self, x: Any, weight: Any, bias: Any | None, pool: Any, step: RecurrentPass) -> Any: ...

    def mix(self, x: Any, mixing: Mixing, pools: Sequence[Any], step: RecurrentPass) -> Any: ...

    def gated_delta(
        self,
        q: Any,
        k: Any,
        v: Any,
        a: Any,
        b: Any,
        a_log: Any,
        dt_bias: Any,
        pool: Any,
        step: RecurrentPass,
        *,
        lower_bound: float | None = None,
        largest_beta: float = 1.0,
        norm: Norm | None = None,
    ) -> Any: ...

    def selective(
        self,
        x: Any,
        a_log: Any,
        b: Any,
        c: Any,
        d: Any,
        dt: Any,
        dt_bias: Any,
        pool: Any,
        step: RecurrentPass,
        *,
        limits: tuple[float, float],
    ) -> Any: ...

    def channels(self, x: Any, dt: Any, a_log: Any, b: Any, c: Any, pool: Any, step: RecurrentPass) -> Any: ...

    def lightning(self, q: Any, k: Any, v: Any, logs: Any, pool: Any, step: RecurrentPass, *, scale: float) -> Any: ...

    def apply(self, function: Any, arrays: Sequence[Any], pool: Any, step: RecurrentPass) -> Any: ...


class _Slots:
    """Slots of one state of a layer."""

    def __init__(self, state: RecurrentState, slots: int, recurrences: Recurrences, step: RecurrentPass) -> None:
        self.pool = recurrences.new_pool(slots, state.shape, state.dtype)
        self._out: Any = None
        self._recurrences = recurrences
        self._step = step

    def written_with(self, out: Any) -> None:
        """Remember the output that is there once a pass's states are written to the pool."""
        self._out = out

    def _done(self, out: Any) -> Any:
        """Remember, and return, an output."""
        self.written_with(out)
        return out

    def take_written(self) -> list[Any]:
        """Return the arrays of the last pass that are there once its states are, and forget them."""
        out, self._out = self._out, None
        if isinstance(self.pool, SlotArrays):
            return self.pool.take_written()
        return [] if out is None else [out]


class ConvolutionSlots(_Slots):
    """Slots of a convolution's state: the last inputs (width - 1, C)."""

    def __init__(self, state: RecurrentState, slots: int, recurrences: Recurrences, step: RecurrentPass) -> None:
        super().__init__(state, slots, recurrences, step)
        self._state = state
        assert state.convolution is not None, "a convolution's state"
        self._convolution = state.convolution

    @property
    def seen(self) -> Any:
        """The state as the model sees it: an array (T, 0, C). The convolution that follows uses these slots, whichever
        others there are for the model."""
        self._convolution.bind(self)
        return self._step.empty(self._state.shape[-1], self._state.dtype)

    def convolve(self, x: Any, weight: Any, bias: Any | None) -> Any:
        """Convolution (T, 1, C) of the step's inputs `x` of that shape."""
        return self._done(self._recurrences.convolve(x, weight, bias, self.pool, self._step))


class StateSlots(_Slots):
    """Slots of a recurrence's state. The arrays of its methods are those of mlx-lm's functions, for tokens (T, 1)."""

    @property
    def seen(self) -> StateSlots:
        """The state as the model sees it."""
        return self

    @property
    def begins(self) -> Any:
        """Whether each of the step's tokens (T,) is its sequence's first."""
        return self._step.begins

    def gated_delta(
        self,
        q: Any,
        k: Any,
        v: Any,
        a: Any,
        b: Any,
        a_log: Any,
        dt_bias: Any,
        *,
        lower_bound: float | None = None,
        largest_beta: float = 1.0,
        norm: tuple[float, float] | None = None,
    ) -> Any:
        """Gated delta rule (T, 1, Hv, Dv); `norm` has the inverse scale and the epsilon of `Norm`."""
        out = self._recurrences.gated_delta(
            *(q, k, v, a, b, a_log, dt_bias, self.pool, self._step),
            lower_bound=lower_bound,
            largest_beta=largest_beta,
            norm=None if norm is None else Norm(*norm),
        )
        return self._done(out)

    def selective(
        self, x: Any, a_log: Any, b: Any, c: Any, d: Any, dt: Any, dt_bias: Any, limits: tuple[float, float]
    ) -> Any:
        """State space model of Mamba 2 (T, 1, H, P)."""
        return self._done(
            self._recurrences.selective(x, a_log, b, c, d, dt, dt_bias, self.pool, self._step, limits=limits)
        )

    def channels(self, x: Any, dt: Any, a_log: Any, b: Any, c: Any) -> Any:
        """State space model of Mamba 1 (T, 1, C), without the direct path."""
        return self._done(self._recurrences.channels(x, dt, a_log, b, c, self.pool, self._step))

    def lightning(self, q: Any, k: Any, v: Any, logs: Any, scale: float) -> Any:
        """Lightning attention (T, 1, H, Dv)."""
        return self._done(self._recurrences.lightning(q, k, v, logs, self.pool, self._step, scale=scale))

    def apply(self, function: Callable[..., tuple[Any, Any]], arrays: Sequence[Any]) -> Any:
        """A recurrence by the model's own `function`, as `RecurrentOperations.apply` takes it."""
        return self._done(self._recurrences.apply(function, arrays, self.pool, self._step))


class RecurrentLayer:
    """A layer's cache, with the members of mlx-lm's `ArraysCache` that models use."""

    lengths = None
    left_padding = None

    def __init__(
        self, states: Sequence[RecurrentState], slots: int, recurrences: Recurrences, step: RecurrentPass
    ) -> None:
        self.entries = [
            (StateSlots if state.convolution is None else ConvolutionSlots)(state, slots, recurrences, step)
            for state in states
        ]
        self.step = step
        self._states = states
        self._recurrences = recurrences
        self._arrays = [entry.pool for entry in self.entries if isinstance(entry.pool, SlotArrays)]

    def __getitem__(self, index: int) -> Any:
        defer_norms()
        return self.entries[index].seen

    def __setitem__(self, index: int, value: Any) -> None:
        """Drop a state: the slots have it."""

    def mix(self, x: Any, mixing: Mixing) -> Any:
        """Outputs (T, 1, C + E) of `mixing`, with the states of all of the layer's convolutions, for `x` (T, N)."""
        slots = [entry for entry in self.entries if isinstance(entry, ConvolutionSlots)]
        out = self._recurrences.mix(x, mixing, [entry.pool for entry in slots], self.step)
        for entry in slots:
            entry.written_with(out)
        return out

    def states_of_singles(self, count: int) -> list[Any] | None:
        """The states (count, ...) before a step of `count` sequences, of one token each; None for another step, or
        where states are written in place."""
        slots = None if self.in_place else self.step.singles
        return [pool.read(slots[0]) for pool in self._arrays] if slots and len(slots[0]) == count else None

    def write_singles(self, states: Sequence[Any]) -> None:
        """Take the states behind a step of single tokens."""
        assert self.step.singles is not None
        for pool, behind in zip(self._arrays, states, strict=True):
            pool.write(self.step.singles[1], behind)

    @property
    def traced(self) -> TracedStates:
        """Its states for traces."""
        return TracedStates(self._states, self._recurrences)

    @property
    def recurrence(self) -> StateSlots:
        """The state of the layer's one recurrence."""
        (found,) = (entry for entry in self.entries if isinstance(entry, StateSlots))
        return found

    @property
    def in_place(self) -> bool:
        """Whether states are written in place, with the layer's outputs; else they are arrays of their own."""
        return not self._arrays

    def take_written(self) -> list[Any]:
        """Return the arrays of the last pass that are there once its states are, and forget them."""
        return [array for entry in self.entries for array in entry.take_written()]

    def detach(self, slot: int) -> None:
        """Keep a slot's states while the sequence goes on that wrote them."""
        for pool in self._arrays:
            pool.detach(slot)

    def clear(self, slot: int) -> None:
        """Free a slot's states, where they are arrays."""
        for pool in self._arrays:
            pool.clear(slot)

    def free(self) -> None:
        """Free the pools."""
        self._arrays.clear()
        for entry in self.entries:
            entry.pool = None

    def advance(self, count: int) -> None:
        """Do nothing, as a step's tokens are in its segments."""

    def make_mask(self, count: int) -> None:
        """No mask: no token is padding."""


class _TracedPass(RecurrentPass):
    """A pass in a trace, which serves sequences that begin and others."""

    @property
    def begins(self) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError("a trace does not know which sequences begin")


@dataclass(frozen=True)
class TracedStates:
    """The states of a recurrent layer in traces of steps of single tokens."""

    states: Sequence[RecurrentState]
    recurrences: Recurrences

    def run(self, call: Callable[[RecurrentLayer], Any], before: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the result of `call` with a layer cache that holds the states `before` (n, ...), and those behind
        it."""
        count = before[0].shape[0]
        step = _TracedPass([SlotSegment(i, 1, i, count + i) for i in range(count)], count=count)
        layer = RecurrentLayer(self.states, 2 * count, self.recurrences, step)
        for entry, states in zip(layer.entries, before, strict=True):
            entry.pool.write(range(count), states)
        out = call(layer)
        after = [entry.pool.read(range(count, 2 * count)) for entry in layer.entries]
        layer.take_written()
        layer.free()
        return out, after
