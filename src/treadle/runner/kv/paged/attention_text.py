"""Texts of the attention kernels' launches."""

from __future__ import annotations

from dataclasses import dataclass

_INPUTS = ["q", "pool", "kv_scales", "pages", "items", "counters", "written", "partial", "scales"]
_DECODE_BODY = """
  treadle::attend_decode<T, S, D, DV, REP, PAGE, WINDOW, CAP, SINKS, ROWS, STAGES, WARPS, BOUNDED>(
      q, pool, (const float*)kv_scales, SINK_OF_HEAD, pages, items + (gridDim.x + 8) / 8 * 8, items, BOUNDS,
      __int_as_float(SCALE), out, const_cast<float*>(partial), const_cast<float*>(scales),
      const_cast<int*>(counters), HEADS);
"""
_PREFILL_BODY = """
  treadle::attend_prefill<T, D, DV, REP, PAGE, WINDOW, CAP, SINKS, TILE, BOUNDED>(
      q, pool, SINK_OF_HEAD, pages, items, BOUNDS, __int_as_float(SCALE), OWN_ROWS, const_cast<float*>(partial),
      const_cast<float*>(scales), const_cast<int*>(counters), HEADS);
"""
_WIDE_BODY = """
  treadle::attend_wide<T, D, DV, REP, PAGE, WINDOW, CAP, SINKS, LATENT, ROWS, TILE, WARPS, STAGES, BOUNDED>(
      q, ROTATED, pool, SINK_OF_HEAD, pages, items, BOUNDS, __int_as_float(SCALE), OWN_ROWS,
      const_cast<float*>(partial), const_cast<float*>(scales), const_cast<int*>(counters), HEADS);
"""
_LEADING = """
  const size_t led = size_t(leading_shape[0]) * HEADS * REP * DV;
  treadle::copy_rows(leading, out, led);"""
_BODIES: dict[str, tuple[str, list[str]]] = {
    "attend_decode": (_DECODE_BODY, []),
    "attend_prefill": (_PREFILL_BODY, []),
    "attend_wide": (_WIDE_BODY, ["kv/paged/attend_prefill.cuh"]),
}
"""Bodies of kernels, and files that theirs build upon."""


@dataclass(frozen=True)
class AttentionText:
    """The launch of the kernel `name`, for `latent` layers, such with `sinks`, or `bounded`: for tokens that say which
    cached ones they see. If it `follows` another launch, what that one left comes first in the output."""

    name: str
    latent: bool
    sinks: bool
    bounded: bool
    follows: bool = False

    @property
    def inputs(self) -> list[str]:
        optional = (
            ("rotated", self.latent),
            ("sinks", self.sinks),
            ("visible", self.bounded),
            ("leading", self.follows),
        )
        return [*_INPUTS, *(name for name, there in optional if there)]

    @property
    def files(self) -> list[str]:
        _, more = _BODIES[self.name]
        return ["device/numbers.cuh", "kv/paged/attention.cuh", *more, f"kv/paged/{self.name}.cuh"]

    @property
    def source(self) -> str:
        body, _ = _BODIES[self.name]
        body = body.replace("ROTATED", "rotated" if self.latent else "(const T*)nullptr")
        body = body.replace("SINK_OF_HEAD", "sinks" if self.sinks else "(const T*)nullptr")
        body = body.replace("BOUNDED", "true" if self.bounded else "false")
        body = (_LEADING if self.follows else "") + body.replace("OWN_ROWS", "out + led" if self.follows else "out")
        return body.replace("BOUNDS", "visible" if self.bounded else "(const int*)nullptr")
