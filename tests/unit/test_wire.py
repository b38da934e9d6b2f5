"""Golden vectors: payloads as version 1 of the format has them. A change here breaks jobs of mixed versions."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from hiercomm import native
from hiercomm.compress import (
    BF16,
    FP8,
    FP16,
    Compressor,
    Int4,
    Int8,
    NoCompression,
    RandomK,
    Sign,
    Site,
    TopK,
)

# compressor: (the payload of 5 numbers without the zeros at its end, the head of the SHA-256 of that of 1300 numbers)
GOLDEN: dict[Compressor, tuple[str, str]] = {
    NoCompression(): ("484301000500000000000000000000000080f5c00080b6400000544000006c3f0000bcbf", "1f4e516a0b9e7a63"),
    FP16(): ("48430101050000000000000000000000acc7b445a042603be0bd", "ac3928952a92d980"),
    BF16(): ("48430102050000000000000000000000f6c0b64054406c3fbcbf", "3ae2028c8ba202e5"),
    Int8(): ("48430103050000000000000000000000783d815e370fe8", "d3d01a3fea4ec1c9"),
    Int8("stochastic"): ("48430103050000000000000000000000783d825e370fe8", "0b3a1b07c70a8ed4"),
    Int4(): ("484301040500000000000000000000008d3f090503010f", "08be011994b6a05a"),
    FP8(): ("484301050500000000000000000000008d3cfe7a7465eb", "e11b365c399c5832"),
    Sign(): ("48430106050000000000000000000000744011", "975328c5ca48ff36"),
    TopK(0.3): ("484301070500000000000000000000000200000000000100f6c0b640", "2642f291ea4a9030"),
    RandomK(0.3): ("484301080500000001587801ed9db497f6c06c3f", "ad6bec62b6908f7e"),
}


def numbers(numel: int) -> Tensor:
    i = torch.arange(numel, dtype=torch.int64)
    return ((i * 7919 + 13) % 1009 - 504).to(torch.float32) / 64


def payload(compressor: Compressor, numel: int) -> Tensor:
    found = torch.zeros(compressor.nbytes(numel), dtype=torch.uint8)
    compressor.compress(numbers(numel), found, Site((1, 512), rank=2, number=3))
    return found


@pytest.mark.parametrize("kind", ["compiled", "numpy"])
@pytest.mark.parametrize("compressor", GOLDEN, ids=repr)
def test_payloads_are_as_written_down(compressor, kind):
    if kind == "numpy":
        with native.numpy_only():
            small, large = payload(compressor, 5), payload(compressor, 1300)
    else:
        small, large = payload(compressor, 5), payload(compressor, 1300)
    text, digest = GOLDEN[compressor]
    assert small.numpy().tobytes().rstrip(b"\0").hex() == text
    assert hashlib.sha256(large.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("compressor", GOLDEN, ids=repr)
def test_golden_payloads_decode(compressor):
    text, _ = GOLDEN[compressor]
    whole = bytes.fromhex(text).ljust(compressor.nbytes(5), b"\0")
    out = torch.zeros(5)
    compressor.decompress(torch.frombuffer(bytearray(whole), dtype=torch.uint8), out, False)
    kept = out != 0
    largest = float(numbers(5).abs().max())
    assert float((out - numbers(5))[kept].abs().max()) <= (
        largest if isinstance(compressor, Sign) else largest / 14 * 1.01
    )
