"""Every task of the reference data by name, and how an answer is judged."""

from __future__ import annotations

import json
import random
from typing import Any

from mmserve.reference.arithmetic import TEXT, final_answer
from mmserve.reference.clips import VIDEO
from mmserve.reference.images import IMAGE, JSON
from mmserve.reference.items import Question, Subject
from mmserve.reference.pairs import PAIR

#: Kind of subject to what is asked about it.
SUBJECTS: dict[str, Subject] = {"image": IMAGE, "json": JSON, "video": VIDEO, "text": TEXT, "pair": PAIR}
#: Task to the kind of its subject.
TASKS: dict[str, str] = {task: kind for kind, subject in SUBJECTS.items() for task in subject.tasks}


def sample(task: str, rng: random.Random) -> tuple[Any, Question]:
    """A fresh thing to ask about and a question of ``task``."""
    return SUBJECTS[TASKS[task]].sample(task, rng)


def correct(question: Question, answer: str) -> bool:
    """Whether ``answer`` is right: JSON by value, arithmetic by its final answer, everything else by its text."""
    if question.task == "arithmetic":
        return final_answer(answer) == final_answer(question.answer)
    if question.task != "json":
        return answer.strip() == question.answer
    try:
        return bool(json.loads(answer) == json.loads(question.answer))
    except json.JSONDecodeError:
        return False
