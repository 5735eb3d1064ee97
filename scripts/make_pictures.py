"""Draw what a terminal shows, light and dark: `python scripts/make_pictures.py [OUT]` (default: docs/).

The text is what `eagle-parity compare` prints on the dumps of `eagle-parity demo`; the colours are those that it sends.
"""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from eagle_parity.cli import compare
from eagle_parity.cli.training import Files
from eagle_parity.report import print_table

ROOT = Path(__file__).parent.parent
DEMO = Path("src/eagle_parity/demo")
_ANSI = [(0, 0, 0), (205, 0, 0), (0, 205, 0), (205, 205, 0), (0, 0, 238), (205, 0, 205), (0, 205, 205), (229, 229, 229)]
THEMES = {
    "light": TerminalTheme((255, 255, 255), (27, 31, 36), _ANSI),
    "dark": TerminalTheme((13, 17, 23), (230, 237, 243), _ANSI),
}
MARGIN = 16
# A plain picture of the text: no window frame, and no font that would be fetched from elsewhere.
FORMAT = """<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs>{lines}</defs>
<rect x="-MARGIN" y="-MARGIN" width="100%" height="100%" rx="8" fill="BACKGROUND"/>
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</svg>
"""


def _with_margin(box: re.Match[str]) -> str:
    width, height = (float(size) + 2 * MARGIN for size in box.groups())
    return f'viewBox="-{MARGIN} -{MARGIN} {width} {height}"'


def main(out: Path) -> None:
    """Draw both themes."""
    os.chdir(ROOT)  # so that the picture shows a short path
    report = compare.measure(DEMO / "training", DEMO / "serving-wrong", None, (), Files())
    for name, theme in THEMES.items():
        console = Console(
            file=io.StringIO(), width=80, highlight=False, record=True, force_terminal=True, color_system="256"
        )
        print_table(report, console)
        code = FORMAT.replace("BACKGROUND", "#{:02x}{:02x}{:02x}".format(*theme.background_color))
        code = code.replace("MARGIN", str(MARGIN))
        picture = console.export_svg(theme=theme, code_format=code, title="", unique_id="t")
        picture = re.sub(r'viewBox="0 0 (\S+) (\S+)"', _with_margin, picture, count=1)
        (out / f"compare-{name}.svg").write_text(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else ROOT / "docs")
