"""What a layer id means: per engine, version and model class, translated to boundaries in one place."""

from eagle_parity.conventions.sglang import Served, ids_for, served

__all__ = ["Served", "ids_for", "served"]
