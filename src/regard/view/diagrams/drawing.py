"""Draw the parts of a diagram as SVG: one file without scripts, whose boxes are links to their details."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from regard.printable import printable
from regard.view.diagrams.parts import Box, Branch, Columns, Frame, Part, total
from regard.view.diagrams.words import Say
from regard.view.page import static

WIDTH, LINE, PAD = 264, 16, 14  # of a box, of a line of text, inside of a frame
GAP = 22  # between parts, for an arrow
SKIP = 26  # from a box to the line of its residual connection
BETWEEN = 70  # columns
PANEL, LABEL = 440, 92  # width of the details, and of their labels


@dataclass
class Drawing:
    """SVG elements in drawing order, details of boxes, and the ends of arrows between columns."""

    say: Say
    elements: list[str] = field(default_factory=list)
    details: list[tuple[float, str, Sequence[tuple[str, str]]]] = field(default_factory=list)  # y, title, rows
    readers: list[tuple[float, float]] = field(default_factory=list)  # where boxes read the other column
    ends: list[tuple[float, float]] = field(default_factory=list)  # of the columns drawn last

    def text(
        self, x: float, y: float, text: str, kind: str = "", width: float | None = None, anchor: str = "middle"
    ) -> None:
        """Write one line of text, shortened to a width."""
        shown = shorten(clean(text), width)
        self.elements.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(shown)}</text>')

    def arrow(self, x: float, top: float, bottom: float) -> None:
        """Draw an arrow down."""
        self.elements.append(f'<path class="flow" d="M{x:g} {top:g}V{bottom - 5:g}"/>')
        self.head(x, bottom)

    def head(self, x: float, y: float, direction: str = "down") -> None:
        """Draw the head of an arrow whose tip is at a point."""
        corners = {"down": "-4 -7h8", "right": "-7 -4v8", "left": "7 -4v8"}[direction]
        self.elements.append(f'<path class="head" d="M{x:g} {y:g}l{corners}z"/>')

    def draw_all(self, parts: Sequence[Part], x: float, y: float) -> float:
        """Draw parts below one another around the axis x, from y on; return where they end."""
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            bottom = self.draw(part, x, y)
            if following is None:
                return bottom
            if isinstance(part, Columns) and not part.attends:
                self.join(x, bottom + GAP)
                bottom += GAP
            if isinstance(following, Columns):
                self.fork(following, x, bottom)
            elif isinstance(following, Branch):
                self.elements.append(f'<path class="flow" d="M{x:g} {bottom:g}v{GAP}"/>')
            elif not _is_aside(part) and not _is_aside(following):
                self.arrow(x, bottom, bottom + GAP)
            y = bottom + GAP
        return y

    def draw(self, part: Part, x: float, y: float) -> float:
        """Draw a part with the middle of its top at (x, y); return its bottom."""
        if isinstance(part, Box):
            return self.box(part, x, y)
        if isinstance(part, Frame):
            return self.frame(part, x, y)
        if isinstance(part, Branch):
            return self.branch(part, x, y)
        return self.columns(part, x, y)

    def box(self, box: Box, x: float, y: float) -> float:
        height = 12 + LINE * (1 + len(box.lines))
        left = x - WIDTH / 2
        with_aside = " aside" if box.aside else ""
        self._link(box, y)
        size = f'width="{WIDTH}" height="{height}"'
        self.elements.append(f'<g class="box {box.kind}{with_aside}">')
        self.elements.append(f'<rect x="{left:g}" y="{y:g}" {size} rx="6"/>')
        count = f"{box.parameters:,}" if box.parameters else ""
        taken = text_width(count) + 14 if count else 0
        self.text(left + 10, y + LINE + 2, box.title, "title", WIDTH - 20 - taken, "start")
        if count:
            self.text(left + WIDTH - 10, y + LINE + 2, count, "small", None, "end")
        for n, line in enumerate(box.lines, 1):
            self.text(left + 10, y + LINE * (n + 1) + 2, line, "small", WIDTH - 20, "start")
        self.elements.append("</g></a>")
        if box.from_source:
            self.readers.append((left, y + height / 2))
        return y + height

    def frame(self, frame: Frame, x: float, y: float) -> float:
        width, height = measure(frame)
        left = x - width / 2
        self._link(frame.box, y, frame)
        self.elements.append(
            f'<rect class="frame" x="{left:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="9"/>'
        )
        self.text(left + 12, y + 19, self.title(frame), "title", width - 24, "start")
        count = self.say("each" if frame.times > 1 else "parameters", count=frame.box.parameters)
        self.text(left + 12, y + 19 + LINE, count, "small", width - 24, "start")
        self.elements.append("</a>")
        self.draw_all(frame.parts, x, y + _top(frame))
        return y + height

    def title(self, frame: Frame) -> str:
        """Return the title of a frame; of repeated layers, with their number and which they are, counted from 0."""
        if frame.times == 1:
            return frame.box.title
        first, last = (path.rpartition(".")[2] for path in (frame.paths[0], frame.paths[-1]))
        return f"{frame.box.title} {self.say('folded', times=frame.times, first=first, last=last)}"

    def branch(self, branch: Branch, x: float, y: float) -> float:
        """Draw parts, and a line around them to the sum after them."""
        width, _ = measure(branch)
        side, start = x + width / 2 - SKIP / 2, y
        self.elements.append(f'<path class="flow" d="M{x:g} {start:g}v{GAP / 2:g}"/>')
        self.arrow(x, start + GAP / 2, start + GAP)
        bottom = self.draw_all(branch.parts, x, start + GAP)
        end = bottom + GAP
        self.arrow(x, bottom, end)
        around = f"M{x:g} {start + GAP / 2 - 4:g}H{side:g}V{end + 8:g}H{x + 14:g}"
        self.elements.append(f'<path class="flow" d="{around}"/>')
        self.head(x + 8, end + 8, "left")
        self.elements.append(f'<circle class="sum" cx="{x:g}" cy="{end + 8:g}" r="8"/>')
        self.elements.append(f'<path class="flow" d="M{x - 4:g} {end + 8:g}h8m-4 -4v8"/>')
        return end + 16

    def columns(self, columns: Columns, x: float, y: float) -> float:
        """Draw two columns, and the arrows from the end of the left one to what attends to it."""
        (left, _), (right, _) = (_measure_all(each) for each in (columns.left, columns.right))
        left_axis, right_axis = axes(columns, x)
        left_end = self.draw_all(columns.left, left_axis, y)
        before = len(self.readers)
        right_end = self.draw_all(columns.right, right_axis, y)
        self.ends = [(left_axis, left_end), (right_axis, right_end)]
        if columns.attends:
            middle, turn = x + (left - right) / 2, left_end + 14
            ends = self.readers[before:]
            self.elements.append(f'<path class="flow" d="M{left_axis:g} {left_end:g}V{turn:g}H{middle:g}"/>')
            for end_x, end_y in ends:
                self.elements.append(f'<path class="flow" d="M{middle:g} {turn:g}V{end_y:g}H{end_x - 5:g}"/>')
                self.head(end_x, end_y, "right")
        return max(left_end + (20 if columns.attends else 0), right_end)

    def fork(self, columns: Columns, x: float, y: float) -> None:
        """Draw arrows from one axis to the starts of two columns below."""
        for axis in axes(columns, x):
            self.elements.append(f'<path class="flow" d="M{x:g} {y:g}v{GAP / 2:g}H{axis:g}v{GAP / 2 - 5:g}"/>')
            self.head(axis, y + GAP)

    def join(self, x: float, y: float) -> None:
        """Draw lines from the ends of the last two columns to one axis."""
        for axis, end in self.ends:
            self.elements.append(f'<path class="flow" d="M{axis:g} {end:g}V{y:g}H{x:g}"/>')

    def _link(self, box: Box, y: float, frame: Frame | None = None) -> None:
        number = len(self.details)
        rows = list(box.details)
        if frame is not None and frame.times > 1:
            shown = [*frame.paths[:3], "…", frame.paths[-1]] if len(frame.paths) > 5 else frame.paths
            rows.append((self.say("row.copies"), ", ".join(shown)))
        counted = self.say("each" if frame is not None and frame.times > 1 else "parameters", count=box.parameters)
        title = f"{self.title(frame) if frame is not None else box.title}: {counted}"
        self.details.append((y, title, rows))
        path = escape(clean(box.path), quote=True)
        self.elements.append(f'<a href="#details-{number}" data-path="{path}" data-parameters="{box.parameters}">')
        self.elements.append(f"<title>{escape(clean(title))}</title>")

    def panels(self, x: float, height: float) -> Iterator[str]:
        """Yield the details of all boxes; one is shown when its link was followed."""
        for number, (y, title, rows) in enumerate(self.details):
            lines = [
                (label if n == 0 else "", line) for label, text in rows for n, line in enumerate(_panel_lines(text))
            ]
            size = 44 + LINE * len(lines)
            top = max(8.0, min(y, height - size - 8))
            yield f'<g class="details" id="details-{number}">'
            yield f'<rect x="{x:g}" y="{top:g}" width="{PANEL}" height="{size}" rx="8"/>'
            part = Drawing(self.say)
            part.text(x + 16, top + 24, title, "title", PANEL - 80, "start")
            yield from part.elements
            yield f'<a href="#top"><text x="{x + PANEL - 16:g}" y="{top + 24:g}" text-anchor="end" class="small">'
            yield f"{escape(self.say('close'))}</text></a>"
            for n, (label, line) in enumerate(lines):
                part = Drawing(self.say)
                part.text(x + 16, top + 46 + LINE * n, label, "small", LABEL, "start")
                part.text(x + 16 + LABEL, top + 46 + LINE * n, line, "mono", None, "start")
                yield from part.elements
            yield "</g>"

    def tallest_panel(self) -> float:
        """Return the height of the largest details."""
        texts = [[text for _, text in rows] for _, _, rows in self.details]
        lines = (sum(len(_panel_lines(text)) for text in each) for each in texts)
        return 60 + LINE * max(lines, default=0)


def _panel_lines(text: str) -> list[str]:
    return list(wrap(clean(text), PANEL - LABEL - 32, 6.9))


def draw(parts: Sequence[Part], name: str, ends: Sequence[str], output: str, say: Say) -> str:
    """Return the diagram of parts as SVG.

    ends: names of the inputs: one, or those of two columns, empty for a column without an input.
    output: name of what comes out.
    """
    drawing, (width, _) = Drawing(say), _measure_all(parts)
    axis, top = 20 + width / 2, 100.0
    first, last = parts[0], parts[-1]
    places = axes(first, axis) if isinstance(first, Columns) else (axis,)
    for place, end in zip(places, ends, strict=True):
        if end:
            drawing.text(place, top - 28, end, "small")
            drawing.arrow(place, top - 22, top)
    bottom = drawing.draw_all(parts, axis, top)
    if isinstance(last, Columns) and not last.attends:
        bottom += GAP
        drawing.join(axis, bottom)
    leaves = axes(last, axis)[1] if isinstance(last, Columns) and last.attends else axis
    drawing.arrow(leaves, bottom, bottom + GAP)
    drawing.text(leaves, bottom + GAP + 16, output, "small")
    height = max(bottom + GAP + 32, drawing.tallest_panel())
    panel_x = 20 + width + 28
    whole_width = panel_x + PANEL + 20
    about = clean(say("about", name=name, count=total(parts)))
    head = Drawing(say)
    head.text(20, 32, about, "name", whole_width - 40, "start")
    head.text(20, 52, say("hint"), "small", None, "start")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" id="top" viewBox="0 0 {whole_width:g} {height:g}" '
        f'width="{whole_width:g}" height="{height:g}" role="img" aria-label="{escape(about, quote=True)}">',
        f"<style>{static('diagram.css')}</style>",
        f'<rect width="{whole_width:g}" height="{height:g}" fill="var(--paper)"/>',
        *head.elements, *drawing.elements, *drawing.panels(panel_x, height), "</svg>", "",
    ])  # fmt: skip


def measure(part: Part) -> tuple[float, float]:
    """Return the width and height of a part."""
    if isinstance(part, Box):
        return WIDTH, 12 + LINE * (1 + len(part.lines))
    if isinstance(part, Frame):
        width, height = _measure_all(part.parts)
        return max(width, WIDTH - 2 * PAD) + 2 * PAD, _top(part) + height + PAD
    if isinstance(part, Branch):
        width, height = _measure_all(part.parts)
        return width + 2 * SKIP, height + 2 * GAP + 16
    (left, left_height), (right, right_height) = (_measure_all(each) for each in (part.left, part.right))
    return left + BETWEEN + right, max(left_height + (20 if part.attends else 0), right_height)


def axes(columns: Columns, x: float) -> tuple[float, float]:
    """Return the middles of two columns around x."""
    left, right = _measure_all(columns.left)[0], _measure_all(columns.right)[0]
    return x - (right + BETWEEN) / 2, x + (left + BETWEEN) / 2


def _measure_all(parts: Sequence[Part]) -> tuple[float, float]:
    sizes = [measure(part) for part in parts]
    return max((width for width, _ in sizes), default=0), sum(height for _, height in sizes) + GAP * (len(sizes) - 1)


def _top(frame: Frame) -> float:
    """Return the height of the title of a frame, with room for the arrow into its first part."""
    return 2 * LINE + 20


def _is_aside(part: Part) -> bool:
    return isinstance(part, Box) and part.aside


def clean(text: str) -> str:
    """Return text that XML can hold, on one line."""
    return printable(text)


def text_width(text: str, per_letter: float = 6.6) -> float:
    """Return about how wide a text is; wide letters, such as Chinese ones, count twice."""
    return sum(per_letter * (1.8 if unicodedata.east_asian_width(letter) in "WF" else 1) for letter in text)


def shorten(text: str, width: float | None) -> str:
    """Return the text, or its start and an ellipsis if it is too wide.

    >>> from regard.view.diagrams.drawing import shorten
    >>> shorten("causal() & window(127, 0)", 60)
    'causal()…'
    """
    if width is None or text_width(text) <= width:
        return text
    while text and text_width(text + "…") > width:
        text = text[:-1]
    return text + "…"


def wrap(text: str, width: float, per_letter: float) -> Iterator[str]:
    """Yield lines of a text, broken after a space or a comma where one is near.

    >>> from regard.view.diagrams.drawing import wrap
    >>> list(wrap("Attention(mask=causal(), bias=t5)", 180, 7))
    ['Attention(mask=causal(), ', 'bias=t5)']
    """
    while text_width(text, per_letter) > width:
        end = len(text)
        while text_width(text[:end], per_letter) > width:
            end -= 1
        space = max(text.rfind(letter, 0, end) for letter in " ,")
        cut = space + 1 if space > end // 2 else end
        yield text[:cut]
        text = text[cut:]
    yield text
