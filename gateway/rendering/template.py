"""A chat template, compiled as Hugging Face compiles it and, where that is proved equal, as minijinja does (two to three times faster)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from gateway.rendering.battery import conversations
from gateway.rendering.conversation import Conversation, JsonObject, NotReproducible
from gateway.rendering.memory import RecentlyUsed
from kvindex.tokenizer import TokenizerError

try:
    import jinja2
    import jinja2.ext
    import jinja2.meta
    import jinja2.nodes
    import jinja2.sandbox
    import minijinja
except ImportError as error:
    raise TokenizerError(f"token mode needs jinja2 and minijinja ({error}): pip install 'warmroute[exact]'") from None

from gateway.rendering.content_format import content_format
from gateway.rendering.loop_reads import Unclear
from gateway.rendering.message_loop import MessageLoop, has_telltale

logger = logging.getLogger("warmroute.rendering")

AUDIT_EVERY = 256  # renderings; every so many are made by both and compared
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(jinja2.ext.Extension):
    """{% generation %}: marks the model's own text for training; renders its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Hugging Face's `tojson`: unlike Jinja's it escapes no HTML."""
    dump = value.dump if type(value) is JsonObject else partial(json.dumps, value)
    return dump(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """One chat template. Raises NotReproducible when it is no valid template, and from `render` when it refuses a conversation.

    What messages are rendered as is kept in `memory`.
    """

    def __init__(self, source: str, memory: RecentlyUsed):
        self.source = source
        self.clock: Callable[[], datetime] = datetime.now
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise NotReproducible(f"the chat template is not valid: {error}") from None
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.content_format = content_format(tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self._renderings = 0
        self._loop = self._message_loop(tree, memory)
        self._fast = self._proved_equal()

    @property
    def fast(self) -> bool:
        """Whether minijinja renders it."""
        return self._fast is not None

    def render(self, context: dict[str, Any]) -> str:
        """The prompt text for a context that holds messages, tools, documents, add_generation_prompt and variables."""
        if self._fast is None:
            return self._reference(context)
        text = self._from_memory(self._fast, context)
        if text is None:
            try:
                text = self._fast.render_template("chat", **context)
            except Exception:  # a refusal, or something only minijinja chokes on: jinja2 tells
                return self._reference(context)
            if has_telltale(text):
                return self._reference(context)
        self._renderings += 1
        if self._renderings % AUDIT_EVERY == 0 and text != self._reference(context):
            logger.warning("minijinja renders a conversation differently from jinja2, which is used from here on")
            self._fast = None
            return self._reference(context)
        return text

    def render_open_ended(self, context: dict[str, Any]) -> str:
        """The prompt text up to the end of the last message's content, for the model to go on with."""
        *others, final = context["messages"]
        content = final.get("content")
        if isinstance(content, list):
            at = next((at for at in reversed(range(len(content))) if "text" in content[at]), None)
            if at is None:
                raise NotReproducible("the final message has no text to continue")
            text = content[at]["text"]
            marked: Any = [*content[:at], {**content[at], "text": text + _CONTINUE_TAG}, *content[at + 1 :]]
        elif isinstance(content, str):
            text = content
            marked = content + _CONTINUE_TAG
        else:
            raise NotReproducible("the final message has no text to continue")
        opened = [*others, {**final, "content": marked}]
        if type(context["messages"]) is Conversation:
            opened = Conversation(opened, [*context["messages"].keys[:-1], None])
        rendered = self.render({**context, "messages": opened})
        if text.strip() not in rendered or _CONTINUE_TAG.strip() not in rendered:
            raise NotReproducible("the chat template does not render the final message that is to be continued")
        end = rendered.rindex(_CONTINUE_TAG.strip())
        # without the tag's space behind it the template has trimmed the message
        return rendered[:end] if rendered.startswith(_CONTINUE_TAG, end) else rendered[:end].rstrip()

    def refuses_inline_system(self) -> bool:
        """Whether a system message that is not the first makes the template fail, found out as the engine does at its start."""
        plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            plain.from_string(self.source).render(messages=messages, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        except Exception:
            return False
        return False

    # --- the two engines ---

    def _strftime(self, form: str) -> str:
        return self.clock().strftime(form)

    def _reference(self, context: dict[str, Any]) -> str:
        try:
            return self._template.render(**context)
        except Exception as error:
            raise NotReproducible("the chat template refuses the conversation") from error

    def _from_memory(self, fast: minijinja.Environment, context: dict[str, Any]) -> str | None:
        """The prompt with what is remembered of it, None where it has to be rendered whole."""
        if self._loop is None:
            return None
        text = self._loop.render(fast, "loop", context)
        if self._loop.stateful:
            self._loop = None
        return text

    def _message_loop(self, tree: jinja2.nodes.Template, memory: RecentlyUsed) -> MessageLoop | None:
        try:
            return MessageLoop(_without_generation(self.source), tree, memory)
        except Unclear:
            return None

    def _proved_equal(self) -> minijinja.Environment | None:
        """A minijinja environment if it renders every conversation of the battery as jinja2 does."""
        frozen = datetime(2026, 1, 2, 3, 4, 5)
        self.clock = lambda: frozen
        try:
            fast = minijinja.Environment(
                templates={"chat": _without_generation(self.source)},
                trim_blocks=True,
                lstrip_blocks=True,
                keep_trailing_newline=False,
                pycompat=True,
            )
            fast.add_filter("tojson", _to_json)
            fast.add_global("raise_exception", _raise_exception)
            fast.add_global("strftime_now", self._strftime)
            if self._loop is not None:
                fast.add_template("loop", self._loop.rewritten)
                for name, function in self._loop.functions.items():
                    fast.add_global(name, function)
            used = False
            for context in conversations(self.content_format, self.variables):
                expected = _outcome(lambda: self._template.render(**context))  # noqa: B023
                if expected != _outcome(lambda: fast.render_template("chat", **context)):  # noqa: B023
                    return None
                keyed = {**context, "messages": _keyed(context["messages"])}
                for _ in range(2):  # made, then remembered
                    text = self._from_memory(fast, keyed)
                    used = used or text is not None
                    if text not in (None, expected):
                        self._loop = None
            if not used:
                self._loop = None
        except Exception as error:
            logger.debug("minijinja cannot compile the chat template: %s", error)
            return None
        finally:
            self.clock = datetime.now
        return fast


def _outcome(render: Callable[[], str]) -> str | None:
    try:
        return render()
    except Exception:
        return None


def _without_generation(source: str) -> str:
    """minijinja knows no {% generation %}; {% if true %} trims and scopes alike."""
    return _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)


def _keyed(messages: list[dict[str, Any]]) -> Conversation:
    return Conversation(messages, (hash(json.dumps(message)) for message in messages))
