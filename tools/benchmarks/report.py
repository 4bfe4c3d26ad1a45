"""What was measured, as a table, JSON and a bar chart; and the table in docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import Row, Spread

BEGIN, END = "<!-- benchmarks: begin -->\n", "<!-- benchmarks: end -->"


def shown(value: Spread, unit: str = "") -> str:
    unit = f" {unit}" if unit else ""
    if value.rounds == 1:
        return f"{value.median:.3g}{unit}"
    return f"{value.median:.3g} ({value.low:.3g}-{value.high:.3g}){unit}"


def rows_of(results: dict) -> list[Row]:
    return [Row.from_json(row) for group in results["groups"].values() for row in group["rows"]]


def table(results: dict) -> str:
    """Markdown: the machine of each group, then its rows and checks."""
    lines = []
    for name, group in results["groups"].items():
        made = group["machine"]
        versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
        lines += [f"**{name}**: {made['processor']}, {made['cores']} cores, {made['memory_gib']} GiB; {versions}; {made['date']}", ""]
        lines += ["| measured | sides: median (lowest-highest) | figure | value | target | met |", "|---|---|---|---|---|---|"]
        for row in map(Row.from_json, group["rows"]):
            sides = "<br>".join(f"{side}: {shown(value, row.unit)}" for side, value in row.sides.items())
            title = row.name + (f"<br>{row.note}" if row.note else "")
            for check in row.checks or [None]:
                cells = ["", "", "", ""] if check is None else [
                    check.name, shown(check.value, check.unit), check.target, {True: "yes", False: "**no**", None: ""}[check.met]
                ]  # fmt: skip
                lines.append(f"| {' | '.join([title, sides, *cells])} |")
                title = sides = ""
        lines.append("")
    return "\n".join(lines) + "\n"


def chart(results: dict, path: Path) -> None:
    """A bar a target: how far past it the figure is; 1 is the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [(row, c) for row in rows_of(results) for c in row.checks if c.met is not None and c.value.median > 0]
    lengths = [c.value.median / c.least if c.most is None else c.most / c.value.median for _, c in bars]
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.4 * len(bars)))
    axes.barh(range(len(bars)), [n - 1 for n in lengths], left=1, color=["tab:green" if c.met else "tab:red" for _, c in bars])
    axes.set_xscale("log")
    axes.axvline(1, color="black")
    axes.set_yticks(range(len(bars)), [f"{row.name[:50]}\n{c.name}: {c.value.median:.3g} {c.unit} ({c.target})" for row, c in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("times better than the target (line: the target)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def renew(page: Path, results: dict) -> None:
    """Put the table between the page's marks. Raises ValueError where it has none."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page}: no line {BEGIN.strip()} and {END}; expected both, around the table")
    page.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table(results) + text[text.index(END) :], encoding="utf-8")
