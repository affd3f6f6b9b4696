"""The project's words as code: names and phrases that readers of vLLM, SGLang and Hugging Face would not recognise stay
out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".github", "benchmarks", "configs", "docs", "engine", "kernels", "server", "tests")
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".js", ".html", ".txt"}
GENERATED = (
    "configs/demo/",
    "tests/test_words.py",
    "node_modules/",
    "/vendor/",
)  # the model's own texts; the list below
# Pattern → what to write instead. Patterns are precise: "share" may be a fraction of memory or what prefixes do, "turn"
# a part of a conversation, "room" space that is left, "place" a position in a text.
WORDS = {
    r"\bshares\b(?! (?:a|an|its|no|one|the|this|with)\b)": "scheduled tokens, ScheduledBatch",
    r"\b(?:dropped|each|every|its|late|no|one|partial|same|this|which|yields?) share\b(?! of\b)": "scheduled tokens",
    r"\bAdmissions?\b|\badmission\.\w|\badmission in\b": "NewRequest",
    r"(?i)\b_?postpon\w*": "defer",
    r"(?i)\brehears\w*": "dummy run, warm-up",
    r"(?i)\bnews\b": "outputs",
    r"(?i)\blast[ _]words?(?![a-z])": "final output",
    r"(?i)(?<!<\|)\b_?constrain(?:s|ed|ing)?\b": "guide, guided by a grammar",
    r"\bMatching\b": "GrammarManager",
    r"\bFrontend\b|(?i:\bfront[ -]?ends?\b)": "InputProcessor, input processor, API process",
    r"\bOutputStream\b": "OutputCollector",
    r"(?i)\btwins?\b": "reference implementation",
    r"(?i)\bthe house\b": "architecture",
    r"(?i)\broads?\b": "request flow, path",
    r"(?i)\brooms\b|\b(?:each|every|own|this|a) room\b(?! (?:for|in)\b)|\broom_of\b": "module, package, layer",
    r"(?i)\bin turns?\b(?=[,;)]|\.?$| \()|\b(?:its|their|whose) turns?\b"
    r"|\bdef turn\b|\.turn\(\)": "in queue order, alternately",
    r"(?i)\bmatrix units?\b": "tensor core",
    r"(?i)\b(?:of|or|with) few bits\b": "low-bit",
    r"(?i)likeliest": "argmax, most likely",
    r"(?i)\blikewise\b": "say it again",
    r"(?i)\bmatrix products?\b": "GEMM, matrix multiplication",
    r"(?i)\bplaces\b(?! (?:where|in)\b)|\btakes? (?:a|its|no) place\b": "indices, positions",
    r"(?i)\bwhoever\b|\bwho (?:is|are) late\b|\bwhose it is\b": "the request",
    r"(?i)\b(?:some|no)body\b": "the request, the caller, nothing",
    r"(?:^|[\"'.] )Knows\b|\"\"\"Knows\b|; knows (?:no|nothing)\b": "what the module does",
}
# (file, a part of the line): words that are right there.
ALLOWED = (
    ("benchmarks/report/plot.py", "places"),  # of bars in a picture
    ("benchmarks/report/plot.py", 'layout="constrained"'),  # a name of matplotlib's
    ("tests/clients/test_lm_eval.py", "Who was called"),
)


# A docstring begins with a verb or a noun.
FIRST_WORDS = ("Of", "What", "That", "Whether", "Which", "How", "Where", "As")


def docstrings(source: str) -> Iterator[str]:
    """Docstrings of a module, its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def badly_begun(source: str) -> list[str]:
    """First lines of docstrings that begin with one of `FIRST_WORDS`."""
    lines = [text.splitlines()[0] for text in docstrings(source) if text]
    return [line for line in lines if re.split(r"\W", line, maxsplit=1)[0] in FIRST_WORDS]


def files() -> Iterator[str]:
    """Every text file of the project, as a path below its root."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found += [path for path in ROOT.glob("*") if path.suffix in SUFFIXES or path.name in ("Dockerfile", "Makefile")]
    for path in sorted(found):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(".git/") and not any(part in name for part in GENERATED):
            yield name


def violations(name: str, text: str) -> list[str]:
    """Each forbidden word in a file: where it stands, and what to write instead."""
    found = []
    for pattern, instead in WORDS.items():
        for match in re.finditer(pattern, text, re.MULTILINE):
            number = text.count("\n", 0, match.start()) + 1
            line = text.splitlines()[number - 1]
            if not any(name == file and part in line for file, part in ALLOWED):
                found.append(f"{name}:{number}: {match[0].strip()!r}: write {instead!r}")
    return found


def test_only_words_of_the_field() -> None:
    found = [violation for name in files() for violation in violations(name, (ROOT / name).read_text(encoding="utf-8"))]
    assert found == [], "\n".join(["", *found])


@pytest.mark.parametrize(
    "line",
    [
        "        shares = output.batch",
        "products with matrices of few bits",
        "the matrix units idle",
        "# the likeliest token",
        "zeros likewise",
        "matrix products of 16 tokens",
        "its share of step n+1 is dropped, a partial share",
        "for admission in output.new_requests:",
        "def _postpone(self, late):",
        "a rehearsal of the largest step",
        "Returns the news of those whose grammar failed.",
        "LAST_WORDS_SECONDS = 0.2",
        "launched.constrain(late)",
        "class Matching:",
        "Commands: front end → engine process",
        "the torch twin of the same signature",
        "the whole road of a request",
        "each room may import",
        "in the order of their turns",
        "    def turn(self) -> bool:",
        "an embedding takes no place in the context",
        "Whoever is not followed may go on as they like.",
        "Nobody changes them.",
        '"""Token ids to text. Knows one sequence; nothing of requests or HTTP."""',
    ],
)
def test_a_forbidden_word_is_found(line: str) -> None:
    assert violations("engine/any.py", line)


@pytest.mark.parametrize(
    "line",
    [
        "share of the GPU's memory to use",
        "requests that begin alike share blocks",
        "a prompt which shares no prefix with others",
        "the admission of requests is limited",
        "pip install -c constraints.txt",
        "a conversation of several turns",
        "turns token ids into text",
        "the KV cache has room for 32 tokens",
        "changes them in place",
        "a model that knows nothing",
    ],
)
def test_other_meanings_are_allowed(line: str) -> None:
    assert violations("engine/any.py", line) == []


def test_what_is_allowed_exists() -> None:
    assert [file for file, _ in ALLOWED if not (ROOT / file).is_file()] == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    sources = [name for name in files() if name.endswith(".py")] + [str(path) for path in (ROOT / "demo").glob("*.py")]
    assert len(sources) > 700
    found = [f"{name}: {line}" for name in sources for line in badly_begun((ROOT / name).read_text(encoding="utf-8"))]
    assert found == [], "\n".join(["", *found])


@pytest.mark.parametrize(
    ("line", "is_bad"),
    [("Of each row.", True), ("How, and when.", True), ("Offer it.", False), ("Return whether.", False)],
)
def test_a_bad_beginning_is_found(line: str, is_bad: bool) -> None:
    assert bool(badly_begun(f'def f():\n    """{line}"""')) == is_bad
