"""Base of the formats whose calls stand between markers of their own, in a section or without one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from .base import CallContext, ToolFormat, ToolSpec
from .scanner import Steps


class SectionFormat(ToolFormat):
    """A format with a marker at the start and the end of the section of all calls, and one at the start of each call.
    `starts` are the section's and the call's."""

    section: ClassVar[str]
    section_end: ClassVar[str]
    call: ClassVar[str]
    one_block = True

    @abstractmethod
    def read_call(self, context: CallContext) -> Steps[None]:
        """Read one call, behind its starting marker. Raises Mismatch where it is none."""

    def read(self, context: CallContext, start: str) -> Steps[None]:
        if start == self.call:
            yield from self.read_call(context)
            return
        while True:
            yield from context.scan.skip_space()
            if (yield from context.scan.expect(self.call, self.section_end)) == self.section_end:
                return
            yield from self.read_call(context)

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return (self.section,)
