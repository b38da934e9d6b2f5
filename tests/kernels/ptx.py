"""Runs the PTX that NVRTC makes of kernels.cu, in NumPy: all threads of a launch are the elements of arrays.

Enough of PTX for these kernels; another instruction raises NotImplementedError, so a new compiler may need a line here.
Threads that are furthest behind go first, until they meet again. Memory is one arena: an access outside what
was placed there, or not aligned, raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
TYPES = {
    f"{kind}{bits}": np.dtype(f"{numpy}{bits // 8}")
    for kind, numpy in (("u", "u"), ("b", "u"), ("s", "i"))
    for bits in (8, 16, 32, 64)
} | {"f32": np.dtype("f4"), "pred": np.dtype("?")}
WIDTHS = {"r": "u4", "f": "u4", "rd": "u8", "rs": "u2", "p": "?"}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
THREADS = 256


class Memory:
    """Global memory, of which only what was placed may be touched."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.valid = np.zeros(nbytes, np.bool_)
        self._top = 256

    def place(self, content: Array, alignment: int) -> int:
        """The address, `alignment` above a multiple of 256."""
        at = -(-self._top // 256) * 256 + alignment % 256
        self.bytes[at : at + content.size] = content
        self.valid[at : at + content.size] = True
        self._top = at + content.size + 256
        return at

    def check(self, address: Array, width: int, size: int, what: str) -> None:
        if (address % width).any():
            raise RuntimeError(f"misaligned: {what}")
        inside = (address >= 0) & (address + size <= self.bytes.size)
        if not inside.all() or not (self.valid[address] & self.valid[address + size - 1]).all():
            raise RuntimeError(f"out of bounds: {what}")


class Kernel:
    """One entry of a PTX module, parsed."""

    def __init__(self, ptx: str, name: str) -> None:
        begin = ptx.index(f".entry {name}(")
        text = ptx[begin : ptx.index("\n}", begin)]
        head, body = text.split("\n{", 1)
        self.parameters = re.findall(r"\.param\s+\.(\w+)\s+(\w+)", head)
        self.code: list[tuple[str | None, bool, list[str], list[str], str]] = []
        self.labels: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        for line in body.splitlines():
            self._parse(re.sub(r"//.*", "", line).strip())

    def _parse(self, line: str) -> None:
        if match := re.match(r"(\$\w+):\s*(.*)", line):
            self.labels[match[1]] = len(self.code)
            line = match[2]
        if match := re.match(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\]", line):
            self.shared[match[1]] = self.shared_bytes
            self.shared_bytes += -(-int(match[2]) // 16) * 16
        if not line or line[0] in ".{}":
            return
        match = re.match(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)\s*(.*);$", line)
        assert match is not None, line
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", match[4])]
        self.code.append((match[2], match[1] == "!", match[3].split("."), [o for o in operands if o], line))

    def launch(self, blocks: int, arguments: list[int], memory: Memory) -> None:
        """Run to the end."""
        with np.errstate(all="ignore"):
            _Run(self, blocks, arguments, memory).run()


class _Run:
    def __init__(self, kernel: Kernel, blocks: int, arguments: list[int], memory: Memory) -> None:
        assert len(arguments) == len(kernel.parameters)
        self.kernel, self.blocks, self.memory = kernel, blocks, memory
        self.n = blocks * THREADS
        thread = np.arange(self.n)
        self.block = thread // THREADS
        self.warp, self.lane = thread // 32 * 32, thread % 32
        self.registers: dict[str, Array] = {
            "%tid.x": (thread % THREADS).astype("u4"), "%ctaid.x": self.block.astype("u4"),
            "%ntid.x": np.full(self.n, THREADS, "u4"), "%nctaid.x": np.full(self.n, blocks, "u4"),
        }  # fmt: skip
        self.parameters = {
            name: np.array(value & (2 ** (8 * TYPES[kind].itemsize) - 1), f"u{TYPES[kind].itemsize}")
            for (kind, name), value in zip(kernel.parameters, arguments, strict=True)
        }
        self.shared = np.zeros((blocks, max(16, kernel.shared_bytes)), np.uint8)

    def run(self) -> None:
        code, end = self.kernel.code, len(self.kernel.code)
        at, waits = np.zeros(self.n, np.int64), np.zeros(self.n, np.bool_)
        while True:
            here = int(np.where(waits, end, at).min())
            if here == end:
                if not waits.any():
                    return
                self._release(waits, at == end)
                continue
            active = (at == here) & ~waits
            predicate, negated, op, operands, line = code[here]
            on = active & (self._register(predicate) ^ negated) if predicate is not None else active
            at[active] = here + 1
            if op[0] == "bra":
                at[on] = self.kernel.labels[operands[0]]
            elif op[0] == "ret":
                at[on] = end
            elif op[0] == "bar":
                waits |= on
            elif on.any():
                self._execute(op, operands, on, line)

    def _release(self, waits: Array, gone: Array) -> None:
        for b in range(self.blocks):
            of_block = slice(b * THREADS, (b + 1) * THREADS)
            if not (waits[of_block] | gone[of_block]).all():
                raise RuntimeError("deadlock at a barrier")
        waits[:] = False

    def _execute(self, op: list[str], operands: list[str], on: Array, line: str) -> None:
        if "ftz" in op or "approx" in op:
            raise NotImplementedError(f"not the arithmetic that was asked for: {line}")
        run: Callable[[list[str], list[str], Array], None] | None = getattr(self, f"_{op[0]}", None)
        if run is None:
            raise NotImplementedError(line)
        run(op, operands, on)

    # ---- operands -------------------------------------------------------------------------------------

    def _register(self, name: str) -> Array:
        if name not in self.registers:
            match = re.match(r"%([a-z]+)", name)
            assert match is not None, name
            self.registers[name] = np.zeros(self.n, WIDTHS[match[1]])
        return self.registers[name]

    def _value(self, operand: str, kind: str) -> Array:
        dtype = TYPES[kind]
        if operand[0] == "%":
            held = self._register(operand)
            if dtype.kind == "b" or held.itemsize == dtype.itemsize:
                return held.view(dtype)
            return held.astype(f"u{dtype.itemsize}").view(dtype)
        if operand in self.kernel.shared:
            return np.full(self.n, self.kernel.shared[operand], dtype)
        if operand[:2] == "0f":
            return np.full(self.n, int(operand[2:], 16), "u4").view("f4")
        number = int(operand, 0) & (2 ** (8 * dtype.itemsize) - 1)
        return np.full(self.n, number, f"u{dtype.itemsize}").view(dtype)

    def _put(self, name: str, value: Array, on: Array) -> None:
        held = self._register(name)
        if held.dtype.kind != "b" and value.itemsize == held.itemsize:
            value = value.view(held.dtype)
        np.copyto(held, value, where=on, casting="unsafe")  # a narrower one is extended by its own sign

    def _address(self, operand: str) -> Array:
        match = re.match(r"\[([%$\w.]+)(?:\+(-?\d+))?\]", operand)
        assert match is not None, operand
        base = self._value(match[1], "u64").astype(np.int64)
        if match[1][0] == "%" and self._register(match[1]).itemsize == 4:
            base = self._register(match[1]).view("i4").astype(np.int64)
        result: Array = base + int(match[2] or 0)
        return result

    # ---- memory ---------------------------------------------------------------------------------------

    def _where(self, op: list[str], operand: str, threads: Array, lanes: int, size: int) -> tuple[Array, Array]:
        """The bytes that are meant and the addresses in them, of the threads alone."""
        address = self._address(operand)[threads]
        if op[1] == "shared":
            assert (address >= 0).all()
            assert (address + size <= self.shared.shape[1]).all()
            return self.shared.reshape(-1), address + self.block[threads] * self.shared.shape[1]
        assert op[1] == "global", op
        self.memory.check(address, size * lanes, size * lanes, ".".join(op))
        return self.memory.bytes, address

    def _lanes(self, op: list[str], operand: str) -> list[str]:
        return [r.strip() for r in operand.strip("{}").split(",")]

    def _ld(self, op: list[str], operands: list[str], on: Array) -> None:
        dtype = TYPES[op[-1]]
        if op[1] == "param":
            value = self.parameters[operands[1].strip("[]")]
            return self._put(operands[0], np.full(self.n, value), on)
        threads, registers = np.flatnonzero(on), self._lanes(op, operands[0])
        source, address = self._where(op, operands[1], threads, len(registers), dtype.itemsize)
        for number, register in enumerate(registers):
            at = address[:, None] + number * dtype.itemsize + np.arange(dtype.itemsize)
            value = np.zeros(self.n, dtype)
            value[threads] = source[at].view(dtype)[:, 0]
            self._put(register, value, on)
        return None

    def _st(self, op: list[str], operands: list[str], on: Array) -> None:
        dtype = TYPES[op[-1]]
        threads, registers = np.flatnonzero(on), self._lanes(op, operands[1])
        target, address = self._where(op, operands[0], threads, len(registers), dtype.itemsize)
        for number, register in enumerate(registers):
            at = address[:, None] + number * dtype.itemsize + np.arange(dtype.itemsize)
            value = np.ascontiguousarray(self._value(register, op[-1])[threads])
            target[at] = value.view(np.uint8).reshape(-1, dtype.itemsize)

    def _atom(self, op: list[str], operands: list[str], on: Array) -> None:
        assert op[2:] == ["add", "u32"]
        threads = np.flatnonzero(on)
        target, address = self._where(op, operands[1], threads, 1, 4)
        np.add.at(
            target.view("u4"), address // 4, self._value(operands[2], "u32")[threads]
        )  # the old value is not used

    # ---- arithmetic -----------------------------------------------------------------------------------

    def _mov(self, op: list[str], operands: list[str], on: Array) -> None:
        self._put(operands[0], self._value(operands[1], op[-1]).copy(), on)

    def _cvta(self, op: list[str], operands: list[str], on: Array) -> None:
        self._put(operands[0], self._value(operands[1], "u64").copy(), on)

    def _two(self, function: Any, op: list[str], operands: list[str], on: Array) -> None:
        assert op[-1] != "f32" or "rn" in op, op
        self._put(operands[0], function(*(self._value(o, op[-1]) for o in operands[1:])), on)

    def _add(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.add, op, operands, on)

    def _sub(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.subtract, op, operands, on)

    def _div(self, op: list[str], operands: list[str], on: Array) -> None:
        assert op[-1] == "f32", op
        self._two(np.divide, op, operands, on)

    def _min(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.minimum, op, operands, on)

    def _max(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.maximum, op, operands, on)

    def _and(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.bitwise_and, op, operands, on)

    def _or(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.bitwise_or, op, operands, on)

    def _xor(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.bitwise_xor, op, operands, on)

    def _not(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.invert, op, operands, on)

    def _neg(self, op: list[str], operands: list[str], on: Array) -> None:
        self._two(np.negative, op, operands, on)

    def _mul(self, op: list[str], operands: list[str], on: Array) -> None:
        if op[1] == "rn":
            return self._two(np.multiply, op, operands, on)
        return self._put(operands[0], self._product(op, operands), on)

    def _mad(self, op: list[str], operands: list[str], on: Array) -> None:
        product = self._product(op, operands)
        wide = f"{op[-1][0]}{8 * product.itemsize}"
        self._put(operands[0], product + self._value(operands[3], wide), on)

    def _product(self, op: list[str], operands: list[str]) -> Array:
        a, b = (self._value(o, op[-1]) for o in operands[1:3])
        if op[1] == "lo":
            return np.multiply(a, b)
        assert a.itemsize == 4, op
        wide = np.multiply(a.astype(f"{a.dtype.kind}8"), b.astype(f"{a.dtype.kind}8"))
        return wide if op[1] == "wide" else (wide >> 32).astype(a.dtype)

    def _shl(self, op: list[str], operands: list[str], on: Array) -> None:
        self._shift(np.left_shift, op, operands, on)

    def _shr(self, op: list[str], operands: list[str], on: Array) -> None:
        self._shift(np.right_shift, op, operands, on)

    def _shift(self, function: Any, op: list[str], operands: list[str], on: Array) -> None:
        a, by = self._value(operands[1], op[-1]), self._value(operands[2], "u32")
        most = 8 * a.itemsize - 1
        value = function(a, np.minimum(by, most).astype(a.dtype))
        empty = np.where(a < 0, -1, 0).astype(a.dtype) if function is np.right_shift else np.zeros_like(a)
        self._put(operands[0], np.where(by > most, empty, value), on)

    def _setp(self, op: list[str], operands: list[str], on: Array) -> None:
        a, b = (self._value(o, op[-1]) for o in operands[1:])
        holds = COMPARE[op[1][:2]](a, b)
        if op[1][2:] == "u":
            holds = holds | np.isnan(a) | np.isnan(b)
        self._put(operands[0], holds, on)

    def _selp(self, op: list[str], operands: list[str], on: Array) -> None:
        a, b = (self._value(o, op[-1]) for o in operands[1:3])
        self._put(operands[0], np.where(self._register(operands[3]), a, b), on)

    def _cvt(self, op: list[str], operands: list[str], on: Array) -> None:
        target, source = op[-2:]
        assert source != "f32", op
        self._put(operands[0], self._value(operands[1], source).astype(TYPES[target]), on)

    def _popc(self, op: list[str], operands: list[str], on: Array) -> None:
        self._put(operands[0], np.bitwise_count(self._value(operands[1], op[-1])).astype("u4"), on)

    def _bfi(self, op: list[str], operands: list[str], on: Array) -> None:
        a, b = (self._value(o, op[-1]) for o in operands[1:3])
        position, length = (int(o, 0) for o in operands[3:])
        mask = a.dtype.type(((1 << length) - 1) << position)
        self._put(operands[0], (b & ~mask) | ((a << a.dtype.type(position)) & mask), on)

    def _prmt(self, op: list[str], operands: list[str], on: Array) -> None:
        a, b, selector = (self._value(o, "u32").astype(np.uint64) for o in operands[1:])
        both, result = a | (b << np.uint64(32)), np.zeros(self.n, np.uint64)
        for number in map(np.uint64, range(4)):
            choice = (selector >> (np.uint64(4) * number)) & np.uint64(15)
            byte = (both >> ((choice & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            result |= np.where(choice & np.uint64(8), sign, byte) << (np.uint64(8) * number)
        self._put(operands[0], result.astype("u4"), on)

    # ---- warps ----------------------------------------------------------------------------------------

    def _whole_warps(self, on: Array) -> None:
        of_warp = on.reshape(-1, 32)
        if not (of_warp.all(1) | ~of_warp.any(1)).all():
            raise RuntimeError("a collective by a part of a warp")

    def _shfl(self, op: list[str], operands: list[str], on: Array) -> None:
        assert op[1:3] == ["sync", "bfly"], op
        self._whole_warps(on)
        other = self.warp + (self.lane ^ self._value(operands[2], "u32").astype(np.int64))
        self._put(operands[0].split("|")[0], self._value(operands[1], "b32")[other], on)

    def _vote(self, op: list[str], operands: list[str], on: Array) -> None:
        assert op[1:3] == ["sync", "ballot"], op
        self._whole_warps(on)
        holds = self._register(operands[1]).reshape(-1, 32).astype(np.uint64)
        ballots = (holds << np.arange(32, dtype=np.uint64)).sum(1)
        self._put(operands[0], np.repeat(ballots, 32).astype("u4"), on)
