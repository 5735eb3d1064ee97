"""Files as they lie on disk -> capture: training formats a line each in registry.py, a server's files in served.py."""

from eagle_parity.readers.capture import TrainingCapture, capture_training
from eagle_parity.readers.files import is_own_dump
from eagle_parity.readers.reference import establish
from eagle_parity.readers.served import Known, Served, open_served
from eagle_parity.readers.stream import stream_capture, stream_training
from eagle_parity.readers.target import read_model
from eagle_parity.readers.training import DIRECT_LIMIT, Problem, Training, open_training

__all__ = [
    "DIRECT_LIMIT",
    "Known",
    "Problem",
    "Served",
    "Training",
    "TrainingCapture",
    "capture_training",
    "establish",
    "is_own_dump",
    "open_served",
    "open_training",
    "read_model",
    "stream_capture",
    "stream_training",
]
