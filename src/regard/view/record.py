"""What a capture saw: the attentions of a model, the tokens between which they are, and what one asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.arguments import Index
from regard.engines.inspection import Statistics
from regard.files import write_text_atomically
from regard.view.captured_attention import CapturedAttention, Kind, Window

if TYPE_CHECKING:
    from regard.view.document import Document
    from regard.view.heads import HeadPattern

NOTHING = (
    "nothing was captured: the model computed no attention by regard inside the block. A model of Transformers needs "
    'attn_implementation="regard", others regard.integrations.torch.replace(model)'
)

GENERATED, BOTH = "generated", "target → generated"  # streams of the rows of a decoder


@dataclass(frozen=True)
class Stream:
    """Tokens as they are, and which of them are special."""

    tokens: tuple[str, ...]
    special: tuple[int, ...] = ()


def _visible(token: str) -> str:
    """A token without the space in front of it, or a sign for one that is only space."""
    return token.strip() or "␣" * len(token)


class Record:
    """The attentions that `capture` saw, in the order in which the model computed them.

    title, text, note: what it is, what the model read, and what it said. image, spectrogram: what the tokens are parts
    of, if they are.

    The rows of a decoder are named by the word that is generated there: its cross-attention by that word, its own
    attention by both, as in "nous → aider", where "nous" is the input.

    >>> import regard as rg, regard.view, torch
    >>> model = rg.models.TextEncoder(rg.models.TextConfig(100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> with rg.view.capture(model) as record:
    ...     hidden = model(torch.tensor([[5, 6, 7]]))
    >>> record.set_tokens(["The", " cat", " sat"]).streams
    {'source': Stream(tokens=('The', ' cat', ' sat'), special=())}
    """

    def __init__(self, title: str = "", *, heads: Sequence[int] | None = None) -> None:
        self.title, self.text, self.note = title, "", ""
        self.attentions: list[CapturedAttention] = []
        self.heads = None if heads is None else tuple(heads)
        self.image: dict[str, Any] | None = None
        self.spectrogram: dict[str, Any] | None = None
        self.inputs: dict[str, Tensor] = {}  # of the last call of the whole model
        self.next_token: int | None = None  # the likeliest behind them
        self._tokens: dict[str, Stream] = {}

    def __repr__(self) -> str:
        return f"<Record of {self.title}: {len(self.attentions)} attentions>"

    def __len__(self) -> int:
        return len(self.attentions)

    # Which attention

    def attention(self, layer: int | str, kind: Kind | None = None) -> CapturedAttention:
        """An attention by the number of its layer, and its kind where there are several; or by its name or id."""
        if not self.attentions:
            raise ValueError(NOTHING)
        if isinstance(layer, str):
            for number, captured in enumerate(self.attentions):
                if layer in (captured.name, str(number)) and kind in (None, captured.kind):
                    return captured
        found = [captured for captured in self.attentions if captured.layer == layer and kind in (None, captured.kind)]
        if len(found) == 1:
            return found[0]
        if found:
            kinds = ", ".join(sorted({captured.kind for captured in found}))
            raise ValueError(f"layer {layer} has several attentions; say which with kind=, one of {kinds}")
        there = ", ".join(f"{captured.kind} {captured.layer}" for captured in self.attentions)
        raise ValueError(f"there is no {kind or 'attention'} of layer {layer!r}; captured were {there}")

    def displayed_heads(self, captured: CapturedAttention) -> list[int]:
        """The heads that pages and pictures show."""
        return [head for head in self.heads or range(captured.heads) if head < captured.heads]

    # Tokens

    def stream_names(self, captured: CapturedAttention) -> tuple[str, str]:
        """The streams of an attention's queries and keys: source and target, and others of other lengths."""
        two = any(each.kind == "cross" for each in self.attentions)
        own = "target" if captured.kind == "cross" or (captured.kind == "decoder" and two) else "source"
        keys = "source" if captured.kind == "cross" else own
        queries = self._stream(own, captured.Q)
        if queries == "target" and GENERATED in self._tokens:
            queries = GENERATED if captured.kind == "cross" else BOTH
        return queries, self._stream(keys, captured.K)

    def _stream(self, role: str, length: int) -> str:
        return role if self._lengths.get(role, length) == length else f"{role} {length}"

    @property
    def _lengths(self) -> dict[str, int]:
        """How many tokens source and target have: as many as the first attention between them says."""
        found: dict[str, int] = {}
        two = any(captured.kind == "cross" for captured in self.attentions)
        for captured in self.attentions:
            if captured.kind != "cross":
                found.setdefault("target" if captured.kind == "decoder" and two else "source", captured.K)
        for captured in self.attentions:
            if captured.kind == "cross":
                found.setdefault("target", captured.Q)
                found.setdefault("source", captured.K)
        return found

    @property
    def streams(self) -> dict[str, Stream]:
        """The tokens by stream; those that were not told are numbered."""
        found: dict[str, Stream] = {}
        for captured in self.attentions:
            for name, length in zip(self.stream_names(captured), (captured.Q, captured.K), strict=True):
                if name not in found:
                    found[name] = self._tokens.get(name) or Stream(tuple(map(str, range(length))))
        if BOTH in found:
            target, generated = found["target"], self._tokens[GENERATED]
            pairs = zip(target.tokens, generated.tokens, strict=True)
            found[BOTH] = Stream(
                tuple(f"{_visible(given)} → {_visible(made)}" for given, made in pairs), target.special
            )
        return found

    def set_tokens(
        self,
        source: Sequence[str] | None = None,
        target: Sequence[str] | None = None,
        *,
        special: Sequence[str] = (),
        generated: Sequence[str] | None = None,
        **others: Sequence[str],
    ) -> Record:
        """Name the tokens; the same record comes back. `special` are texts of tokens that are no words.

        target: the inputs of a decoder. generated: what it generates at each of them; unless given, the input that
        comes next, and "?" for the last. An empty list keeps the names of the inputs.
        """
        there = self.streams
        decodes = any(
            captured.kind == "decoder" and self.stream_names(captured)[1] == "target" for captured in self.attentions
        )
        if generated is None and target is not None and decodes:
            generated = [*target[1:], "?"]
        if target is not None:
            self._tokens.pop(GENERATED, None)
        if generated:
            there[GENERATED] = there.get("target", Stream(()))
        given = {"source": source, "target": target, GENERATED: generated or None} | others
        for name, tokens in given.items():
            if tokens is None:
                continue
            if name not in there:
                raise ValueError(f"there is no stream {name!r}; the streams are {', '.join(there) or 'none'}")
            if len(tokens) != len(there[name].tokens):
                raise ValueError(f"{name} has {len(there[name].tokens)} tokens, but {len(tokens)} came")
            texts = tuple(map(str, tokens))
            self._tokens[name] = Stream(texts, tuple(n for n, text in enumerate(texts) if text in special))
        for made in ("head_patterns", "document"):  # of the tokens before
            self.__dict__.pop(made, None)
        return self

    def decode(self, tokenizer: Any) -> Record:
        """Tell what the tokens are by the ids that the model was given, with one of `tokenizers` or Transformers."""
        from regard.view.inputs import token_texts

        there = self.streams
        for name, ids in {**self._embedded, **self.inputs}.items():
            if ids.dim() == 1 and name in there and len(ids) != len(there[name].tokens):
                ids = self._embedded.get(name, ids)  # the model was given the rest before
            if ids.dim() == 1 and name in there and len(ids) == len(there[name].tokens):
                texts, special = token_texts(tokenizer, ids.tolist())
                self.set_tokens(**{name: texts})
                self._tokens[name] = Stream(tuple(texts), tuple(special))
                if name == "target" and GENERATED in self._tokens:
                    after = ids.tolist()[1:] + ([] if self.next_token is None else [self.next_token])
                    texts, special = token_texts(tokenizer, after)
                    self._tokens[GENERATED] = Stream((*texts, "?")[: len(ids)], tuple(special))
        return self

    @property
    def _embedded(self) -> dict[str, Tensor]:
        """The tokens of source and target, as the model embedded them while it was captured."""
        found: dict[str, Tensor] = {}
        for captured in self.attentions:
            ids, queries = captured.ids, self.stream_names(captured)[0]
            if ids is not None:
                found.setdefault("target" if queries in (GENERATED, BOTH) else queries, ids[0])
        return found

    def set_image(
        self, image: str | Tensor, grid: tuple[int, int], *, first: int = 0, stream: str = "source"
    ) -> Record:
        """Tell that token `first + row * columns + column` is a patch of an image: pixels (C, h, w), or its address."""
        from regard.view.inputs import png_url

        length, (rows, columns) = len(self.streams[stream].tokens), grid
        if first + rows * columns > length:
            raise ValueError(f"a grid of {rows} x {columns} patches after {first} tokens needs more than the {length}")
        before = ["[CLS]"] if first == 1 else [f"[{n}]" for n in range(first)]
        patches = [f"{r},{c}" for r in range(rows) for c in range(columns)]
        after = [f"[{n}]" for n in range(first + rows * columns, length)]
        self.set_tokens(**{stream: [*before, *patches, *after]}, special=(*before, *after), generated=[])
        href = image if isinstance(image, str) else png_url(image)
        self.image = {"stream": stream, "href": href, "grid": [rows, columns], "first": first}
        return self

    def set_spectrogram(self, values: Tensor, seconds: float, *, stream: str = "source") -> Record:
        """Tell that the tokens are equal slots of time of a spectrogram, values (time, frequencies)."""
        from regard.view.inputs import png_url

        frames = len(self.streams[stream].tokens)
        self.set_tokens(**{stream: [f"{(n + 0.5) * seconds / frames:.2f} s" for n in range(frames)]}, generated=[])
        href = png_url(values.mT.flip(0))
        self.spectrogram = {"stream": stream, "href": href, "frames": frames, "seconds": float(seconds)}
        return self

    # Numbers

    def weights(
        self,
        layer: int | str,
        head: int | None = None,
        *,
        rows: Index = None,
        columns: Index = None,
        kind: Kind | None = None,
        batch: int = 0,
    ) -> Tensor:
        """The weights of a layer, (rows, columns) of a head, or (H, rows, columns) of all; a part costs its rows."""
        captured = self.attention(layer, kind)
        found = captured.weights(heads=None if head is None else [head], rows=rows, columns=columns, batch=batch)
        return found if head is None else found[0]

    def window(
        self,
        attention: int | str,
        head: int,
        rows: tuple[int, int],
        columns: tuple[int, int],
        size: tuple[int, int] = (512, 512),
        kind: Kind | None = None,
    ) -> Window:
        """The weights of a window, rows and columns from and to; where it is larger than `size`, the means of cells.
        `Window.rows` and `columns` say which weights a cell is the mean of."""
        return self.attention(attention, kind).window(head, rows, columns, size)

    @property
    def statistics(self) -> dict[str, Statistics]:
        """What the rows of every attention are like, by name: (B, H, Q), worked out once."""
        return {captured.name: captured.statistics for captured in self.attentions}

    @cached_property
    def head_patterns(self) -> list[HeadPattern]:
        """Heads whose habit has a name, over all attentions."""
        from regard.view.heads import find_patterns

        return [each for number in range(len(self.attentions)) for each in find_patterns(self, number)]

    def rollout(self, kind: Kind | None = None, size: int = 512) -> Tensor:
        """Attention through all layers, (n, n): see `regard.view.rollout.rollout`."""
        from regard.view.rollout import rollout

        return rollout(self, kind, size)[-1]

    # Pages

    @cached_property
    def document(self) -> Document:
        """All that a page shows, as data; worked out once."""
        from regard.view.document import document

        return document(self)

    def html(self, lang: str = "en") -> str:
        """A page that needs nothing but a browser."""
        from regard.view.page import page

        return page(self.document, lang)

    def save(self, path: str | Path, lang: str = "en") -> Path:
        """Write the page; it is there whole or not at all."""
        return write_text_atomically(Path(path), self.html(lang))

    def precompute(self) -> Record:
        """Make now what windows of long sequences are read from, so that none of them waits."""
        for captured in self.attentions:
            captured.precompute()
        return self

    def show(self, lang: str = "en") -> Any:
        """The viewer in a notebook, with every weight within reach."""
        from regard.view.widget import Viewer

        return Viewer(self.precompute(), lang)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **more: Any) -> dict[str, str]:
        import html

        if not self.attentions:
            return {"text/plain": repr(self)}
        page = html.escape(self.html(), quote=True)
        frame = f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0" sandbox="allow-scripts"></iframe>'
        return {"text/plain": repr(self), "text/html": frame}
