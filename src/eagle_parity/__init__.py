"""eagle-parity: does a live server feed an EAGLE-3 draft the hidden states it was trained on?

Importing this package loads neither torch nor sglang; `ARCHITECTURE.md` names the rooms.
"""

__version__ = "0.1.0"
