"""`peftkit report RUN ...`"""

from pathlib import Path

import typer

from peftkit.cli import output


def command(
    runs: list[Path] = typer.Argument(..., metavar="RUN...", help="Folders of runs, each a recipe's out."),
    out: Path = typer.Option(Path("report.html"), "--out", metavar="FILE.html", help="Where the page goes."),
) -> None:
    """One HTML page that shows or compares runs."""
    from peftkit.train.folder import check_writable
    from peftkit.train.report import write_report

    check_writable(out.parent, field="--out")
    write_report(runs, out)
    output.emit({"out": out, "runs": runs}, f"written to {out}")
