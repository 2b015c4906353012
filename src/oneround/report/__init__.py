"""One self-contained HTML file about a run or a sweep: it opens offline, on a phone, on paper and without a mouse."""

from oneround.report.page import report

__all__ = ["report"]
