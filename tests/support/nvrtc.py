"""Stand-in for NVRTC's library, called with the same ctypes arguments, and a kernel compiler without a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.runner.device.nvrtc import CompilationFailed

LOG = 'some.cu(3): error: identifier "nothing" is undefined\n\n1 error detected in the compilation of "some.cu".\n'


class NvrtcLibrary:
    """Functions of the library. It refuses texts with "nothing" in them; `failing` names a function that returns an
    error, and `alive` counts programs that are not destroyed."""

    def __init__(self, failing: str = "", version: tuple[int, int] = (13, 5)) -> None:
        self.failing, self.version, self.alive = failing, version, 0
        self.options: list[bytes] = []
        self._texts: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a function of the library, which fails if it is the `failing` one."""
        if not name.startswith("nvrtc"):
            raise AttributeError(name)
        function = getattr(self, f"_{name.removeprefix('nvrtc')}")
        return (lambda *arguments: 1) if name == self.failing else lambda *arguments: function(*arguments) or 0

    def _Version(self, major: Any, minor: Any) -> None:
        major._obj.value, minor._obj.value = self.version

    def _CreateProgram(self, program: Any, text: bytes, name: bytes, *headers: Any) -> None:
        program._obj.value = len(self._texts) + 1
        self._texts[program._obj.value] = name + b"\n" + text
        self.alive += 1

    def _CompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.options = list(options)
        assert len(self.options) == count
        return 6 if b"nothing" in self._texts[program.value] else 0

    def _GetProgramLogSize(self, program: Any, size: Any) -> None:
        size._obj.value = len(LOG) + 1

    def _GetProgramLog(self, program: Any, buffer: Any) -> None:
        buffer.value = LOG.encode()

    def _GetCUBINSize(self, program: Any, size: Any) -> None:
        size._obj.value = len(self._texts[program.value])

    def _GetCUBIN(self, program: Any, buffer: Any) -> None:
        buffer.raw = self._texts[program.value]

    def _DestroyProgram(self, program: Any) -> None:
        self.alive -= 1


class TextCompiler:
    """Compiler whose machine code is the text; it refuses those with "nothing" in them."""

    version = "13.5"
    headers = "same"

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, text: str, name: str, options: Sequence[str]) -> bytes:
        if "nothing" in text:
            raise CompilationFailed(LOG)
        self.compiled.append(name)
        return f"{options} {text}".encode()
