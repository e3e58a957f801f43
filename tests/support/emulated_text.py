"""Translation of a CUDA kernel's source to C++ for `emulated.h`: its inline PTX as calls, its shared memory as
variables.

Strict: unknown PTX, and operands that an instruction does not take, raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

_ASM = re.compile(r"\basm\b\s*(?:volatile)?\s*\(")
_DYNAMIC = re.compile(r"extern\s+__shared__\s+__align__\((\d+)\)\s+unsigned char\s+(\w+)\[\];")
_FIXED = re.compile(r"__shared__\s+(\w+\s+[^;=]+);")
_DECLARED = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:,|$)")
_STRING = re.compile(r'"([^"]*)"')
_OPERAND = re.compile(r'\s*"([=+]?[rfln])"\s*\(')
_MMA = "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
_SUMS_AND_FRAGMENTS = "+f +f +f +f r r r r r r"
_FOUR = "=r =r =r =r r"
_HIDDEN = re.compile(r"(?:\+[rl] ?)+")
_WRAPPED = {"r": "reg", "f": "real", "l": "far"}


@dataclass(frozen=True)
class _Instruction:
    """PTX of an instruction, the constraints of its operands, and its C++ call."""

    ptx: re.Pattern[str]
    constraints: str
    call: str


def _known(ptx: str, constraints: str, call: str) -> _Instruction:
    """Build an instruction, with `<n>` in the place of any number."""
    return _Instruction(re.compile(re.escape(ptx).replace("<n>", r"(\w+)")), constraints, call)


_INSTRUCTIONS = (
    _known(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {_MMA}", _SUMS_AND_FRAGMENTS, "mma_bf16"),
    _known(f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {_MMA}", _SUMS_AND_FRAGMENTS, "mma_f16"),
    _known(f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {_MMA}", _SUMS_AND_FRAGMENTS, "mma_tf32"),
    _known("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];", _FOUR, "ldmatrix<false>"),
    _known("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];", _FOUR, "ldmatrix<true>"),
    _known("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;", "=r r", "movmatrix"),
    _known("cp.async.cg.shared.global [%0], [%1], 16, %2;", "r l r", "copy_async"),
    _known("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;", "r l", "copy_async"),
    _known("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;", "r l r n n", "copy_async_off"),
    _known("cp.async.commit_group;", "", "commit_group"),
    _known("cp.async.wait_group %0;", "n", "wait_group"),
    _known("cp.async.wait_group <n>;", "", "wait_group"),
    _known("lop3.b32 %0, %1, %2, %3, <n>;", "=r r n r", "lop3<{}>"),
    _known("fma.rn.bf16x2 %0, %1, %2, %3;", "=r r r r", "fma_bf16"),
    _known("fma.rn.f16x2 %0, %1, %2, %3;", "=r r r r", "fma_f16"),
    _known("ex2.approx.ftz.f32 %0, %1;", "=f f", "ex2"),
)


class UnknownText(Exception):
    """Source that is not translated."""


@cache
def translated(text: str) -> str:
    """Return the source with its inline PTX and its shared memory as C++. Raises UnknownText."""
    text = "".join(_without_asm(text))
    text = _DYNAMIC.sub(r"unsigned char* const \2 = emulated::dynamic(\1);", text)
    text = _FIXED.sub(_fixed, text)
    if "__shared__" in text or re.search(r"\bextern\s+static\b", text):
        raise UnknownText("shared memory that is not declared in a way that is known")
    return text


def _fixed(found: re.Match[str]) -> str:
    declared = found[1]
    names = _DECLARED.findall(declared)
    return f"static {declared}; " + " ".join(f"emulated::variable(&{name}, sizeof {name});" for name in names)


def _without_asm(text: str) -> Iterator[str]:
    at = 0
    while found := _ASM.search(text, at):
        yield text[at : found.start()]
        end = _closing(text, found.end())
        inside = text[found.end() : end]
        yield _call(inside) + "\n" * inside.count("\n")
        at = end + 1
    yield text[at:]


def _closing(text: str, at: int) -> int:
    """Return the position of the bracket that closes the one around `at`."""
    depth, quoted = 1, False
    for i in range(at, len(text)):
        if text[i] == '"':
            quoted = not quoted
        elif not quoted:
            depth += (text[i] == "(") - (text[i] == ")")
            if depth == 0:
                return i
    raise UnknownText("a bracket that is not closed")


def _call(inside: str) -> str:
    ptx, *sections = _sections(inside)
    code = " ".join("".join(_STRING.findall(ptx)).split())
    operands = [operand for section in sections[:2] for operand in _operands(section)]
    constraints = " ".join(constraint for constraint, _ in operands)
    if not code and _HIDDEN.fullmatch(constraints):
        return "((void)0)"  # only hides values from the compiler
    for one in _INSTRUCTIONS:
        if (found := one.ptx.fullmatch(code)) and one.constraints == constraints:
            return _made(one, found.groups(), operands)
    raise UnknownText(f"PTX {code!r} with operands {constraints!r}")


def _made(one: _Instruction, numbers: Sequence[str], operands: Sequence[tuple[str, str]]) -> str:
    """Return the call; a number of the instruction itself is an argument, or that of a template."""
    values = [_wrapped(*operand) for operand in operands]
    if "{}" not in one.call:
        values += numbers
    return f"emulated::{one.call.format(*numbers)}({', '.join(values)})"


def _wrapped(constraint: str, value: str) -> str:
    kind = _WRAPPED.get(constraint[-1])
    return value if kind is None else f"emulated::{kind}({value})"


def _sections(inside: str) -> list[str]:
    """Split at colons outside of brackets and strings."""
    sections, depth, quoted = [""], 0, False
    for letter in inside:
        if letter == '"':
            quoted = not quoted
        depth += not quoted and (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0 and not quoted:
            sections.append("")
        else:
            sections[-1] += letter
    return sections


def _operands(section: str) -> Iterator[tuple[str, str]]:
    at = 0
    while section[at:].strip(" \n,"):
        found = _OPERAND.match(section, at)
        if found is None:
            raise UnknownText(f"operands {section!r}")
        end = _closing(section, found.end())
        yield found[1], section[found.end() : end]
        at = end + 1
        while at < len(section) and section[at] in " \n,":
            at += 1
