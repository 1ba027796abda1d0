"""Language models: generation, chat templates and perplexity as in transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers

from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.predictors import PredictOptions, open_model
from regard.predictors.chat import ChatTemplate
from regard.predictors.language import LanguagePredictor
from tests.models.gguf_files import write_gguf
from tests.models.transformers_models import their_model
from tests.predictors.tiny_checkpoints import CHAT, save_checkpoint

TOKENS = {"chat_template": CHAT, "bos_token": "[CLS]", "eos_token": {"__type": "AddedToken", "content": "[SEP]"}}


def language(folder: Path, **options: object) -> LanguagePredictor:
    predictor = open_model(folder)
    assert isinstance(predictor, LanguagePredictor)
    predictor.configure(PredictOptions(**options))  # type: ignore[arg-type]
    return predictor


def test_a_text_is_continued_as_by_transformers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", pairs=False)
    predictor, theirs = language(tmp_path, max_new_tokens=9), their_model("llama")
    (prediction,) = predictor.predict([Row("here", ("the cat sat",))], BadRows())
    ids = torch.tensor([[5, 6, 7]])
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9)[0, 3:]
    assert prediction.more["tokens"] == expected.tolist()
    shares = theirs(torch.cat((ids[0], expected))[None]).logits[0, 2:-1].log_softmax(-1)
    score = shares.gather(1, expected[:, None]).mean().exp().item()
    assert prediction.score == pytest.approx(score, rel=1e-4)
    pieces: list[str] = []
    predictor.stream(Row("here", ("the cat sat",)), BadRows(), pieces.append)
    assert "".join(pieces).split() == prediction.output.split()


def test_stop_tokens_end_a_text(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", pairs=False)
    tokens = list(language(tmp_path, max_new_tokens=9).generate([5, 6, 7]))
    save_checkpoint(tmp_path, "llama", pairs=False, generation_config={"eos_token_id": [tokens[4], 98]})
    assert list(language(tmp_path, max_new_tokens=9).generate([5, 6, 7])) == tokens[: tokens.index(tokens[4])]


def test_sampling_follows_options_and_generation_config(tmp_path: Path) -> None:
    save_checkpoint(
        tmp_path, "llama", pairs=False, generation_config={"do_sample": True, "temperature": 5.0, "top_k": 0}
    )
    samples = {tuple(language(tmp_path, seed=seed, max_new_tokens=9).generate([5, 6, 7])) for seed in (1, 1, 2, 3)}
    assert len(samples) == 3
    greedy = list(language(tmp_path, temperature=0.0, max_new_tokens=9).generate([5, 6, 7]))
    assert list(language(tmp_path, top_p=1e-9, max_new_tokens=9).generate([5, 6, 7])) == greedy


def test_a_conversation_is_rendered_as_by_transformers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", pairs=False, tokenizer_config=TOKENS)
    predictor = language(tmp_path, system="is")
    assert predictor.chats
    messages = [
        *predictor.messages("a dog"),
        {"role": "assistant", "content": "ran"},
        {"role": "user", "content": "why"},
    ]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert predictor.form.chat is not None
    assert predictor.form.chat.render(messages) == expected
    assert predictor.form.tokenizer.decode(predictor.prompt(messages)) == "the is . a dog . ran . why . who"
    assert predictor.prompt(messages)[0] == 2
    assert not language(tmp_path, chat=False).chats


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "is not valid"),
        ("{{ messages.__class__.__mro__ }}", "fails .SecurityError"),
        ("{{ raise_exception('no\\nsystem') }}", "refuses this conversation: no"),
        ("{{ messages[9].content.x }}", "fails .UndefinedError"),
        ("{% for n in range(999999) %}{% endfor %}", "fails .OverflowError"),
    ],
)
def test_a_template_that_fails_is_one_line(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        ChatTemplate(template, {}, "model").render([{"role": "user", "content": "hi"}])
    assert "\n" not in str(raised.value)


def test_a_template_has_the_conventions_of_transformers() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}",
        {}, "model",
    )  # fmt: skip
    assert template.render([{"role": "user", "content": "<é>"}]) == '{"role": "user", "content": "<é>"}4True'


def test_perplexity_is_that_of_whole_windows(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", pairs=False)
    predictor, theirs = language(tmp_path), their_model("llama")
    text = "the cat sat on the mat . a dog ran to the red cat . " * 3
    ids = torch.tensor(predictor.form.encode(text))
    with torch.no_grad():
        shares = theirs(ids[None, :40]).logits[0, :-1].log_softmax(-1)
        loss = -shares.gather(1, ids[1:40, None]).sum()
        shares = theirs(ids[None, 20:]).logits[0, 19:-1].log_softmax(-1)
        loss -= shares.gather(1, ids[40:, None]).sum()
    (tmp_path / "book.txt").write_text(text)
    metrics = predictor.evaluate(predictor.read(str(tmp_path / "book.txt"), BadRows()), BadRows())
    assert metrics["tokens"] == len(ids) - 1
    assert metrics["perplexity"] == pytest.approx(math.exp(loss / (len(ids) - 1)), rel=1e-4)


def test_bad_input(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", pairs=False)
    predictor = language(tmp_path)
    with pytest.raises(UserError, match="has 40 tokens, but the model takes at most 39; shorten it"):
        list(predictor.predict([Row("here", ("cat " * 40,))], BadRows()))
    assert len(list(predictor.generate([5] * 38))) == 2  # limited by the positions
    for options, message in (
        ({"chat": True}, "has no chat template"),
        ({"system": "x"}, "--system needs a chat template"),
        ({"top_p": 0.0}, "top_p must be in"),
    ):
        with pytest.raises(UserError, match=message):
            list(language(tmp_path, **options).predict([Row("here", ("cat",))], BadRows()))
    with pytest.raises(UserError, match=r"--language does not apply to .*, which is a language model"):
        language(tmp_path, language="en")


def test_a_gguf_file_replies(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    predictor = language(tmp_path / "model.gguf", max_new_tokens=5)
    assert predictor.chats
    assert predictor.form.stop == (2,)
    assert predictor.form.tokenizer.decode(predictor.prompt(predictor.messages("ab"))) == "<|user|>ab<assistant>"
    (prediction,) = predictor.predict([Row("here", ("ab",))], BadRows())
    assert 0 < len(prediction.more["tokens"]) <= 5


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_gguf_file_computes_in_float32(tmp_path: Path, kind: str) -> None:
    theirs = write_gguf(tmp_path / "model.gguf", kind=kind).eval()
    predictor = language(tmp_path / "model.gguf")
    ids = torch.arange(3, 35)[None]
    with torch.inference_mode():
        actual, expected = predictor.model(ids), theirs(ids).logits
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()
