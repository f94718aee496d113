"""Draws the README's figures, each for light and dark pages: `python docs/make_figures.py`.

`forest-*.svg` shows one prompt with its completions as a padded batch and as a token forest, laid
out by `laurel.data.forest` itself. `speed-*.svg` shows ratios read from docs/benchmarks.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from laurel.data.forest import to_forest, to_padded
from laurel.types import TokenGroup

DOCS = Path(__file__).resolve().parent
ASSETS = DOCS / "assets"
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
LETTER = 7.3
"""Width of a letter of 12 px in the fonts above; text is squeezed to it, so that cells fit."""

PROMPT = "Ann has 3 boxes of 12 eggs . How many ?"
COMPLETIONS = (
    "3 * 12 = 36 . \\boxed{36}",
    "12 + 3 = 15 \\boxed{15}",
    "36",
    "She has 36 eggs in all : \\boxed{36}",
)


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a page."""

    name: str
    ink: str
    faint: str
    trunk: str
    branches: tuple[str, ...]
    cell_ink: str
    bar: str
    rest: str


THEMES = (
    Theme(
        "light",
        "#1f2328",
        "#59636e",
        "#9fd8cb",
        ("#f6c28b", "#b9c7f2", "#e8b4d0", "#d5dd9b"),
        "#1f2328",
        "#12836f",
        "#d1d9e0",
    ),
    Theme(
        "dark",
        "#f0f6fc",
        "#9198a1",
        "#1f6f61",
        ("#8a5a23", "#44569c", "#84436b", "#636c22"),
        "#f0f6fc",
        "#2fb59c",
        "#3d444d",
    ),
)


@dataclass
class Drawing:
    """An SVG under construction; positions and sizes are pixels."""

    theme: Theme
    width: int
    parts: list[str] = field(default_factory=list)
    bottom: float = 0.0

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        colour: str = "",
        anchor: str = "",
        bold: bool = False,
    ) -> None:
        """A line of text; y is its baseline."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour or self.theme.ink}"'
            + (f' text-anchor="{anchor}"' if anchor else "")
            + (' font-weight="600"' if bold else "")
            + f">{escape(text)}</text>"
        )
        self.bottom = max(self.bottom, y)

    def cell(self, x: float, y: float, token: str, colour: str) -> float:
        """One token; returns where the next one begins."""
        wide = len(token) * LETTER + 8
        self.box(x, y, wide, 22, colour)
        self.parts.append(
            f'<text x="{x + wide / 2:.1f}" y="{y + 15:.1f}" font-size="12" text-anchor="middle" '
            f'textLength="{len(token) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs" '
            f'fill="{self.theme.cell_ink}">{escape(token)}</text>'
        )
        return x + wide + 2

    def box(self, x: float, y: float, wide: float, high: float, colour: str) -> None:
        """A filled rectangle with round corners."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high}" rx="3" '
            f'fill="{colour}"/>'
        )
        self.bottom = max(self.bottom, y + high)

    def empty(self, x: float, y: float, wide: float) -> None:
        """The outline of padding."""
        self.parts.append(
            f'<rect x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{max(wide - 3, 1):.1f}" height="21" '
            f'rx="3" fill="none" stroke="{self.theme.rest}" stroke-dasharray="3 3"/>'
        )

    def curve(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line from one point to another that begins and ends level."""
        middle = (x + to_x) / 2
        self.parts.append(
            f'<path d="M{x:.1f} {y:.1f} C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} '
            f'{to_x:.1f} {to_y:.1f}" fill="none" stroke="{self.theme.faint}" stroke-width="1.5"/>'
        )

    def write(self, name: str, title: str) -> None:
        """Write the file; the title is what screen readers say."""
        high = round(self.bottom + 12)
        path = ASSETS / f"{name}-{self.theme.name}.svg"
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {high}" '
            f'width="{self.width}" height="{high}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(title)}</title>\n" + "\n".join(self.parts) + "\n</svg>\n",
            encoding="utf-8",
        )
        print(path.name)


# ----------------------------------------------------------------------------------- token forest


def group_of_words(prompt: str, completions: Sequence[str]) -> tuple[TokenGroup, list[str]]:
    """A group in which every word is a token, and the words by their ids."""
    words: list[str] = []

    def ids(text: str) -> np.ndarray:
        start = len(words)
        words.extend(text.split())
        return np.arange(start, len(words))

    group = TokenGroup(
        id="figure", trunk_ids=ids(prompt), branches_ids_G=tuple(ids(c) for c in completions)
    )
    return group, words


def forest(theme: Theme) -> None:
    """The same group twice: what a padded batch computes, and what Laurel computes."""
    group, words = group_of_words(PROMPT, COMPLETIONS)
    rows, laid = to_padded([group], pad_id=-1), to_forest([group])
    (tree,) = laid.trees
    num_padded, num_distinct = rows.ids_NL.numel(), len(laid.ids_T)
    drawing = Drawing(theme, width=800)

    drawing.text(10, 20, "A padded batch", bold=True)
    drawing.text(
        790,
        20,
        f"{len(rows.ids_NL)} rows x {rows.ids_NL.shape[1]} = {num_padded} tokens",
        colour=theme.faint,
        anchor="end",
    )
    wide = max(
        sum(len(words[i]) * LETTER + 10 for i in row.tolist() if i >= 0) for row in rows.ids_NL
    )
    for index, (row, start) in enumerate(zip(rows.ids_NL, rows.starts_N, strict=True)):
        x, y = 10.0, 32 + 26.0 * index
        for at, token in enumerate(int(one) for one in row):
            if token < 0:
                drawing.empty(x, y, 10 + wide - x)
                break
            x = drawing.cell(
                x, y, words[token], theme.trunk if at < start else theme.branches[index]
            )

    top = drawing.bottom + 46
    drawing.text(10, top - 14, "A token forest", bold=True)
    drawing.text(
        790,
        top - 14,
        f"every distinct token once = {num_distinct} tokens",
        colour=theme.faint,
        anchor="end",
    )
    middle = top + 13 * len(tree.branches_G) - 13
    x = 10.0
    for token in laid.ids_T[tree.trunk.start : tree.trunk.end]:
        x = drawing.cell(x, middle, words[int(token)], theme.trunk)
    for index, branch in enumerate(tree.branches_G):
        y, end = top + 26.0 * index, x + 46
        drawing.curve(x, middle + 11, end, y + 11)
        for token in laid.ids_T[branch.start : branch.end]:
            end = drawing.cell(end + 2, y, words[int(token)], theme.branches[index]) - 2
    drawing.write(
        "forest",
        f"A prompt with four completions: {num_padded} tokens as a padded batch, "
        f"{num_distinct} as a token forest, in which the prompt is computed once",
    )


# ------------------------------------------------------------------------------------------ speed


PEERS = {
    "TRL GRPOTrainer": "TRL 1.16",
    "TRL RewardTrainer": "TRL 1.16",
    "one padded batch": "padded batch",
    "transformers generate": "generate",
}
"""The peers that are shown, and what the figure calls them."""
LEFT_OUT = "Scoring, 1 x 8 completions"


def measured(page: str) -> list[tuple[str, str, float]]:
    """Read what was measured, the peer and the ratio of each row from the first table."""
    rows = []
    for line in re.findall(r"^\|.*", page.partition("\n## Method")[0], re.MULTILINE):
        what, _, peer, ratio, *_ = (cell.strip() for cell in line.split("|")[1:-1])
        for name, short in PEERS.items():
            if peer.startswith(name) and what != LEFT_OUT:
                rows.append((what, short, float(ratio)))
    return rows


def speed(theme: Theme) -> None:
    """One bar a ratio; the peer is 1."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = measured(page)
    drawing = Drawing(theme, width=800)
    left, unit = 250.0, 90.0
    drawing.text(10, 20, "Times as fast as the peer in the same run, on 2 CPU cores", bold=True)
    for index, (what, peer, value) in enumerate(rows):
        y = 38 + 30.0 * index
        drawing.text(left - 12, y + 15, what, anchor="end")
        drawing.box(left, y, value * unit, 22, theme.bar)
        drawing.text(left + value * unit + 8, y + 15, f"{value:.2f} x {peer}")
    end = drawing.bottom + 6
    drawing.parts.append(
        f'<path d="M{left + unit} 32 V{end:.1f}" stroke="{theme.ink}" stroke-dasharray="4 3"/>'
    )
    drawing.text(left + unit, end + 15, "1 = the peer", size=12, anchor="middle")
    drawing.write(
        "speed",
        "Speed beside peers on 2 CPU cores: "
        + ", ".join(f"{what} {value:.2f} times {peer}" for what, peer, value in rows),
    )


if __name__ == "__main__":
    for each in THEMES:
        forest(each)
        speed(each)
