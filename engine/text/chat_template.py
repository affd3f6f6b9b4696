"""Renders conversations to prompt text with the model's Jinja chat template.

Templates come with models and are not trusted. Jinja's sandbox blocks access to Python. `_Budget` bounds time and
output: loop iterations, calls, filters, operators and written text are counted while the template renders.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic, thread_time
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from engine.utils.one_line import one_line

MAX_STEPS = 1_000_000  # loop iterations, calls, filters, operators
MAX_CHARS = 1 << 27  # of output and of intermediate values
MAX_SECONDS = 3.0
_ATOMS = frozenset((bool, int, float, type(None)))
MAX_NUMBER = 100_000  # largest width, count or number of digits in one operation

_CONTINUE_HERE = "<|the answer continues here|> "  # the trailing space reveals whether the template trims


class ChatTemplateError(Exception):
    """The template cannot be compiled or rejects the messages. The message is a single line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ChatTemplate:
    """A compiled chat template. `render` is thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: variables such as `bos_token` and `eos_token`."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            with _bounded():
                self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno} of the chat template: {error.message}") from None
        except (RecursionError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {type(error).__name__}") from None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt. `continue_final_message`: end it with the last message's content, to be continued.

        `kwargs`: additional template variables. Raises `ChatTemplateError` if the template rejects the messages, fails
        or exceeds its budget.
        """
        messages = list(messages)
        if continue_final_message:
            messages[-1] = self._mark_end(messages)
        variables = self._special_tokens | {"documents": None} | kwargs
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            with _bounded():
                text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error.message or type(error).__name__)) from None
        except Exception as error:  # any Python exception while rendering is an error of the template
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from None
        return _cut_at_mark(text) if continue_final_message else text

    @staticmethod
    def _mark_end(messages: list[dict[str, Any]]) -> dict[str, Any]:
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise ChatTemplateError("continue_final_message requires text content in the last message")
        return {**messages[-1], "content": content + _CONTINUE_HERE}


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_HERE.rstrip())
    if end < 0:
        raise ChatTemplateError("continue_final_message: the chat template omits the end of the last message")
    trimmed = not text.startswith(_CONTINUE_HERE, end)
    return text[:end].rstrip() if trimmed else text[:end]


# ---- the environment that Hugging Face's templates expect ----


def _environment() -> ImmutableSandboxedEnvironment:
    env = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=_written, optimized=False
    )
    del env.globals["lipsum"]
    env.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    env.filters["tojson"] = _to_json
    env.filters = {name: _bounded_filter(name, filter_) for name, filter_ in env.filters.items()}
    env.filters |= {_LOOP: _count_rounds, _SIZED: _sized, _CONCAT: _concat}
    return env


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """Supports `{% generation %}`, which marks assistant text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


# ---- bounds ----


@dataclass(slots=True)
class _Budget:
    """The remaining budget of one rendering."""

    steps: int
    chars: int
    deadline: float  # when the thread's CPU time is looked at: a busy machine makes no template too slow
    begun: float = field(default_factory=lambda: thread_time())  # CPU time of the thread

    def spend(self, steps: int = 1, chars: int = 0) -> None:
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or (monotonic() > self.deadline and self._is_over_time()):
            most = f"{MAX_SECONDS:g} s of CPU time or {MAX_STEPS} steps"
            raise jinja2.TemplateError(f"the chat template takes more than {most}")
        if self.chars < 0:
            raise jinja2.TemplateError(f"the chat template writes too much: more than {MAX_CHARS} characters")

    def _is_over_time(self) -> bool:
        left = self.begun + MAX_SECONDS - thread_time()
        self.deadline = monotonic() + left
        return left < 0

    def spend_on(self, value: Any) -> None:
        """Charge for a value about to be written, including everything it contains."""
        level = [value]
        while level:
            below: list[Any] = []
            steps = chars = 0
            for each in level:
                kind = type(each)
                if kind is str:
                    chars += len(each)
                elif kind in _ATOMS:
                    continue
                elif kind is dict or isinstance(each, Mapping):
                    steps += len(each)
                    below += each
                    below += each.values()
                elif isinstance(each, (list, tuple, set, frozenset)):
                    steps += len(each)
                    below += each
                elif isinstance(each, (str, bytes)):
                    chars += len(each)
                if steps > self.steps:
                    break
            self.spend(steps, chars)
            level = below

    def spend_length(self, value: Any) -> Any:
        """Charge for the length of a new value, without its contents. Iterators are charged as they advance."""
        if isinstance(value, (str, bytes)):
            self.spend(1, len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.spend(1, 8 * len(value))
        elif isinstance(value, Iterator):
            return iter(_Counted(value, self))
        else:
            self.spend()
        return value


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")


@contextmanager
def _bounded() -> Iterator[None]:
    token = _BUDGET.set(_Budget(MAX_STEPS, MAX_CHARS, monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        _BUDGET.reset(token)


class _Counted:
    """An iterable that charges one step per item."""

    def __init__(self, iterable: Any, budget: _Budget) -> None:
        self._iterable = iterable
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._budget.spend()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


_LOOP, _SIZED, _CONCAT = "quire:loop", "quire:sized", "quire:concat"


class _Instrument(NodeTransformer):
    """Wraps operations that the sandbox does not intercept in counting filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, _LOOP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _SIZED) if isinstance(node.arg, nodes.Slice) and node.ctx == "load" else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # unlike template data, constants pass `finalize` at run time


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _written(context: Context, value: Any) -> Any:
    _BUDGET.get().spend_on(value)
    return value


def _count_rounds(value: Iterable[Any]) -> _Counted:
    return _Counted(value, _BUDGET.get())


def _sized(value: Any) -> Any:
    return _BUDGET.get().spend_length(value)


def _concat(values: tuple[Any, ...]) -> str:
    _BUDGET.get().spend_on(values)
    return "".join(map(str, values))


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr != "translate" and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_growth(_BUDGET.get(), "format", value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return bounded

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        if isinstance(function, LoopContext) and args:
            args = (_Counted(args[0], budget), *args[1:])
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (str, bytes, int, float, list, tuple, dict)):
            _check_growth(budget, function.__name__, owner, args, kwargs)
        elif function is self.globals["strftime_now"]:
            _check_growth(budget, "format", args, (), kwargs)
        return budget.spend_length(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        match operator:
            case "%" if isinstance(left, (str, bytes)):
                _check_growth(budget, "format", left, (right,), {})
            case "*" | "**" if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                if bits > MAX_NUMBER:
                    raise jinja2.TemplateError(f"the chat template computes numbers of over {MAX_NUMBER} bits")
            case "*" if isinstance(left, int) or isinstance(right, int):
                value, times = (right, left) if isinstance(left, int) else (left, right)
                budget.spend(1, max(times, 0) * len(value) if isinstance(value, (str, bytes, list, tuple)) else 0)
            case "+" if isinstance(left, (str, bytes, list, tuple)) and isinstance(right, (str, bytes, list, tuple)):
                budget.spend(1, len(left) + len(right))
        return super().call_binop(context, operator, left, right)


# fmt: off
_AMPLIFYING = {"batch", "center", "filesizeformat", "indent", "round", "slice", "tojson", "truncate", "wordwrap"}
_WRITING = {
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint", "replace",
    "safe", "string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount",
    "wordwrap", "xmlattr",
}
# fmt: on
_LONG_NUMBER = re.compile(r"\d{6}")
_COMPUTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    num_hidden = 1 if hasattr(function, "jinja_pass_arg") else 0  # the first argument is the context or environment

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        if name in _WRITING:
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            budget.spend_on(args[num_hidden:])
        if name in _WRITING or name in _AMPLIFYING:
            _check_growth(budget, name, args[num_hidden], args[num_hidden + 1 :], kwargs)
        return budget.spend_length(function(*args, **kwargs))

    return bounded


def _check_growth(budget: _Budget, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Reject an operation with a result far larger than its operands, before it runs."""
    operands = [*args, *kwargs.values()]
    if name == "format":
        text = str(value)
        if _LONG_NUMBER.search(text) or _COMPUTED_WIDTH.search(text):
            raise jinja2.TemplateError("the chat template formats with a huge or computed width")
        budget.spend_on(operands)
    elif name == "replace" and len(operands) >= 2:
        text, old, new = str(value), str(operands[0]), str(operands[1])
        budget.spend(1, text.count(old) * len(new))
    elif name == "join" and operands:
        separator, items = (value, operands[0]) if isinstance(value, (str, bytes)) else (operands[0], value)
        if isinstance(items, (list, tuple)):
            budget.spend_on(items)
            budget.spend(1, len(separator) * len(items))
    elif any(isinstance(operand, int) and abs(operand) > MAX_NUMBER for operand in operands):
        raise jinja2.TemplateError(f"the chat template asks {name} for a number above {MAX_NUMBER}")
