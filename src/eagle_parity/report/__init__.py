"""A report -> table, JSON."""

from eagle_parity.report.document import to_document, to_json
from eagle_parity.report.table import headline, print_table, summary

__all__ = ["headline", "print_table", "summary", "to_document", "to_json"]
