"""Plot the figures of README, ARCHITECTURE and docs/: `python docs/make_figures.py`.

Each figure has a file for light and one for dark pages, and is narrow enough for a phone. What a
figure states comes from the program where the program can state it: `forest` is laid out by
`laurel.data.forest`, `rewards` by `laurel.grpo.advantages`, `places` by the planner, `rooms` by the
layers that tests/test_architecture.py checks, and `speed` and `pushed` are read from
docs/benchmarks.md. Only `scoring` and `step` are schematic.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from laurel.config.grpo import GRPOConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.data.forest import to_forest, to_padded
from laurel.grpo.advantages import compute_advantages, resolve
from laurel.planning.plan import Plan, plan_run
from laurel.run.request import request_of
from laurel.types import TokenGroup

DOCS = Path(__file__).resolve().parent
ASSETS = DOCS / "assets"
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
LETTER = 7.3
"""Width of a letter of 12 px in the fonts above; text is squeezed to it, so that cells fit."""

WIDTH = 420
"""Pixels: a phone shows a page of 390 without shrinking the letters much."""

PROMPT = "Ann has 3 boxes of 12 eggs ?"
COMPLETIONS = ("3 * 12 = 36", "3 * 12 = 38", "36", "36 eggs")


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
    width: int = WIDTH
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

    def curve(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line from one point to another that begins and ends level."""
        middle = (x + to_x) / 2
        self.parts.append(
            f'<path d="M{x:.1f} {y:.1f} C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} '
            f'{to_x:.1f} {to_y:.1f}" fill="none" stroke="{self.theme.faint}" stroke-width="1.5"/>'
        )

    def block(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        lines: str | Sequence[str],
        colour: str,
    ) -> None:
        """A filled rectangle with lines of text in its middle."""
        lines = [lines] if isinstance(lines, str) else lines
        self.box(x, y, wide, high, colour)
        first = y + high / 2 + 4.5 - 7.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(
                x + wide / 2,
                first + 15 * number,
                line,
                size=12,
                colour=self.theme.cell_ink,
                anchor="middle",
            )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight line with a head at its end."""
        length = float(np.hypot(to_x - x, to_y - y))
        along = np.array([to_x - x, to_y - y]) / length
        across = np.array([-along[1], along[0]])
        tip = np.array([to_x, to_y])
        left, right = tip - 6 * along + 3.5 * across, tip - 6 * along - 3.5 * across
        self.parts.append(
            f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" stroke="{self.theme.faint}" '
            f'stroke-width="1.3"/><path d="M{to_x:.1f} {to_y:.1f} L{left[0]:.1f} {left[1]:.1f} '
            f'L{right[0]:.1f} {right[1]:.1f} Z" fill="{self.theme.faint}"/>'
        )
        self.bottom = max(self.bottom, y, to_y)

    def outline(self, x: float, y: float, wide: float, high: float) -> None:
        """A dashed rectangle: what is left out, or waits."""
        self.parts.append(
            f'<rect x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{wide - 1:.1f}" '
            f'height="{high - 1:.1f}" rx="3" fill="none" stroke="{self.theme.faint}" '
            f'stroke-dasharray="3 3"/>'
        )
        self.bottom = max(self.bottom, y + high)

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


def group_of_words(prompt: str, completions: Sequence[str]) -> tuple[TokenGroup, list[str]]:
    """A group in which every word is a token, and the words by their ids."""
    words = list(dict.fromkeys(" ".join((prompt, *completions)).split()))

    def ids(text: str) -> np.ndarray:
        return np.array([words.index(word) for word in text.split()])

    group = TokenGroup(
        id="figure", trunk_ids=ids(prompt), branches_ids_G=tuple(ids(c) for c in completions)
    )
    return group, words


def forest(theme: Theme) -> None:
    """The same group twice: what a padded batch computes, and what Laurel computes."""
    group, words = group_of_words(PROMPT, COMPLETIONS)
    rows, laid = to_padded([group], pad_id=-1), to_forest([group], least_shared=1)
    (tree,) = laid.trees
    paths = [tree.path(end.node) for end in laid.ends_N]
    own = {
        path[-1]: index
        for index, path in enumerate(paths)
        if sum(path[-1] in p for p in paths) == 1
    }
    colours = [
        theme.branches[own[node]] if node in own else theme.trunk for node in range(len(tree.nodes))
    ]
    num_padded, num_distinct = rows.ids_NL.numel(), len(laid.ids_T)
    drawing = Drawing(theme)

    drawing.text(10, 20, "A padded batch", bold=True)
    drawing.text(
        WIDTH - 10,
        20,
        f"{len(rows.ids_NL)} x {rows.ids_NL.shape[1]} = {num_padded} tokens",
        colour=theme.faint,
        anchor="end",
    )
    wide = max(
        sum(len(words[i]) * LETTER + 10 for i in row.tolist() if i >= 0) for row in rows.ids_NL
    )
    for index, (row, path) in enumerate(zip(rows.ids_NL, paths, strict=True)):
        x, y = 10.0, 32 + 26.0 * index
        of_tokens = [colours[node] for node in path for _ in range(tree.nodes[node].length)]
        for at, token in enumerate(int(one) for one in row):
            if token < 0:
                drawing.outline(x, y, max(10 + wide - x, 3), 22)
                break
            x = drawing.cell(x, y, words[token], of_tokens[at])

    top = drawing.bottom + 46
    drawing.text(10, top - 14, "A token forest", bold=True)
    drawing.text(
        WIDTH - 10,
        top - 14,
        f"each token once = {num_distinct}",
        colour=theme.faint,
        anchor="end",
    )
    leaves = [node for node, after in enumerate(tree.exits) if after == node + 1]
    ends: list[tuple[float, float]] = []
    for node, (span, after, parent) in enumerate(
        zip(tree.nodes, tree.exits, tree.parents, strict=True)
    ):
        # In the middle of the leaves below it.
        below = [row for row, leaf in enumerate(leaves) if node <= leaf < after]
        x, y = 10.0, top + 13.0 * (below[0] + below[-1])
        if parent >= 0:
            begin, x = ends[parent], ends[parent][0] + 26
            drawing.curve(begin[0], begin[1] + 11, x, y + 11)
            x += 2
        for token in laid.ids_T[span.start : span.end]:
            x = drawing.cell(x, y, words[int(token)], colours[node])
        ends.append((x - 2, y))
    drawing.write(
        "forest",
        f"A prompt with four completions: {num_padded} tokens as a padded batch, "
        f"{num_distinct} as a token forest, in which what they begin with alike is computed once",
    )


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
    for line in re.findall(r"^\|.*", page.partition("\n## Make a run faster")[0], re.MULTILINE):
        what, _, peer, ratio, *_ = (cell.strip() for cell in line.split("|")[1:-1])
        for name, short in PEERS.items():
            if peer.startswith(name) and what != LEFT_OUT:
                rows.append((what, short, float(ratio)))
    return rows


def speed(theme: Theme) -> None:
    """One bar a ratio; the peer is 1."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = measured(page)
    drawing = Drawing(theme)
    left, unit = 10.0, 60.0
    drawing.text(10, 20, "Times as fast as the peer, 2 CPU cores", bold=True)
    for index, (what, peer, value) in enumerate(rows):
        y = 36 + 46.0 * index
        drawing.text(left, y + 11, what)
        drawing.box(left, y + 17, value * unit, 18, theme.bar)
        drawing.text(left + value * unit + 8, y + 31, f"{value:.2f} x {peer}")
        drawing.parts.append(
            f'<path d="M{left + unit} {y + 15} v22" stroke="{theme.ink}" stroke-dasharray="4 3"/>'
        )
    end = drawing.bottom
    drawing.text(left + unit, end + 15, "1 = the peer", size=12, anchor="middle")
    drawing.write(
        "speed",
        "Speed beside peers on 2 CPU cores: "
        + ", ".join(f"{what} {value:.2f} times {peer}" for what, peer, value in rows),
    )


def pushed(theme: Theme) -> None:
    """Reward and right answers of a real policy at two rates, with the alarms of the larger."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    lines = page.partition("**Pushed too far**")[2].split("\n\nAt ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    (_, *steps), _, *series, (_, *alarms) = rows
    at = [40 + 350 * (int(step) - 1) / (int(steps[-1]) - 1) for step in steps]
    drawing = Drawing(theme)
    drawing.text(10, 20, "A real policy that is pushed", bold=True)
    panels = (("reward", (-1.0, 2.0), series[::2], 36), ("right", (0.0, 1.0), series[1::2], 176))
    for what, (least, most), curves, top in panels:
        high = 110
        drawing.text(40, top + 11, what, size=12, colour=theme.faint)
        for value in (least, most):
            y = top + 16 + high * (most - value) / (most - least)
            drawing.text(34, y + 4, f"{value:g}", size=11, colour=theme.faint, anchor="end")
            drawing.parts.append(f'<path d="M40 {y} H390" stroke="{theme.rest}"/>')
        for number, (_, *values) in enumerate(curves):
            line = " ".join(
                f"{x:.1f},{top + 16 + high * (most - float(value)) / (most - least):.1f}"
                for x, value in zip(at, values, strict=True)
            )
            drawing.parts.append(
                f'<polyline points="{line}" fill="none" stroke-width="2" '
                + (
                    f'stroke="{theme.bar}"/>'
                    if number == 0
                    else f'stroke="{theme.ink}" stroke-dasharray="5 3"/>'
                )
            )
    y = 316.0
    raised = [x for x, letters in zip(at, alarms, strict=True) if letters]
    drawing.box(raised[0], y, raised[-1] - raised[0], 8, theme.branches[0])
    drawing.text(raised[-1] + 6, y + 9, "alarms, at 1e-4", size=12)
    for x, step in zip(at, steps, strict=True):
        if step not in ("9", "13"):
            drawing.text(x, y + 26, step, size=11, colour=theme.faint, anchor="middle")
    names = [name.partition(":")[0] for name, *_ in series[::2]]
    drawing.text(40, y + 46, f"rate {names[0]}", size=12, colour=theme.bar)
    drawing.text(130, y + 46, f"rate {names[1]} (dashed)", size=12)
    drawing.write(
        "pushed",
        "Reward and right answers of a real policy over "
        f"{steps[-1]} steps at rates of {names[0]} and {names[1]}, with the alarms",
    )


def scoring(theme: Theme) -> None:
    """From messages to a score, and what `scoring.json` fixes of each step."""
    drawing, blue = Drawing(theme), theme.branches[1]
    callers = ("training", "evaluation", "server", "environment")
    for index, caller in enumerate(callers):
        x = 10 + 101.0 * index
        drawing.block(x, 10, 97, 26, caller, theme.rest)
        drawing.arrow(x + 48.5, 37, 40 + 61.0 * index, 57)
    drawing.text(274, 81, "scoring.json holds:", size=12, colour=theme.faint)
    steps = (
        (("raw messages", "user: 2 + 3?  assistant: 5"), ()),
        (("chat template",), ("its hash,", "the pinned date")),
        ((), ("BOS, EOS, padding,", "length, cut side")),
        (("decoder, then head",), ("pooled position,", "head in float32")),
        (("score 0.83",), ("mean and deviation,", "golden scores")),
    )
    for index, (lines, fixed) in enumerate(steps):
        y = 58 + 58.0 * index
        if lines:
            drawing.block(10, y, 254, 38, lines, theme.trunk if index else theme.rest)
        else:
            x = 26.0
            for token in ("<user>", "2", "+", "3", "?", "<bot>", "5"):
                x = drawing.cell(x, y + 8, token, theme.trunk)
            drawing.cell(x, y + 8, "EOS", blue)
        if index + 1 < len(steps):
            drawing.arrow(137, y + 39, 137, y + 57)
        for number, line in enumerate(fixed):
            drawing.text(274, y + 16 + 15 * number, line, size=12)
    drawing.write(
        "scoring",
        "Training, evaluation, server and environments hand over raw messages; one template, one "
        "tokenisation, one position and one head make the score, and scoring.json fixes each step",
    )


REWARDS = (1.0, 0.0, 1.0, None)


def rewards(theme: Theme) -> None:
    """A group is scored, and its completions are compared; a failure takes no part."""
    advantages = compute_advantages([REWARDS], resolve(GRPOConfig())).values_BG[0]
    drawing = Drawing(theme)
    for x, title in ((10, "completion"), (158, "environment"), (272, "reward"), (346, "advantage")):
        drawing.text(x, 20, title, size=12, colour=theme.faint)
    drawing.box(158, 32, 92, 4 * 34 - 8, theme.trunk)
    for number, line in enumerate(("math", "code", "reward model", "your class")):
        drawing.text(204, 62 + 24 * number, line, size=12, colour=theme.cell_ink, anchor="middle")
    rows = zip(("36", "12 + 3 = 15", "36 eggs", "3 * 12 ="), REWARDS, advantages, strict=True)
    for index, (text, reward, advantage) in enumerate(rows):
        y = 32 + 34.0 * index
        drawing.block(10, y, 118, 26, text, theme.branches[index])
        drawing.arrow(130, y + 13, 156, y + 13)
        drawing.arrow(252, y + 13, 270, y + 13)
        if reward is None:
            drawing.outline(272, y, 58, 26)
            drawing.text(301, y + 17.5, "failure", size=12, anchor="middle")
            drawing.text(346, y + 17.5, "left out", size=12)
        else:
            drawing.block(272, y, 58, 26, f"{reward:g}", theme.branches[index])
            drawing.text(346, y + 17.5, f"{advantage:+.2f}", bold=True)
    drawing.write(
        "rewards",
        "Four completions of a prompt: rewards 1, 0, 1 and a failure. Each reward is compared with "
        "the others of the group; the failure is left out",
    )


def step(theme: Theme) -> None:
    """What overlaps in a step, synchronous and one step ahead."""
    orange, blue, pink = theme.branches[0], theme.branches[1], theme.branches[2]
    drawing = Drawing(theme)
    left, right = 92.0, WIDTH - 10.0

    def lanes(top: float, title: str, names: Sequence[str]) -> None:
        drawing.text(10, top, title, bold=True)
        for index, name in enumerate(names):
            y = top + 14 + 34 * index
            drawing.text(10, y + 18, name, size=12, colour=theme.faint)
            drawing.parts.append(f'<path d="M{left} {y + 28:.1f} H{right}" stroke="{theme.rest}"/>')

    lanes(20, "max_staleness: 0", ("generator", "environment", "learner"))
    for number, wide in enumerate((52, 84, 112, 132)):
        drawing.box(left, 35 + 6 * number, wide, 5, orange)
        drawing.box(left + wide + 2, 69 + 6 * number, 22, 5, pink)
    learner = ((250, 48, "logp", theme.trunk), (300, 62, "update", blue))
    for x, wide, name, colour in learner:
        drawing.block(x, 103, wide, 24, name, colour)
    drawing.block(364, 35, 46, 24, "load", orange)
    drawing.arrow(362, 112, 385, 62)
    drawing.text(left, 148, "Scoring runs while others are sampled.", size=12)

    top = 182.0
    lanes(top, "max_staleness: 1", ("generator", "learner", "weights"))
    y = top + 15
    batches = ((left, 72, "batch 1"), (left + 74, 88, "batch 2"), (left + 188, 88, "batch 3"))
    for x, wide, name in batches:
        drawing.block(x, y, wide, 24, name, orange)
    drawing.block(left + 76, y + 34, 62, 24, "step 1", blue)
    drawing.outline(left + 140, y + 34, 22, 24)
    drawing.block(left + 188, y + 34, 62, 24, "step 2", blue)
    drawing.outline(left + 252, y + 34, 24, 24)
    drawing.block(left + 164, y + 68, 22, 24, "v1", theme.trunk)
    drawing.block(left + 278, y + 68, 22, 24, "v2", theme.trunk)
    drawing.text(left, y + 114, "Dashed: wait for the batch ahead, then", size=12)
    drawing.text(left, y + 129, "weights change. No batch mixes versions.", size=12)
    drawing.write(
        "step",
        "Timeline of a GRPO step. Synchronous: completions are scored while others are sampled, "
        "then log-probabilities, the update, and the new weights are loaded. One step ahead: the "
        "next batch is sampled while the learner works, and is finished before weights change",
    )


PLACES = (
    ("one process: a laptop", ()),
    (
        "8 GPUs, reward model on 4 of them",
        (
            "cluster.gpus_per_node=8",
            "env.reward_model.resources.gpus_per_node=4",
            "env.reward_model.resources.num_nodes=1",
        ),
    ),
    (
        "2 nodes, a node for the reward model",
        (
            "cluster.gpus_per_node=8",
            "cluster.num_nodes=2",
            "env.reward_model.resources.gpus_per_node=8",
            "env.reward_model.resources.num_nodes=1",
        ),
    ),
    (
        "8 GPUs, generation on 4 of its own",
        (
            "cluster.gpus_per_node=8",
            "policy.generation.colocated.enabled=false",
            "policy.generation.colocated.resources.gpus_per_node=4",
            "policy.generation.colocated.resources.num_nodes=1",
        ),
    ),
)
SCORED = (
    "policy.model_name=policy",
    "data.env_name=reward_model",
    "env.reward_model.enabled=true",
    "env.reward_model.model_name=reward",
)
LETTERS = {"policy": "P", "generation": "G", "reward_model": "R"}


def planned(settings: Sequence[str]) -> Plan:
    """The plan of a GRPO run with these settings."""
    config = load_config(GRPORun, None, [*SCORED, *settings]).config
    assert isinstance(config, GRPORun)
    return plan_run(request_of(config))


def places(theme: Theme) -> None:
    """Roles and their slots, as `laurel plan` places them."""
    drawing = Drawing(theme)
    colours = {
        "PGR": theme.trunk,
        "PG": theme.branches[1],
        "PR": theme.branches[1],
        "P": theme.branches[1],
        "GR": theme.branches[0],
        "G": theme.branches[0],
        "R": theme.branches[2],
    }
    y = 8.0
    for title, settings in PLACES:
        plan = planned(settings)
        assert not [conflict for conflict in plan.conflicts if conflict.is_fatal], plan.conflicts
        drawing.text(10, y + 14, title, size=12, bold=True)
        y += 22
        for node in range(plan.num_nodes):
            drawing.text(10, y + 18, f"node {node}", size=12, colour=theme.faint)
            for index in range(plan.slots_per_node):
                held = "".join(
                    letter
                    for name, letter in LETTERS.items()
                    for role in plan.roles
                    if role.name == name
                    and any((slot.node, slot.index) == (node, index) for slot in role.slots)
                )
                drawing.block(74 + 42.0 * index, y, 38, 26, held, colours[held])
            y += 30
        y += 8
    drawing.text(10, y + 10, "P policy  G generation  R reward model", size=12)
    drawing.write(
        "places",
        "Slots of four clusters and the roles in them: policy, generation and reward model share "
        "the slots of a laptop, or have slots of their own",
    )


def rooms(theme: Theme) -> None:
    """The layers of src/laurel, the highest first."""
    sys.path += [str(DOCS.parent / "tests"), str(DOCS.parent / "tools")]
    from test_architecture import LAYERS

    drawing = Drawing(theme)
    shown = [[room for room in layer if room != "__main__"] for layer in LAYERS[1:]]
    run, data = (
        next(i for i, layer in enumerate(shown) if name in layer) for name in ("run", "data")
    )
    for index, layer in enumerate(shown):
        y = 10 + 29.0 * (len(shown) - 1 - index)
        colour = theme.branches[1] if index >= run else theme.trunk if index >= data else theme.rest
        wide = (WIDTH - 20 - 4 * (len(layer) - 1)) / len(layer)
        for number, room in enumerate(layer):
            drawing.block(10 + number * (wide + 4), y, wide, 25, room, colour)
    drawing.text(10, drawing.bottom + 18, "A room imports only rooms of lower rows.", size=12)
    drawing.write(
        "rooms",
        "The rooms of src/laurel in layers, low to high: "
        + "; ".join(", ".join(layer) for layer in shown),
    )


if __name__ == "__main__":
    for each in THEMES:
        for figure in (forest, speed, pushed, scoring, rewards, step, places, rooms):
            figure(each)
