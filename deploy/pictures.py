"""Pictures of the dashboards' panels from live queries. Not Grafana's: its server is not needed for them."""

import json
import pathlib
import re
import textwrap

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402

DASHBOARDS = sorted((pathlib.Path(__file__).parent / "grafana").glob("*.json"))
COLUMNS = 3
SUFFIX = {"s": "s", "bytes": "B", "Bps": "B/s", "reqps": "/s", "ops": "/s", "percentunit": "%", "none": "", "short": ""}


def tick(unit):
    def text(value, _):
        if unit == "percentunit":
            return f"{100 * value:g} %"
        for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= factor:
                return f"{value / factor:g} {prefix}{SUFFIX[unit]}"
        return f"{value:g} {SUFFIX[unit]}"
    return FuncFormatter(text)


def substitute(expression, rate):
    return re.sub(r"\$(cluster|model|group)\b", ".*", expression.replace("$__rate_interval", rate))


def draw_panel(axes, panel, prometheus, start, end, rate):
    unit = panel["fieldConfig"]["defaults"]["unit"]
    lines = 0
    for target in panel["targets"]:
        data = prometheus.api("query_range", query=substitute(target["expr"], rate), start=start, end=end, step=1)
        for series in data["result"]:
            legend = re.sub(r"\{\{(\w+)\}\}", lambda m: series["metric"].get(m.group(1), ""), target["legendFormat"])
            points = [(float(t) - end, float(v)) for t, v in series["values"]]
            axes.plot(*zip(*points), label=legend, linewidth=1)
            lines += 1
    axes.set_title(panel["title"], fontsize=10, loc="left", weight="bold")
    axes.set_xlabel("\n".join(textwrap.wrap(panel["description"], 70)), fontsize=7, loc="left")
    axes.yaxis.set_major_formatter(tick(unit))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.tick_params(labelsize=7)
    top = max(axes.get_ylim()[1], 1e-9) if lines else 1
    axes.set_ylim(-0.03 * top, 1.05 * top)  # a line at 0 is seen
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=6, loc="upper left", ncols=2 if lines > 6 else 1, framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")


def draw(prometheus, folder, start, end, rate="15s"):
    """A PNG of each dashboard, of the time from `start` to `end` (Unix)."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        panels = [p for p in board["panels"] if p["type"] != "row"]
        rows = -(-len(panels) // COLUMNS)
        figure, grid = plt.subplots(rows, COLUMNS, figsize=(5 * COLUMNS, 3 * rows), layout="constrained", squeeze=False)
        figure.suptitle(f"{board['title']}: {board['description']}", fontsize=12)
        for axes, panel in zip(grid.flat, panels):
            draw_panel(axes, panel, prometheus, start, end, rate)
        for axes in list(grid.flat)[len(panels):]:
            axes.set_visible(False)
        figure.savefig(pathlib.Path(folder) / f"{path.stem}.png", dpi=90)
        plt.close(figure)
        print(f"wrote {folder}/{path.stem}.png")
