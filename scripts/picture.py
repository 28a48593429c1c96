"""README's picture, from a finished run of masked language modelling: its held-out loss beside the baseline, and what
the model then fills in. Writes docs/first_run_light.svg and docs/first_run_dark.svg, one for each theme of a page.

    lmtool pretrain experiment=bert_tiny model/positions=rotary max_minutes=2.75 name=first
    python scripts/picture.py runs/first
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lmtool
from lmtool.reporting.drawing import STYLE
from lmtool.reporting.run_files import RunFiles, read_run, series
from lmtool.reporting.text import duration

DOCS = Path(__file__).resolve().parents[1] / "docs"
TEXT = "Return the [MASK] of the list."
THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "quiet": "#59636e", "line": "#1f5f99", "rust": "#b5532a"},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "quiet": "#9198a1", "line": "#6cb2eb", "rust": "#f0935e"},
}
Guesses = list[tuple[str, float]]


def draw_loss(axes: Axes, run: RunFiles, inks: dict[str, str]) -> None:
    """Held-out loss over steps, each line named where it is."""
    steps, losses = series(run.validation, str(run.result["metric"]))
    baseline = float(run.baseline["value"])
    axes.axhline(baseline, color=inks["rust"], linewidth=2, linestyle=(0, (5, 4)))
    axes.plot(steps, losses, color=inks["line"], linewidth=3, marker="o", markersize=6)
    axes.set_ylim(min(losses) - 0.5, baseline + 0.5)
    above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "right"}
    name = f"word frequencies alone: {baseline:.2f}"
    axes.annotate(name, (steps[-1], baseline), color=inks["rust"], **above)  # type: ignore[arg-type]
    name = f"the model: {losses[-1]:.2f}"
    axes.annotate(name, (steps[-1], losses[-1]), color=inks["line"], **(above | {"xytext": (0, -20)}))  # type: ignore
    place = f"{run.environment['threads']} {str(run.environment['device']).upper()} threads"
    axes.set_title(f"Loss of masked words: {duration(run.result['seconds'])} on {place}", pad=12)
    axes.set_xlabel("training step")


def draw_guesses(axes: Axes, guesses: Guesses, inks: dict[str, str]) -> None:
    """A bar a word, the likeliest on top."""
    words, fractions = [word for word, _ in guesses], [share for _, share in guesses]
    bars = axes.barh(words, fractions, color=inks["line"], height=0.62)
    axes.bar_label(bars, [f"{share:.0%}" for share in fractions], padding=6, color=inks["quiet"])
    axes.invert_yaxis()
    axes.set_title(f"{TEXT.replace('[MASK]', '____')}", pad=10)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(length=0, labelbottom=False, labelcolor=inks["ink"])


def picture(run: RunFiles, guesses: Guesses, inks: dict[str, str]) -> str:
    """The SVG, with letters that can be read where a page is 400 pixels wide."""
    style: dict[Any, Any] = {
        **STYLE, "font.size": 15, "axes.titlesize": 16, "text.color": inks["ink"], "axes.titlecolor": inks["ink"],
        "axes.edgecolor": inks["quiet"], "axes.labelcolor": inks["quiet"], "xtick.color": inks["quiet"],
        "ytick.color": inks["quiet"], "xtick.labelcolor": inks["quiet"], "ytick.labelcolor": inks["quiet"],
    }  # fmt: skip
    buffer = io.StringIO()
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 6.2), layout="constrained", facecolor=inks["paper"])
        figure.get_layout_engine().set(w_pad=0.2, h_pad=0.2)  # type: ignore[union-attr]
        loss, words = figure.subplots(2, 1, height_ratios=(3, 2))
        for axes in (loss, words):
            axes.patch.set_alpha(0)
        draw_loss(loss, run, inks)
        draw_guesses(words, guesses, inks)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run, such as runs/first")
    parser.add_argument("--output", type=Path, default=DOCS, help="where the two files go")
    options = parser.parse_args()
    run = read_run(options.run)
    (row,) = lmtool.load(str(options.run)).predict([TEXT])
    guesses = [(word, share) for word, share in row["masks"][0]["guesses"]]
    for theme, inks in THEMES.items():
        (options.output / f"first_run_{theme}.svg").write_text(picture(run, guesses, inks), encoding="utf-8")


if __name__ == "__main__":
    main()
