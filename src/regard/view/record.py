"""The record of a capture: the attentions of a model, their tokens, and methods to inspect and display them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.arguments import Index
from regard.engines.inspection import Statistics
from regard.files import check_writable, write_text_atomically
from regard.view.captured_attention import CapturedAttention, Kind, Window

if TYPE_CHECKING:
    from regard.view.changes import Change
    from regard.view.document import Document
    from regard.view.heads import HeadPattern
    from regard.view.model_call import ModelCall
    from regard.view.model_output import ModelOutput
    from regard.view.weight_steps import WeightSteps

NOTHING = (
    "nothing was captured: the model computed no attention with regard inside the block. Load a Transformers model "
    'with attn_implementation="regard"; convert other models with regard.integrations.torch.replace(model)'
)

GENERATED, BOTH = "generated", "target → generated"  # streams that label the queries of a decoder


@dataclass(frozen=True)
class Stream:
    """The texts of a sequence of tokens, and the indices of special tokens."""

    tokens: tuple[str, ...]
    special: tuple[int, ...] = ()


def _visible(token: str) -> str:
    """Strip a token, or return a visible sign for one that is only space."""
    return token.strip() or "␣" * len(token)


class Record:
    """The attentions recorded by `capture`, in the order in which the model computed them.

    title: name of the model. text, note: its input and its output, for display. image, spectrogram: the picture that
    the tokens are parts of, or None.

    Rows of decoder cross-attention are labelled with the generated token, rows of decoder self-attention with the input
    and the generated token, as in "nous → aider".

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
        self.uncaptured: tuple[str, ...] = ()  # modules that mix tokens, ran, and are not in the record
        self.image: dict[str, Any] | None = None
        self.spectrogram: dict[str, Any] | None = None
        self.inputs: dict[str, Tensor] = {}  # of the last call of the whole model
        self.next_token: int | None = None  # most likely token after these inputs
        self.call: ModelCall | None = None  # the captured call of the whole model, if it can be run again
        self.output: ModelOutput | None = None  # of that call
        self.changes: tuple[Change, ...] = ()  # of the attention of the model, by `ablate`
        self.tokenizer: Any = None  # the one that `decode` was given
        self.row = 0  # the batch row that is shown
        self.prompt = 0  # tokens that were given, before those of `generate`
        self.score: float | None = None  # mean log-probability of the tokens of `generate`
        self._tokens: dict[str, Stream] = {}

    def __repr__(self) -> str:
        return f"<Record of {self.title}: {len(self.attentions)} attentions>"

    def __len__(self) -> int:
        return len(self.attentions)

    # Attentions

    def attention(self, layer: int | str, kind: Kind | None = None) -> CapturedAttention:
        """Return the attention of a layer, given by index, module name or id; `kind` selects one of several."""
        if not self.attentions:
            raise ValueError(NOTHING)
        if isinstance(layer, str):
            for number, captured in enumerate(self.attentions):
                if layer in (captured.name, str(number)) and kind in (None, captured.kind):
                    return captured
        result = [captured for captured in self.attentions if captured.layer == layer and kind in (None, captured.kind)]
        if len(result) == 1:
            return result[0]
        if result:
            kinds = ", ".join(sorted({captured.kind for captured in result}))
            raise ValueError(f"layer {layer} has several attentions; choose one with kind=, one of {kinds}")
        available = ", ".join(f"{captured.kind} {captured.layer}" for captured in self.attentions)
        raise ValueError(f"layer {layer!r} has no {kind or 'attention'}; the record has {available}")

    def displayed_heads(self, captured: CapturedAttention) -> list[int]:
        """Return the heads of an attention that pages and pictures show."""
        return [head for head in self.heads or range(captured.heads) if head < captured.heads]

    # Tokens

    def stream_names(self, captured: CapturedAttention) -> tuple[str, str]:
        """Return the names of the streams of an attention's queries and keys.

        A stream is "source" or "target"; one of another length has it in its name, such as "source 12".
        """
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
        """Lengths of source and target, from the first attention that has them."""
        result: dict[str, int] = {}
        two = any(captured.kind == "cross" for captured in self.attentions)
        for captured in self.attentions:
            if captured.kind != "cross":
                result.setdefault("target" if captured.kind == "decoder" and two else "source", captured.K)
        for captured in self.attentions:
            if captured.kind == "cross":
                result.setdefault("target", captured.Q)
                result.setdefault("source", captured.K)
        return result

    @property
    def streams(self) -> dict[str, Stream]:
        """The tokens of each stream; tokens without texts are numbered."""
        result: dict[str, Stream] = {}
        for captured in self.attentions:
            for name, length in zip(self.stream_names(captured), (captured.Q, captured.K), strict=True):
                if name not in result:
                    result[name] = self._tokens.get(name) or Stream(tuple(map(str, range(length))))
        if BOTH in result:
            target, generated = result["target"], self._tokens[GENERATED]
            pairs = zip(target.tokens, generated.tokens, strict=True)
            result[BOTH] = Stream(
                tuple(f"{_visible(token)} → {_visible(following)}" for token, following in pairs), target.special
            )
        return result

    def set_tokens(
        self,
        source: Sequence[str] | None = None,
        target: Sequence[str] | None = None,
        *,
        special: Sequence[str] = (),
        generated: Sequence[str] | None = None,
        **others: Sequence[str],
    ) -> Record:
        """Set the texts of the tokens, and return the record.

        target: input tokens of a decoder. special: texts of special tokens, such as "[CLS]". generated: the token
        generated at each position of the target; by default the next input token, and "?" at the last position. An
        empty list labels the rows with the input tokens.
        """
        streams = self.streams
        decodes = any(
            captured.kind == "decoder" and self.stream_names(captured)[1] == "target" for captured in self.attentions
        )
        if generated is None and target is not None and decodes:
            generated = [*target[1:], "?"]
        if target is not None:
            self._tokens.pop(GENERATED, None)
        if generated:
            streams[GENERATED] = streams.get("target", Stream(()))
        given = {"source": source, "target": target, GENERATED: generated or None} | others
        for name, tokens in given.items():
            if tokens is None:
                continue
            if name not in streams:
                raise ValueError(f"there is no stream {name!r}; the streams are {', '.join(streams) or 'none'}")
            if len(tokens) != len(streams[name].tokens):
                raise ValueError(f"{name} must have {len(streams[name].tokens)} tokens, but has {len(tokens)}")
            texts = tuple(map(str, tokens))
            self._tokens[name] = Stream(texts, tuple(n for n, text in enumerate(texts) if text in special))
        for name in ("head_patterns", "document"):  # cached for the previous tokens
            self.__dict__.pop(name, None)
        return self

    def decode(self, tokenizer: Any) -> Record:
        """Set the texts of the tokens from the ids that the model received, and return the record.

        tokenizer: one of the `tokenizers` or the Transformers library.
        """
        from regard.view.inputs import token_texts

        self.tokenizer = tokenizer
        streams = self.streams
        for name, ids in {**self._embedded, **self.inputs}.items():
            if ids.dim() == 1 and name in streams and len(ids) != len(streams[name].tokens):
                ids = self._embedded.get(name, ids)  # with a cache, the last call received only the newest ids
            if ids.dim() == 1 and name in streams and len(ids) == len(streams[name].tokens):
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
        """Ids of source and target that the model embedded during the capture."""
        result: dict[str, Tensor] = {}
        for captured in self.attentions:
            ids, queries = captured.ids, self.stream_names(captured)[0]
            if ids is not None:
                result.setdefault("target" if queries in (GENERATED, BOTH) else queries, ids[captured.row])
        return result

    def set_image(
        self, image: str | Tensor, grid: tuple[int, int], *, first: int = 0, stream: str = "source"
    ) -> Record:
        """Declare that the tokens of a stream are patches of an image, and return the record.

        image: pixels (C, h, w) or a URL. grid: (rows, columns); token `first + row * columns + column` is a patch.
        """
        from regard.view.inputs import png_url

        length, (rows, columns) = len(self.streams[stream].tokens), grid
        if first + rows * columns > length:
            raise ValueError(
                f"a grid of {rows} x {columns} patches after {first} tokens needs {first + rows * columns} tokens, "
                f"but {stream} has {length}"
            )
        before = ["[CLS]"] if first == 1 else [f"[{n}]" for n in range(first)]
        patches = [f"{r},{c}" for r in range(rows) for c in range(columns)]
        after = [f"[{n}]" for n in range(first + rows * columns, length)]
        self.set_tokens(**{stream: [*before, *patches, *after]}, special=(*before, *after), generated=[])
        href = image if isinstance(image, str) else png_url(image)
        self.image = {"stream": stream, "href": href, "grid": [rows, columns], "first": first}
        return self

    def set_spectrogram(self, values: Tensor, seconds: float, *, stream: str = "source") -> Record:
        """Declare that the tokens of a stream are equal time slots of a spectrogram, and return the record.

        values: (time, frequencies). seconds: duration.
        """
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
        batch: int | None = None,
    ) -> Tensor:
        """Return the weights (rows, columns) of a head, or (H, rows, columns) of all heads of a layer.

        Only the selected rows are computed. batch: a batch row, by default the one that is shown, the first.
        """
        captured = self.attention(layer, kind)
        weights = captured.weights(heads=None if head is None else [head], rows=rows, columns=columns, batch=batch)
        return weights if head is None else weights[0]

    def window(
        self,
        attention: int | str,
        head: int,
        rows: tuple[int, int],
        columns: tuple[int, int],
        size: tuple[int, int] = (512, 512),
        kind: Kind | None = None,
        *,
        scaled: bool = False,
    ) -> Window:
        """Return the weights of a window, pooled to means where it is larger than `size`.

        rows, columns: (start, stop). `Window.rows` and `Window.columns` are the ranges that each cell averages.
        scaled: multiply each weight by the length of the value of its key.
        """
        return self.attention(attention, kind).window(head, rows, columns, size, scaled=scaled)

    def explain_weight(
        self, layer: int | str, head: int, query: int, key: int, kind: Kind | None = None
    ) -> WeightSteps:
        """Return how one weight comes about: product, scale, bias, mask, softmax, and contribution to the output.

        >>> import regard as rg, regard.view, torch
        >>> model = rg.models.TextEncoder(rg.models.TextConfig(100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
        >>> with rg.view.capture(model) as record:
        ...     hidden = model(torch.tensor([[5, 6, 7]]))
        >>> steps = record.explain_weight(1, head=0, query=2, key=1)
        >>> steps.weight == record.weights(1, head=0)[2, 1].item()
        True
        """
        from regard.view.weight_steps import weight_steps

        return weight_steps(self.attention(layer, kind), head, query, key)

    # Experiments

    def select(self, row: int) -> Record:
        """Return the record with another batch row shown; `decode` or `set_tokens` names its tokens."""
        from regard.view.experiments import select_row

        return select_row(self, row)

    def ablate(
        self,
        *changes: Change,
        tokens: Mapping[int, int | str] | None = None,
        target_tokens: Mapping[int, int | str] | None = None,
    ) -> Record:
        """Run the captured call again with changed attention or other tokens, and return its record.

        tokens: replacements of source tokens by position: a token id, or the text of one token (after `decode`).
        target_tokens: the same for the input of a decoder.

        >>> import regard as rg, regard.view, torch
        >>> model = rg.models.TextEncoder(rg.models.TextConfig(100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
        >>> with rg.view.capture(model) as record:
        ...     hidden = model(torch.tensor([[5, 6, 7]]))
        >>> changed = record.ablate(rg.view.Change(layer=1, head=0, forbid=[(2, 1)]), tokens={0: 9})
        >>> changed.weights(1, head=0)[2, 1].item()
        0.0
        """
        from regard.view.experiments import ablate_record

        return ablate_record(self, changes, {"source": tokens or {}, "target": target_tokens or {}})

    @property
    def generates(self) -> bool:
        """Whether `generate` can be called."""
        from regard.view.experiments import can_generate

        return can_generate(self)

    def generate(self, max_new_tokens: int = 16, beams: int = 1) -> list[Record]:
        """Continue the tokens of a language model, or generate the target of a translator, under the same changes.

        Return a record of one forward pass over the tokens of each beam, best first; `Record.score` is its mean
        log-probability per token. Rows from `Record.prompt - 1` on are the steps of the generation. Runs the whole
        model in every step, so that any change applies exactly; meant for short texts.
        """
        from regard.view.experiments import generate_records

        return generate_records(self, max_new_tokens, beams)

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics of the queries of every attention, (B, H, Q), by module name; cached."""
        return {captured.name: captured.statistics for captured in self.attentions}

    @cached_property
    def head_patterns(self) -> list[HeadPattern]:
        """Heads that follow a known pattern, over all attentions; see `regard.view.heads`."""
        from regard.view.heads import find_patterns

        return [each for number in range(len(self.attentions)) for each in find_patterns(self, number)]

    def rollout(self, kind: Kind | None = None, size: int = 512) -> Tensor:
        """Return attention rolled out through all layers, (n, n); see `regard.view.rollout.rollout`."""
        from regard.view.rollout import rollout

        return rollout(self, kind, size)[-1]

    # Pages

    @cached_property
    def document(self) -> Document:
        """The contents of a page as plain data; cached."""
        from regard.view.document import document

        return document(self)

    def html(self, lang: str = "en") -> str:
        """Return a self-contained HTML page."""
        from regard.view.page import page

        return page(self.document, lang)

    def save(self, path: str | Path, lang: str = "en") -> Path:
        """Write the page to an .html file atomically, and return its path."""
        check_writable(Path(path), suffixes=[".html"])
        return write_text_atomically(Path(path), self.html(lang))

    def precompute(self) -> Record:
        """Compute the maps of long sequences now, so that no window has to wait for them; return the record."""
        for captured in self.attentions:
            captured.precompute()
        return self

    def show(self, lang: str = "en", *, against: Record | None = None) -> Any:
        """Return the viewer as a notebook widget, which can load every exact weight and run experiments.

        against: a record of another text or model, to compare with.
        """
        from regard.view.widget import Viewer

        return Viewer(self.precompute(), lang, None if against is None else against.precompute())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **more: Any) -> dict[str, str]:
        import html

        if not self.attentions:
            return {"text/plain": repr(self)}
        page = html.escape(self.html(), quote=True)
        frame = f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0" sandbox="allow-scripts"></iframe>'
        return {"text/plain": repr(self), "text/html": frame}
