"""The fault lab: faults injected into captures by code that knows nothing of the rules, and what compare calls them.

`python -m tests.lab` runs everything, prints the confusion matrix and writes docs/fault-lab.md.
"""
