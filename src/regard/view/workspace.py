"""The records that a live viewer shows, and its requests about them; the server and the notebook widget use it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from regard.view.captured_attention import Window
from regard.view.changes import Change
from regard.view.document import Document, document, summary
from regard.view.experiments import rerun
from regard.view.inputs import token_texts
from regard.view.record import Record

SIDE = 4096  # most rows and columns of a window
CELLS = 1 << 22  # most cells of a window
LIVE = 3_000_000  # bytes of a document; the page requests further weights as windows
MAX_RECORDS = 4  # recent texts to keep, since other tabs may still show them
MAX_DERIVED = 16  # recent results of experiments to keep
MAX_BYTES = 2 << 30  # of texts, and of results, to keep; the last two are kept however large they are
MAX_CHANGES = 256
TOP = 8  # most likely tokens of each of two outputs
WINDOW = "expected {record, attention, head, rows: [start, stop], columns: [start, stop], size: [rows, columns]}"
EXPERIMENT = "expected {record, changes: [...], tokens: {source: {position: token}, target: {position: token}}}"


class RequestError(Exception):
    """A refused request: an HTTP status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, eq=False)
class HeldRecord:
    """A record, its id, the text that it belongs to, and the changes that are not of an experiment."""

    id: str
    text: str
    record: Record
    original: tuple[Change, ...]

    def document(self) -> Document:
        """The document that a live page shows."""
        contents = document(self.record, LIVE)
        return replace(contents, about=contents.about | {"text": self.text, "record": self.id})

    def summary(self) -> dict[str, Any]:
        """The document without numbers."""
        return summary(self.record) | {"text": self.text, "record": self.id}


class Workspace:
    """Records by id. `answer` answers the requests that need no text to be captured."""

    def __init__(self) -> None:
        self.records: dict[str, HeldRecord] = {}  # of texts
        self.derived: dict[str, HeldRecord] = {}  # of experiments; they never displace a text
        self.lock = threading.Lock()

    def add(
        self, record: Record, text: str, *, derived: bool = False, original: tuple[Change, ...] | None = None
    ) -> HeldRecord:
        """Hold a record under a new id; those that were not used for the longest time are dropped."""
        held = HeldRecord(secrets.token_hex(8), text, record, record.changes if original is None else original)
        records, most = (self.derived, MAX_DERIVED) if derived else (self.records, MAX_RECORDS)
        with self.lock:
            records[held.id] = held
            while len(records) > most or (len(records) > 2 and sum(map(_nbytes, records.values())) > MAX_BYTES):
                del records[next(iter(records))]
        return held

    def find(self, name: Any) -> HeldRecord:
        """Return the record with an id."""
        with self.lock:
            for records in (self.records, self.derived):
                if isinstance(name, str) and name in records:
                    records[name] = held = records.pop(name)  # now the last one to be dropped
                    return held
        raise RequestError(410, "the server no longer holds this text; send it again")

    def answer(self, kind: str, body: Mapping[str, Any]) -> Any:
        """Answer a request with plain data. kind: one of `REQUESTS`."""
        return REQUESTS[kind](self, body)

    def window(self, body: Mapping[str, Any]) -> Window:
        """Return the weights of a window."""
        try:
            name, head = str(body["attention"]), _whole(body["head"])
            rows, columns, size = ((_whole(edge) for edge in body[part]) for part in ("rows", "columns", "size"))
            (top, bottom), (left, right), (tall, wide) = rows, columns, size
            scaled = body.get("scaled", False)
            if not isinstance(scaled, bool):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise RequestError(422, WINDOW) from None
        if not 0 < tall <= SIDE or not 0 < wide <= SIDE or tall * wide > CELLS:
            raise RequestError(
                422, f"size must be 1 ... {SIDE} each way and at most {CELLS:,} cells, but is {tall} x {wide}"
            )
        record = self.find(body.get("record")).record
        return record.window(name, head, (top, bottom), (left, right), (tall, wide), scaled=scaled)

    def experiment(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Run the captured call of a record with changes and other tokens; return the summary of the result."""
        held, given = self.find(body.get("record")), body.get("changes", [])
        tokens = body.get("tokens", {})
        if not isinstance(given, list) or not isinstance(tokens, dict) or len(given) > MAX_CHANGES:
            raise RequestError(422, EXPERIMENT)
        changes = [read_change(each) for each in given]
        edits = {role: _read_edits(tokens.get(role, {})) for role in ("source", "target")}
        if set(tokens) - set(edits):
            raise RequestError(422, EXPERIMENT)
        changed = held.record.ablate(*changes, tokens=edits["source"], target_tokens=edits["target"])
        return self.add(changed.precompute(), held.text, derived=True, original=held.original).summary()

    def why(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the steps that lead to one weight."""
        try:
            name, head, query, key = str(body["attention"]), *(_whole(body[part]) for part in ("head", "query", "key"))
        except (KeyError, TypeError):
            raise RequestError(422, "expected {record, attention, head, query, key}") from None
        return self.find(body.get("record")).record.explain_weight(name, head, query, key).to_json()

    def prediction(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a record predicts at a position, and `against`, another record, at the same one.

        Without a position, each predicts at its last one.
        """
        record = self.find(body.get("record")).record
        other = self.find(body["against"]).record if body.get("against") is not None else None
        output, theirs = record.output, None if other is None else other.output
        if output is None or (other is not None and (theirs is None or theirs.kind != output.kind)):
            return {"kind": None, "entries": []}
        if output.kind == "vectors":
            same = theirs is not None and theirs.values.shape == output.values.shape
            similarity = output.similarity(theirs, record.row) if same and theirs is not None else None
            return {"kind": "vectors", "entries": [], "similarity": similarity}
        given = body.get("position")
        try:
            position = output.last if given is None else _whole(given)
        except TypeError:
            raise RequestError(422, "position must be a whole number") from None
        position = max(output.first, min(output.last, position)) if output.kind == "classes" else position
        ours = output.probabilities(position, record.row)
        chosen = [index for index, _ in output.top(position, record.row, TOP)]
        against, place = None, None
        if other is not None and theirs is not None:
            place = theirs.last if given is None else position
            place = min(place, theirs.last) if output.kind == "classes" else place
            if theirs.first <= place <= theirs.last and theirs.values.shape[-1] == output.values.shape[-1]:
                against = theirs.probabilities(place, other.row)
                extra = [index for index, _ in theirs.top(place, other.row, TOP)]
                chosen += [index for index in extra if index not in chosen]
        return {
            "kind": output.kind, "position": position, "first": output.first, "last": output.last,
            "against_position": None if against is None else place,
            "entries": [
                {
                    "index": index, "text": label(record, index), "probability": float(ours[index]),
                    "against": None if against is None else float(against[index]),
                }
                for index in chosen
            ],
        }  # fmt: skip

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Generate tokens under the changes of a record; return the beams, best first."""
        held = self.find(body.get("record"))
        try:
            count, beams = _whole(body["tokens"]), _whole(body["beams"])
        except (KeyError, TypeError):
            raise RequestError(422, "expected {record, tokens, beams}") from None
        if not 1 <= count <= 64 or not 1 <= beams <= 8:
            raise RequestError(422, f"tokens must be 1 ... 64 and beams 1 ... 8, but are {count} and {beams}")
        generated = held.record.generate(count, beams)
        kept = [self.add(record.precompute(), held.text, derived=True, original=held.original) for record in generated]
        return {"beams": [{"record": each.id, "text": each.record.note, "score": each.record.score} for each in kept]}

    def open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document of a record without changes of experiments, or of another batch row of it."""
        held = self.find(body.get("record"))
        record = held.record
        if body.get("row") is not None:
            try:
                record = record.select(_whole(body["row"]))
            except TypeError:
                raise RequestError(422, "row must be a whole number") from None
        if record.changes != held.original:
            record = rerun(record, held.original)
        derived = held.id in self.derived
        return self.add(record.precompute(), held.text, derived=derived).document().json()


REQUESTS: dict[str, Callable[[Workspace, Mapping[str, Any]], Any]] = {
    "experiment": Workspace.experiment,
    "why": Workspace.why,
    "prediction": Workspace.prediction,
    "generate": Workspace.generate,
    "open": Workspace.open,
}
RUNS = ("experiment", "generate", "open")  # requests that run the model or compute maps: one at a time


def read_change(given: Any) -> Change:
    """Read a change as the page sends it: {attention, kind, heads, factor, temperature, forbid, force}."""
    names = {"attention": "layer", "heads": "head"} | {
        name: name for name in ("kind", "factor", "temperature", "forbid", "force")
    }
    if not isinstance(given, dict) or set(given) - set(names):
        raise RequestError(422, f"a change must be an object of {', '.join(names)}")
    attention = given.get("attention")
    if attention is not None and not isinstance(attention, str):
        raise RequestError(422, "the attention of a change must be an id")
    try:
        return Change(**{names[name]: value for name, value in given.items()})
    except (TypeError, ValueError) as error:
        raise RequestError(422, str(error)) from None


def _read_edits(given: Any) -> dict[int, int | str]:
    if not isinstance(given, dict) or len(given) > MAX_CHANGES:
        raise RequestError(422, EXPERIMENT)
    replacements: dict[int, int | str] = {}
    for position, token in given.items():
        if not (position.isascii() and position.isdigit() and len(position) < 10) or not isinstance(token, str):
            raise RequestError(422, EXPERIMENT)
        replacements[int(position)] = token
    return replacements


def label(record: Record, index: int) -> str:
    """Return the name of an entry of the output: the text of a token, or of a class."""
    output = record.output
    assert output is not None
    if output.kind == "classes":
        return output.labels[index] if output.labels else f"class {index}"
    return f"#{index}" if record.tokenizer is None else token_texts(record.tokenizer, [index])[0][0]


def _nbytes(held: HeldRecord) -> int:
    """Return the bytes of the tensors of a record."""
    output = held.record.output
    return sum(captured.nbytes for captured in held.record.attentions) + (0 if output is None else output.values.nbytes)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value
