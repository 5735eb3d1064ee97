"""`python -m eagle_parity`."""

from eagle_parity.cli.main import run

run()
