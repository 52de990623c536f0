"""Variables of a chat template that a request may set, such as ``enable_thinking``."""

from __future__ import annotations

import inspect
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerBase

from mmserve.models.chat import template_for

#: What transformers gives every template beside the arguments of ``apply_chat_template`` and the special tokens.
_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
#: Arguments of ``apply_chat_template``, and what templates call the first of them: none is an option.
_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


class _Generation(Extension):
    """Reads transformers' ``{% generation %}``, which marks an assistant's text, as what it holds."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_options(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> frozenset[str]:
    """Names that the chat template of ``tokenizer`` for chats with ``tools``, or without, reads and nothing sets but a
    request."""
    return _read(template_for(tokenizer, tools=tools)) - set(tokenizer.special_tokens_map)


@lru_cache(maxsize=64)
def _read(template: str) -> frozenset[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation], autoescape=False)
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(names) - environment.globals.keys() - _FUNCTIONS - _ARGUMENTS
