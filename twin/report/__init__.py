"""The report of one or several replays, side by side: for the terminal, as a page, as JSON.

- `table`: what `twinkeel replay` prints (`twin.report.terminal`);
- `write_html`: one page that needs no network (`twin.report.page`);
- `write_json`: every figure (`twin.report.files`).

Each of the first two imports its library only when it is called.

- `figures`, `texts`: what is compared, and how it is written;
- `charts`, `traffic`, `requests`: charts of runs, of a trace, of single requests;
- `assets`, `colours`: the page's looks.
"""

from twin.report.figures import ReportError
from twin.report.files import write_json
from twin.report.page import write_html
from twin.report.terminal import table

__all__ = ["ReportError", "table", "write_html", "write_json"]
