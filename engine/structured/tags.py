"""Grammars of answers with several parts: reasoning, then content, or free text that ends in tags (tool calls).

A mark is written as its special token if the vocabulary has one, else as text. Where the model may write freely, both
forms are recognised.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from engine.core.params.structured import Tags, Thoughts
from engine.structured.arguments import ArgumentRules, Arguments

MAX_TAGS_LENGTH = 1_000_000  # characters of the tags' grammars
SPACE = r"[ \t\r\n]"
Instances = str | Arguments  # a tag's instances: a grammar, or what is written in the tag's own syntax
_SLOTS = {"{id}": "/[a-zA-Z0-9_-]{1,40}/", "{index}": "/(0|[1-9][0-9]{0,3})/"}


def compose(
    content: str | None,
    tags: Tags | None,
    schemas: Sequence[Instances],
    thoughts: Thoughts | None,
    special: Mapping[str, int],
) -> str:
    """Return a grammar of `content` (a grammar; None: free text) or `tags`, after `thoughts`.

    `schemas`: the instances of each tag. `special`: the vocabulary's special tokens, except end-of-text tokens.
    """
    return Composition(content, tags, schemas, thoughts, special).text()


class Composition:
    """Writes a grammar in Lark's notation that refers to other grammars by name."""

    def __init__(
        self,
        content: str | None,
        tags: Tags | None,
        schemas: Sequence[Instances],
        thoughts: Thoughts | None,
        special: Mapping[str, int],
    ) -> None:
        self.content, self.tags, self.schemas, self.thoughts = content, tags, schemas, thoughts
        written = "\0".join(self.marks())
        self.special = {mark: i for mark, i in special.items() if mark and mark in written}
        self.all_special = special
        self.rules = ["TEXT: /(?s:.*)/"]

    def marks(self) -> list[str]:
        """Return all literal marks."""
        tags, thoughts = self.tags, self.thoughts
        marks = [tags.trigger, tags.opening, tags.between, tags.closing] if tags is not None else []
        marks += [text for tag in tags.tags for text in (tag.begin, tag.end)] if tags is not None else []
        for syntax in {tag.syntax for tag in tags.tags if tag.syntax is not None} if tags is not None else ():
            marks += syntax.marks
        return marks + ([thoughts.begin, thoughts.end] if thoughts is not None else [])

    def text(self) -> str:
        answer = self.answer()
        if self.thoughts is not None:
            self.rule("end", self.reached("ended", self.thoughts.end, self.others("thought", self.thoughts.end)))
            begun = ""
            if not self.thoughts.opened:
                self.rules.append(f"SPACES: /{SPACE}*/")
                self.rule("begin", self.reached("begun", self.thoughts.begin, before="SPACES"))
                begun = "begin "
            self.rule("thoughts", f"{begun}end GAP")
            answer = f"thoughts {answer}" if self.thoughts.opened else f"thoughts? {answer}"
        if any("GAP" in rule for rule in self.rules):
            self.rules.append(f"GAP: /{SPACE}{{0,16}}/")
        self.rule("start", answer)
        grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join(self.rules)}]
        if self.content is not None:
            grammars.append(_named("content", self.content))
        grammars += [_named(f"schema_{i}", each) for i, each in enumerate(self.schemas) if isinstance(each, str)]
        return json.dumps({"grammars": grammars, "begins": self.begins()})

    def begins(self) -> dict[str, list[str]]:
        """Return the texts after which content and schemas begin; "": at the start of the answer. Used by
        `UniqueItems`.
        """
        tags, thoughts = self.tags, self.thoughts
        content = [thoughts.end] if thoughts is not None else [""]
        content += [""] if thoughts is not None and not thoughts.opened else []
        return {"content": content} | {f"schema_{i}": [tag.begin] for i, tag in enumerate(tags.tags if tags else ())}

    def rule(self, name: str, *options: str) -> None:
        self.rules.append(f"{name}: " + " | ".join(options))

    def others(self, name: str, *marks: str) -> str:
        """Return a rule for texts that end in special tokens outside `marks`, any number of times; they are ignored."""
        ids = [i for mark, i in self.all_special.items() if mark not in marks]
        if not ids:
            return ""
        self.rule(name, f"TEXT {_token(ids)}")
        return f"{name}* "

    def reached(self, name: str, mark: str, free: str = "", before: str = "TEXT") -> str:
        """Return a rule for `free` text up to and including a mark, which always ends the text."""
        self.rules.append(f"{name}[lazy]: {before} {quoted(mark)}")
        token = f" | {before} {_token([self.special[mark]])}" if mark in self.special else ""
        return f"{free}({name}{token})"

    def literal(self, text: str) -> str:
        """Return a rule for exactly this text, with its special tokens and slots."""
        symbols = []
        while text:
            found = [(text.index(mark), -len(mark), mark) for mark in (*self.special, *_SLOTS) if mark in text]
            at, _, mark = min(found, default=(len(text), 0, ""))
            symbols += [quoted(text[:at])] if at else []
            if mark:
                symbols.append(_SLOTS[mark] if mark in _SLOTS else _token([self.special[mark]]))
            text = text[at + len(mark) :]
        return " ".join(symbols)

    def special_id(self, mark: str) -> str | None:
        """Return a rule for a special token; None: the mark is written as text."""
        return _token([self.special[mark]]) if mark in self.special else None

    def instances(self, i: int) -> str:
        """Return an expression for the instances of a tag."""
        assert self.tags is not None
        instances, syntax = self.schemas[i], self.tags.tags[i].syntax
        if isinstance(instances, str):
            return f"@schema_{i}"
        assert syntax is not None
        return ArgumentRules(self, syntax, f"arguments_{i}_").object(instances)

    def answer(self) -> str:
        tags, free = self.tags, ""
        if self.content is None and tags is not None and not tags.required:
            free = self.others("free", tags.trigger, *([self.thoughts.begin] if self.thoughts is not None else []))
        content = "@content" if self.content is not None else f"{free}TEXT"
        if tags is None:
            return content
        for i, tag in enumerate(tags.tags):
            self.rule(f"inner_{i}", f"{self.instances(i)} {self.literal(tag.end)}")
            self.rule(f"tag_{i}", f"{self.literal(tag.begin)} inner_{i}")
        self.rule("tag", *(f"tag_{i}" for i in range(len(tags.tags))))
        more = f"({self.literal(tags.between)} tag)* " if tags.several else ""
        end = f"{more}{self.literal(tags.closing)}"
        if tags.several:  # some models end the last call with a line break, which is also how a further call may begin
            self.rules.append(f"TRAIL: /{SPACE}{{1,4}}/")
            end += " TRAIL?"
        self.rule("tags", f"{self.literal(tags.opening)} tag {end}")
        # Some tokenizers add a space before the first word after a special token.
        space = '" "? ' if tags.trigger in self.special else ""
        heads = [i for i, tag in enumerate(tags.tags) if tag.head is not None]
        if tags.required:
            return "tags" if heads else f"{self.literal(tags.trigger)} {space}tags"
        for i in heads:
            self.rules.append(f"head_{i}[lazy]: /{SPACE}*{_slashed(tags.tags[i].head or '')}/")
            self.rule(f"headed_{i}", f"head_{i} GAP inner_{i} {end}")
        triggered = self.literal(tags.trigger)
        if self.content is None:
            triggered = self.reached("triggered", tags.trigger, free)
        return "(" + " | ".join([content, f"{triggered} {space}tags", *(f"headed_{i}" for i in heads)]) + ")"


def _named(name: str, grammar: str) -> dict[str, Any]:
    """Return a named grammar, for a list of grammars."""
    if not grammar.startswith("{"):
        return {"name": name, "lark_grammar": grammar}
    (found,) = json.loads(grammar)["grammars"]
    return {key: value for key, value in found.items() if value is not None} | {"name": name}


def quoted(text: str) -> str:
    return json.dumps(text)


def _slashed(pattern: str) -> str:
    return pattern.replace("/", r"\/")


def _token(ids: Collection[int]) -> str:
    """Return a rule for one of these tokens, such as `<[3,5-9]>`."""
    return f"<[{','.join(_ranges(sorted(ids)))}]>"


def _ranges(ids: Iterable[int]) -> Iterable[str]:
    first = last = -2
    for i in ids:
        if i != last + 1:
            if last >= 0:
                yield f"{first}-{last}" if last > first else f"{first}"
            first = i
        last = i
    yield f"{first}-{last}" if last > first else f"{first}"
