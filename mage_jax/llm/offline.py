"""A backend without a model: answers are a function of the request, the same in every process and on every machine.

For tests and for runs without a network. Randomness comes from the request's key, so another seed, prompt or picture
gives another answer and the same request always the same one.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import random
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mage_jax.llm.client import LLMError, Reply, Request, Usage, canonical_json, request_key

MODEL = "offline"
IMAGE_TOKENS = 1000  # counted for a picture, so that cost reports of offline runs have a plausible shape

Answer = str | Mapping[str, Any]
Function = Callable[[Request, random.Random], Answer]


class OfflineError(LLMError):
    """No rule answers the request, or a rule gave something that is not an answer."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How requests of one kind are answered.

    Attributes:
      purpose: pattern of purposes, with ``*`` and ``?``.
      answer: one of
        a function of the request and a generator seeded by its key, giving text or an object (written as JSON);
        a template, whose ``$name`` stand for the request's labels and ``$model``, ``$purpose``, ``$seed``, ``$text``
        (of the last message);
        a sequence of templates, of which the key chooses one.
    """

    purpose: str
    answer: Function | str | Sequence[str]


class OfflineClient:
    """Answers by the first rule whose pattern fits.

    Attributes:
      calls: requests answered so far.
    """

    def __init__(self, rules: Sequence[Rule], *, model: str = MODEL):
        """``model`` is the name in the replies."""
        self._rules = tuple(rules)
        self._model = model
        self.calls = 0

    def complete(self, request: Request) -> Reply:
        """Answers one request.

        Raises:
          OfflineError: no rule for the purpose, a template with an unknown name, or an answer of the wrong type or
            longer than ``max_tokens`` (a real model would have been cut there).
        """
        rule = next((r for r in self._rules if fnmatch.fnmatchcase(request.purpose, r.purpose)), None)
        if rule is None:
            known = ", ".join(repr(r.purpose) for r in self._rules) or "none"
            raise OfflineError(f"no rule for purpose {request.purpose!r}; known patterns: {known}")
        key = request_key(request)
        answer = self._answer(rule, request, random.Random(key))
        text = answer if isinstance(answer, str) else canonical_json(answer)
        usage = Usage(
            prompt=sum(estimate_tokens(m.text) + IMAGE_TOKENS * len(m.images) for m in request.messages),
            cached_prompt=0,
            completion=estimate_tokens(text),
        )
        if usage.completion > request.max_tokens:
            raise OfflineError(
                f"rule {rule.purpose!r}: about {usage.completion} tokens answered, max_tokens is {request.max_tokens}"
            )
        self.calls += 1
        return Reply(text=text, usage=usage, model=self._model, finish_reason="stop", id=f"offline-{key[:16]}")

    def _answer(self, rule: Rule, request: Request, rng: random.Random) -> Answer:
        template = rule.answer
        if callable(template):
            answer = template(request, rng)
            if not isinstance(answer, (str, Mapping)):
                raise OfflineError(f"rule {rule.purpose!r}: must answer text or a mapping, got {type(answer).__name__}")
            return answer
        if not isinstance(template, str):
            if not template:
                raise OfflineError(f"rule {rule.purpose!r}: has no template to choose from")
            template = rng.choice(list(template))
        names = {
            **request.labels,
            "model": request.model,
            "purpose": request.purpose,
            "seed": str(request.seed),
            "text": request.messages[-1].text,
        }
        try:
            return string.Template(template).substitute(names)
        except (KeyError, ValueError) as error:
            raise OfflineError(f"rule {rule.purpose!r}: template {template!r:.80}: {error}") from None


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has: a quarter of its UTF-8 bytes, rounded up."""
    return -(-len(text.encode()) // 4)


def example_answer(request: Request, rng: random.Random) -> dict[str, Any]:
    """A ``Rule.answer`` that fills the request's schema with arbitrary valid values.

    Raises:
      OfflineError: the request has no schema with an object at the top.
    """
    if request.schema is None or request.schema.get("type") != "object":
        raise OfflineError(f"purpose {request.purpose!r}: example_answer needs a schema of type object")
    return example(request.schema, rng)


def example(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """A value that fits a schema of the subset: declared properties, arrays of one to three items, short words."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"]
    if kind == "object":
        properties = schema.get("properties", {})
        extra = schema.get("additionalProperties", True)
        undeclared = extra if isinstance(extra, Mapping) else {"type": "string"}
        names = [*properties, *(key for key in schema.get("required", ()) if key not in properties)]
        return {name: example(properties.get(name, undeclared), rng) for name in names}
    if kind == "array":
        return [example(schema.get("items", {"type": "string"}), rng) for _ in range(rng.randint(1, 3))]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.randint(0, 9)
    if kind == "number":
        return round(rng.random(), 3)
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
