"""placeholder, being written."""


def command() -> None:
    """x"""
