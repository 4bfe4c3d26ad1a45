"""Chat templates: what stands around the user's text, and which of it may be special tokens.

A template is a jinja template of one of two kinds, told apart by the variables it uses:

    by turn       `prompt`, `system` (None but in the first turn), `index` (0, 1, ...); gives what comes
                  before one response
    by messages   `messages`, `add_generation_prompt`, the Hugging Face convention; gives the conversation

The response itself, and the end-of-sequence token behind it, are no part of the template: the trainer adds
them.

Only a template may spell special tokens. The user's text passes through it between two marks, so that
afterwards both kinds of text are known apart and a user's "</s>" stays five characters.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Mapping, NamedTuple

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEFAULT_TEMPLATE = "plain"
TEMPLATES = {
    "plain": "{% if system %}{{ system }}\n{% endif %}{{ prompt }}",
    "alpaca": (
        "{% if system %}{{ system }}\n\n{% endif %}{{ '\n\n' if index }}"
        "### Instruction:\n{{ prompt }}\n\n### Response:\n"
    ),
    "chatml": (
        "{{ '\n' if index }}{% if system %}<|im_start|>system\n{{ system }}<|im_end|>\n{% endif %}"
        "<|im_start|>user\n{{ prompt }}<|im_end|>\n<|im_start|>assistant\n"
    ),
}
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters, which no text holds; one that does loses them
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


class Segment(NamedTuple):
    """A piece of a rendered prompt; `from_user` text never becomes a special token."""

    text: str
    from_user: bool


class Template:
    """A compiled template.

    Args:
        name: what is written down with the checkpoint: a name of TEMPLATES, or a file.
        source: the jinja text.

    Raises:
        ValueError: text that is no jinja template, or one that uses neither `prompt` nor `messages`.
    """

    def __init__(self, name: str, source: str):
        self.name, self.source = name, source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        try:
            variables = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"template {name!r}, line {error.lineno}: {error.message}") from None
        self.by_messages = "messages" in variables
        if not self.by_messages and "prompt" not in variables:
            raise ValueError(
                f"template {name!r} uses {sorted(variables) or 'no variable'}; expected `prompt` (and "
                "perhaps `system`, "
                "`index`), or `messages` (and `add_generation_prompt`)."
            )

    def prompts(self, turns, system: str | None, eos: str = "", bos: str = "") -> list[list[Segment]]:
        """For each turn, what comes before its response (after the previous one and its EOS).

        Args:
            turns: (prompt, response) pairs. system: the system message or None. eos, bos: spellings, for the
            template.
        """
        if self.by_messages:
            return self._from_messages(turns, system, eos, bos)
        return [
            self._checked(
                self._render(prompt=_mark(prompt), system=_mark(system) if not index else None, index=index), prompt
            )
            for index, (prompt, _) in enumerate(turns)
        ]

    def _from_messages(self, turns, system, eos, bos):
        messages, prompts, done = [], [], ""
        if system:
            messages.append({"role": "system", "content": _mark(system)})
        for prompt, response in turns:
            messages.append({"role": "user", "content": _mark(prompt)})
            text = self._render(messages=messages, add_generation_prompt=True, eos_token=eos, bos_token=bos)
            if not text.startswith(done):
                raise ValueError(
                    f"template {self.name!r} writes earlier turns differently later; it cannot train several."
                )
            after = text[len(done) :]
            after = after[len(eos) :] if done and eos and after.startswith(eos) else after
            prompts.append(self._checked(after.removeprefix(bos) if not done and bos else after, prompt))
            done = text + _mark(response, outside=True)
            messages.append({"role": "assistant", "content": _mark(response, outside=True)})
        return prompts

    def _checked(self, text: str, prompt: str) -> list[Segment]:
        """The segments of a rendered text, in which all of the user's text stands between marks."""
        segments = _segments(text)
        if any(mark in segment.text for segment in segments for mark in (_OPEN, _CLOSE)):
            raise ValueError(
                f"template {self.name!r} cuts or splits the user's text; expected it whole, as in {{{{ prompt }}}}. How long "
                "it may be is the business of src_length."
            )
        if prompt.strip() and not any(segment.from_user for segment in segments):
            raise ValueError(
                f"template {self.name!r} leaves out the prompt of a turn; expected all of it, as in {{{{ prompt }}}}."
            )
        return segments

    def _render(self, **variables) -> str:
        try:
            return self._template.render(**variables)
        except Exception as error:  # a template computes, and may fail in any way
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ValueError(f"template {self.name!r}: {kind}{error}") from None


def load_template(name: str | None = None, tokenizer_template: str | None = None) -> Template:
    """A template by name, `tokenizer` (the tokenizer's own), or the path of a jinja file; None is the
    default, `plain`.

    Raises:
        ValueError: none of these.
    """
    name = name or DEFAULT_TEMPLATE
    if name == "tokenizer":
        if not tokenizer_template:
            raise ValueError(
                "template 'tokenizer': this tokenizer has no chat template of its own; name another one."
            )
        return Template(name, tokenizer_template)
    if name in TEMPLATES:
        return Template(name, TEMPLATES[name])
    if Path(name).is_file():
        try:
            return Template(name, Path(name).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"template {name!r}: byte {error.start} is not UTF-8; save the file as UTF-8.") from None
    raise ValueError(
        f"template {name!r}: neither a file nor one of {', '.join([*TEMPLATES, 'tokenizer'])}. Write one in "
        "jinja, for "
        "example: Question: {{ prompt }} Answer:"
    )


def encode_segments(
    segments: list[Segment], encode: Callable[[str], list[int]], special_ids: Mapping[str, int]
) -> list[int]:
    """Ids of a rendered prompt. Special tokens that the template spells become their ids; between two of them
    all text, the template's and the user's, is tokenised as one piece, without special tokens.

    Args:
        encode: plain text -> ids, knows no special tokens.
        special_ids: spelling -> id.
    """
    spellings = sorted(filter(None, special_ids), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
    ids, run = [], ""
    for text, from_user in segments:
        if from_user or pattern is None:
            run += text
            continue
        position = 0
        for match in pattern.finditer(text):
            run += text[position : match.start()]
            ids += (encode(run) if run else []) + [special_ids[match.group()]]
            run, position = "", match.end()
        run += text[position:]
    return ids + (encode(run) if run else [])


def _mark(text: str | None, outside: bool = False) -> str | None:
    """The text between marks; the space around it, which a template may trim, stays outside of them unless the marks go
    `outside` of that too."""
    if not text:
        return text
    text = text.replace(_OPEN, "").replace(_CLOSE, "")
    inner = text if outside else text.strip()
    if not inner:
        return text
    start = text.index(inner)
    return f"{text[:start]}{_OPEN}{inner}{_CLOSE}{text[start + len(inner) :]}"


def _segments(text: str) -> list[Segment]:
    segments, position = [], 0
    for match in _MARKED.finditer(text):
        segments += [Segment(text[position : match.start()], False), Segment(match.group(1), True)]
        position = match.end()
    segments.append(Segment(text[position:], False))
    return [segment for segment in segments if segment.text]


def _raise(message: str):
    raise jinja2.TemplateError(message)
