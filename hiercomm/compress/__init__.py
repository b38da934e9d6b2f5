"""Compressors: what crosses the links between nodes in fewer bytes."""

from hiercomm.compress.base import Compressor, FeedbackCompressor, Site, Sites
from hiercomm.compress.block import FP8, Int4, Int8, Sign
from hiercomm.compress.dense import BF16, FP16, NoCompression
from hiercomm.compress.feedback import ErrorFeedback
from hiercomm.compress.low_rank import PowerSGD
from hiercomm.compress.rules import Auto, Choice, PerLayer, parse
from hiercomm.compress.sparse import RandomK, TopK

__all__ = [
    "BF16", "FP8", "FP16", "Auto", "Choice", "Compressor", "ErrorFeedback", "FeedbackCompressor", "Int4", "Int8",
    "NoCompression", "PerLayer", "PowerSGD", "RandomK", "Sign", "Site", "Sites", "TopK", "parse",
]  # fmt: skip
