"""A report -> table, JSON (and back), JUnit, GitHub annotations, SARIF, Markdown, HTML; a catalogue entry -> text."""

from eagle_parity.report.content import summary
from eagle_parity.report.document import to_document, to_json
from eagle_parity.report.github import to_github
from eagle_parity.report.html import to_html
from eagle_parity.report.junit import to_junit
from eagle_parity.report.markdown import to_markdown
from eagle_parity.report.reading import read_report
from eagle_parity.report.sarif import to_sarif
from eagle_parity.report.table import headline, print_table

__all__ = [
    "headline",
    "print_table",
    "read_report",
    "summary",
    "to_document",
    "to_github",
    "to_html",
    "to_json",
    "to_junit",
    "to_markdown",
    "to_sarif",
]
