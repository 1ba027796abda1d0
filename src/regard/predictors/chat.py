"""Chat templates, rendered as Transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from regard.errors import UserError, first_line
from regard.field_types import short_repr
from regard.predictors.checkpoint import TOKENIZER_CONFIG, Checkpoint

FILE = "chat_template.jinja"
MAX_TEMPLATE = 1_000_000  # characters
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

Message = Mapping[str, str]
"""A message: its role (system, user or assistant) and its content."""


class ChatTemplate:
    """A Jinja template that turns messages into the text that a model was trained on. It runs in a sandbox.

    >>> from regard.predictors.chat import ChatTemplate
    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {}, "model")
    >>> template.render([{"role": "user", "content": "Hi!"}])
    '<user>Hi!'
    """

    def __init__(self, template: str, tokens: Mapping[str, str], name: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.ext import Extension
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UserError(
                f"{name}: its chat template needs jinja2: pip install 'regard[pretrained]', or use --no-chat"
            ) from None
        self.name, self.tokens = name, tokens

        class Generation(Extension):
            """The block `generation`, which marks replies for training and is rendered like any other text."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": self._fail, "strftime_now": _now}
        if len(template) > MAX_TEMPLATE:
            raise UserError(f"{name}: its chat template must have at most {MAX_TEMPLATE} characters")
        try:
            self._template = environment.from_string(template)
        except (TemplateError, RecursionError) as error:
            raise UserError(f"{name}: its chat template is not valid: {first_line(error)}; use --no-chat") from error

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, up to where the model continues it."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], tools=None, documents=None,
                add_generation_prompt=True, **self.tokens,
            )  # fmt: skip
        except UserError:
            raise
        except Exception as error:  # templates fail in any way
            raise UserError(
                f"{self.name}: its chat template fails ({type(error).__name__}: {first_line(error)}); use --no-chat"
            ) from error

    def _fail(self, message: object) -> NoReturn:
        raise UserError(f"{self.name}: its chat template refuses this conversation: {first_line(Exception(message))}")


def read_chat_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """Return the chat template of a checkpoint, if it has one."""
    template: Any = checkpoint.settings(TOKENIZER_CONFIG).get("chat_template")
    if checkpoint.path.is_dir() and (checkpoint.path / FILE).exists():
        from regard.data.readers import read_text

        template = read_text(checkpoint.path / FILE)
    if isinstance(template, list):  # several, by name
        known = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = known.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise UserError(f"{checkpoint.name}: chat_template must be a text, got {short_repr(template)}")
    tokens = {name: token for name in TOKENS if (token := checkpoint.special_token(name)) is not None}
    return ChatTemplate(template, tokens, checkpoint.name)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Encode as JSON without escaping HTML, unlike Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
