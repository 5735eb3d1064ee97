"""Rows and facts -> findings. `study` measures, `diagnose` names, `layers` answers "which layers?", `files` checks
what lies on disk, `faults` explains.

Nothing is imported here: `files` and `faults` must not bring torch along.
"""
