"""Training files as they lie on disk -> capture. One file a format, one line a format in registry.py."""

from eagle_parity.readers.capture import TrainingCapture, capture_training
from eagle_parity.readers.files import is_own_dump
from eagle_parity.readers.reference import establish
from eagle_parity.readers.stream import stream_capture, stream_training
from eagle_parity.readers.target import read_model
from eagle_parity.readers.training import DIRECT_LIMIT, Problem, Training, open_training

__all__ = [
    "DIRECT_LIMIT",
    "Problem",
    "Training",
    "TrainingCapture",
    "capture_training",
    "establish",
    "is_own_dump",
    "open_training",
    "read_model",
    "stream_capture",
    "stream_training",
]
