"""Variables of a chat template that a request may set, such as ``enable_thinking``."""

from __future__ import annotations

import inspect
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerBase

from mmserve.models.chat import template_for

#: Variables that transformers passes to every template besides the arguments of ``apply_chat_template`` and special
#: tokens.
_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
#: Arguments of ``apply_chat_template``, and the name of the first one in templates: none is an option.
_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


class _Generation(Extension):
    """Parses transformers' ``{% generation %}``, which marks an assistant's text, as its contents."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_options(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> frozenset[str]:
    """Names of variables that the chat template of ``tokenizer`` for chats with ``tools``, or without, reads, and that
    only a request can set."""
    return _read(template_for(tokenizer, tools=tools)) - set(tokenizer.special_tokens_map)


@lru_cache(maxsize=64)
def _read(template: str) -> frozenset[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _Generation], autoescape=False)
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(names) - environment.globals.keys() - _FUNCTIONS - _ARGUMENTS
