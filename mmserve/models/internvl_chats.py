"""Chat formats of ``internvl_chat`` checkpoints, by the ``template`` of their ``config.json``.

Their authors' ``chat`` uses the format of ``conversation.py``, not the tokenizer's chat template, which is that of the
original text model with its system message (OpenGVLab/InternVL, issue 1094). In these formats every message ends in a
separator, and a chat without a system message gets the default one.
"""

from __future__ import annotations

import logging

from transformers import PreTrainedTokenizerFast

from mmserve.models.chat import IMAGE, JOIN_PARTS

_log = logging.getLogger(__name__)

_SECOND = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"
_LATER = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
#: Separator and default system message of each format: InternVL2's, and those of InternVL2.5 and later.
FORMATS = {
    "Hermes-2": ("<|im_end|>", _SECOND),
    "internlm2-chat": ("<|im_end|>", _SECOND),
    "internvl2_5": ("<|im_end|>\n", _LATER),
}


def use_named_format(tokenizer: PreTrainedTokenizerFast, name: object, image: str) -> bool:
    """Set the chat template of the format ``name`` in ``tokenizer``; ``image``: placeholder of an image.

    Returns False if no format is named, or an unknown one (logged): the tokenizer then keeps its own template.
    """
    if not isinstance(name, str) or name not in FORMATS:
        if name is not None:
            known = ", ".join(sorted(FORMATS))
            _log.warning("template %r is not one of %s: the tokenizer's chat template is used", name, known)
        return False
    separator, system = FORMATS[name]
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}"
        f"<|im_start|>system\n{system}{separator}{{% endif %}}"
        f"{{% for message in messages %}}{JOIN_PARTS.replace(IMAGE, image)}"
        f"{{{{ '<|im_start|>' + message['role'] + '\n' + text.value + {separator!r} }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return True
