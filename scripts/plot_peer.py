"""Draws results of scripts/bench_peer.sh: tokens per second relative to llama.cpp, medians, a bar a cell.

    .venv/bin/python scripts/plot_peer.py tests/bench/results/A.json [B.json ...] --output FILE.svg
"""

import argparse
import json
import pathlib
import statistics

import pygal
import pygal.style

STYLE = pygal.style.Style(background="white", plot_background="white", font_family="sans-serif", label_font_size=11,
                          major_label_font_size=11, title_font_size=15, legend_font_size=12,
                          colors=("#1b6ca8", "#e08e1b", "#5a9c4d"))


def ratios(result):
    """Cell -> median ratio of the rounds."""
    return {cell: statistics.median(own["tokens_per_second"] / peer for own, peer in zip(samples, result["peer"][cell]))
            for cell, samples in result["weft"].items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=pathlib.Path)
    parser.add_argument("--output", required=True, type=pathlib.Path)
    args = parser.parse_args()

    results = [json.loads(path.read_text()) for path in args.results]
    machine = results[0]["machine"]
    cells = list(dict.fromkeys(cell for result in results for cell in result["weft"]))
    chart = pygal.HorizontalBar(style=STYLE, width=760, height=40 * len(cells) + 170, legend_at_bottom=True,
                                js=(), print_values=False, disable_xml_declaration=True,
                                title=f"Tokens per second, llama.cpp = 1 ({machine['cpu']}, {results[0]['threads']} threads)")
    chart.y_labels = [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    chart.x_labels = reversed(cells)
    for result in results:
        values = ratios(result)
        chart.add(f"{result['weights']}, {result['rounds']} rounds",
                  [values.get(cell) for cell in reversed(cells)], formatter=lambda ratio: f"{ratio:.2f}")
    args.output.write_text(chart.render() + "\n")


if __name__ == "__main__":
    main()
