"""A chat template, compiled as Hugging Face compiles it and, where that is proved equal, as minijinja does (two to three times faster)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from gateway.rendering.battery import conversations
from gateway.rendering.conversation import JsonObject, NotReproducible
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

logger = logging.getLogger("warmroute.rendering")

AUDIT_EVERY = 256  # renderings; every so many are made by both and compared
# Where one of these shows jinja2 renders: Python strips the first four as white space and Rust does not, and the last is what
# minijinja puts for a lone surrogate, which must not pass for text.
_TELLTALES = ("\x1c", "\x1d", "\x1e", "\x1f", "\ufffd")
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
    if type(value) is JsonObject and not (ensure_ascii or indent or separators or sort_keys):
        return value.dump()
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """One chat template. Raises NotReproducible when it is no valid template, and from `render` when it refuses a conversation."""

    def __init__(self, source: str):
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
        self._fast = self._proved_equal()

    @property
    def fast(self) -> bool:
        """Whether minijinja renders it."""
        return self._fast is not None

    def render(self, context: dict[str, Any]) -> str:
        """The prompt text for a context that holds messages, tools, documents, add_generation_prompt and variables."""
        if self._fast is not None:
            try:
                text = self._fast.render_template("chat", **context)
            except Exception:  # a refusal, or something only minijinja chokes on: jinja2 tells
                return self._reference(context)
            self._renderings += 1
            if any(character in text for character in _TELLTALES):
                return self._reference(context)
            if self._renderings % AUDIT_EVERY == 0 and text != self._reference(context):
                logger.warning("minijinja renders a conversation differently from jinja2, which is used from here on")
                self._fast = None
                return self._reference(context)
            return text
        return self._reference(context)

    def render_open_ended(self, context: dict[str, Any]) -> str:
        """The prompt text up to the end of the last message's content, for the model to go on with. Changes the context."""
        final = context["messages"][-1]
        content = final.get("content")
        if isinstance(content, list):
            block = next((block for block in reversed(content) if "text" in block), None)
            if block is None:
                raise NotReproducible("the final message has no text to continue")
            text = block["text"]
            block["text"] += _CONTINUE_TAG
        elif isinstance(content, str):
            text = content
            final["content"] = content + _CONTINUE_TAG
        else:
            raise NotReproducible("the final message has no text to continue")
        rendered = self.render(context)
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

    def _proved_equal(self) -> minijinja.Environment | None:
        """A minijinja environment if it renders every conversation of the battery as jinja2 does."""
        # minijinja knows no {% generation %}; {% if true %} trims and scopes alike
        source = _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", self.source)
        frozen = datetime(2026, 1, 2, 3, 4, 5)
        self.clock = lambda: frozen
        try:
            fast = minijinja.Environment(
                templates={"chat": source}, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, pycompat=True
            )
            fast.add_filter("tojson", _to_json)
            fast.add_global("raise_exception", _raise_exception)
            fast.add_global("strftime_now", self._strftime)
            for context in conversations(self.content_format, self.variables):
                if _outcome(lambda: fast.render_template("chat", **context)) != _outcome(lambda: self._template.render(**context)):  # noqa: B023
                    return None
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
