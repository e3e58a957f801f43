"""What the emulator must notice, with small kernels that do it; and that it works out what CUDA says."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.emulated import EmulatedKernel, EmulationFailed, shuffled
from tests.support.emulated_text import UnknownText, translated

_FETCH = """
  extern __shared__ __align__(16) unsigned char memory[];
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(memory)) + threadIdx.x * 16;
  const float* kept = reinterpret_cast<const float*>(memory);
"""
_COPY = 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(x + {from_}), "r"(16));\n'
_COMMIT = 'asm volatile("cp.async.commit_group;");\n'


def run(source: str, *inputs: Any, threads: int = 32, blocks: int = 1, size: int = 32, shared: int = 0, seed: int = 0):
    """What the kernel leaves in `out`, of `size` floats, out of inputs `x` and `y`."""
    names = ["x", "y"][: len(inputs)]
    kernel = shuffled(EmulatedKernel, seed)("small", names, ["out"], source, shared_memory=shared)
    (out,) = kernel(list(inputs), [], blocks=(blocks, 1), threads=threads, shapes=[(size,)], dtypes=[mx.float32])
    return np.array(out)


def floats(count: int = 32) -> Any:
    return mx.arange(count).astype(mx.float32)


def reversed_through_shared(barrier: str, seed: int) -> Any:
    source = f"""
      __shared__ float kept[128];
      kept[threadIdx.x] = x[threadIdx.x];
      {barrier}
      out[threadIdx.x] = kept[127 - threadIdx.x];
    """
    return run(source, floats(128), threads=128, size=128, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_that_is_missing_is_seen(seed: int) -> None:
    assert (reversed_through_shared("__syncthreads();", seed) == np.arange(128)[::-1]).all()
    assert np.isnan(reversed_through_shared("", seed)).any()
    assert np.isnan(reversed_through_shared("__syncwarp();", seed)).any()


@pytest.mark.parametrize("left", [0, 1])
def test_what_is_read_before_it_was_waited_for_is_garbage(left: int) -> None:
    """Of two groups the first is there when one may be left; the other is not."""
    first, second = (
        _COPY.format(from_="threadIdx.x * 4"),
        _COPY.format(from_="128 + threadIdx.x * 4").replace("(at)", "(to)"),
    )
    source = f"""{_FETCH}
      const unsigned to = at + 512;
      {first}{_COMMIT}{second}{_COMMIT}
      asm volatile("cp.async.wait_group {left};");
      __syncwarp();
      out[threadIdx.x] = kept[(31 - threadIdx.x) * 4];
      out[32 + threadIdx.x] = kept[128 + threadIdx.x * 4];
    """
    found = run(source, floats(256), size=64, shared=1024)
    assert (found[:32] == np.arange(32)[::-1] * 4).all()
    assert np.isnan(found[32:]).all() if left else (found[32:] == 128 + np.arange(32) * 4).all()


_FAULTS = {
    "out[threadIdx.x + 1] = 0;": "an access 0 bytes behind the end of out",
    "out[0] = x[threadIdx.x * 2];": "bytes behind the end of x",
    "out[int(threadIdx.x) - 1] = 0;": "written 1 bytes before out",
    "((float*)x)[0] = 7;": "written to x, which",
    "reinterpret_cast<float2*>(out + 1)[0] = float2();": "misaligned",
    "if (threadIdx.x < 7) __syncthreads(); else __syncwarp();": "nobody can go on: 7 threads wait in __sync",
    "if (threadIdx.x < 7) __syncwarp(); else __shfl_sync(~0u, 1, 0);": "meet in __syncwarp and in __shfl_sync",
    "*(volatile int*)8 = 0;": "an access to no memory",
    "out[threadIdx.x / (threadIdx.x - 31)] = 0;": "a division by zero",
    _COPY.format(from_=32): "from outside of all arrays",
    _COPY.format(from_=1): "no multiple of 16",
    _COPY.format(from_=0).replace("(at)", "(at + 16)"): "from the beginning of 512 bytes of shared",
    "memory[512] = 0;": "written 0 bytes behind shared memory",
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_what_a_kernel_must_not_do_fails(fault: str) -> None:
    """And the next launch knows nothing of it."""
    cases = "".join(f"case {i}: {{ {source} break; }}\n" for i, source in enumerate(_FAULTS))
    source = f"{_FETCH} switch (y[0]) {{ {cases} default: out[threadIdx.x] = x[threadIdx.x]; }}"
    with pytest.raises(EmulationFailed, match=_FAULTS[fault]):
        run(source, floats(), mx.array([list(_FAULTS).index(fault)]), shared=512)
    assert (run(source, floats(), mx.array([-1]), shared=512) == np.arange(32)).all()


def test_text_that_is_no_program_fails() -> None:
    with pytest.raises(EmulationFailed, match="was not declared"):
        run("nothing();")


def test_threads_that_end_hold_up_nobody() -> None:
    source = """
      if (threadIdx.x % 3 == 0) return;
      __syncthreads();
      __syncwarp();
      out[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], 1);
    """
    found = run(source, floats(64), threads=64, size=64)
    assert found[[1, 4, 5, 62]].tolist() == pytest.approx([np.nan, 5, 4, np.nan], nan_ok=True)


def test_what_nobody_has_written_is_garbage() -> None:
    assert np.isnan(run("if (threadIdx.x == 0) out[0] = 1;")[1:]).all()
    found = run(
        "__shared__ float kept[2]; if (blockIdx.x == 0) kept[0] = 1; out[blockIdx.x] = kept[0];", blocks=2, size=2
    )
    assert found.tolist() == pytest.approx([1, np.nan], nan_ok=True)


def test_blocks_come_in_any_order() -> None:
    source = "if (threadIdx.x == 0) out[blockIdx.x] = atomicAdd((int*)(y), 1);"
    orders = [run(source, floats(), mx.zeros(1, mx.int32), blocks=9, size=9, seed=seed).tolist() for seed in range(3)]
    assert orders[0] == list(range(9))
    assert all(sorted(order) == orders[0] for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_halves_are_rounded_as_numpy_rounds_them() -> None:
    """Half-way cases, what is too large or nearly nothing, NaN."""
    edges = np.array(
        [65519, 65520, 1e9, 2**-24, 2**-25, 3 * 2**-25, 6.1e-5, 0, -0.0, np.inf, -np.inf, np.nan], np.float32
    )
    numbers = np.concatenate([edges, 1 + np.arange(20, dtype=np.float32) / 4096, -np.geomspace(1e-9, 1e6, 200)])
    numbers = numbers.astype(np.float32)
    source = "if (threadIdx.x < x_shape[0]) out[threadIdx.x] = __half2float(__float2half(x[threadIdx.x]));"
    found = run(source, mx.array(numbers), threads=256, size=len(numbers))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, numbers.astype(np.float16).astype(np.float32))
    source = source.replace("half", "bfloat16")
    found = run(source, mx.array(numbers), threads=256, size=len(numbers))
    np.testing.assert_array_equal(found, np.array(mx.array(numbers).astype(mx.bfloat16).astype(mx.float32)))


@pytest.mark.parametrize(
    "text",
    [
        'asm("ex2.approx.f32 %0, %1;" : "=f"(a) : "f"(b));',
        'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a) : "r"(b));',
        'asm volatile("cp.async.wait_all;");',
        'asm("" : "=r"(a));',
        'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a) : "f"(b);',
        "extern __shared__ float memory[];",
    ],
)
def test_text_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(UnknownText):
        translated(text)


def test_text_that_is_known_becomes_calls() -> None:
    text = 'asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(two) : "r"(word >> 4 * i), "n"(0x0f), "r"(f(g, "(")));'
    call = 'emulated::lop3<0xea>(emulated::reg(two), emulated::reg(word >> 4 * i), 0x0f, emulated::reg(f(g, "(")));'
    assert translated(text) == call
    text = "__shared__ float a[W][8], b[W / 2]; int c;"
    variables = "emulated::variable(&a, sizeof a); emulated::variable(&b, sizeof b);"
    assert translated(text) == f"static float a[W][8], b[W / 2]; {variables} int c;"
