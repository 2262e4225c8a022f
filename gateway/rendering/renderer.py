"""A model directory's chat template applied to requests of every dialect."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.dialects import Dialect
from gateway.rendering.anthropic import anthropic_messages, anthropic_tools, reasoning_effort
from gateway.rendering.conversation import ContentFormat, NotReproducible, conversation, template_tools, without_developer
from gateway.rendering.memory import RecentlyUsed
from gateway.rendering.responses import continues_final_message, responses_messages, responses_tools
from gateway.rendering.template import ChatTemplate
from kvindex.tokenizer import NAMED_TOKENS, TokenizerError, named_tokens, read_json

# Models whose prompts the engine renders in code of its own instead of by their chat template.
_OWN_RENDERING = {
    "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM",
    "KimiK3ForConditionalGeneration", "MoonshotKimiaForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration",
}  # fmt: skip
# Names in chat_template_kwargs that are arguments of the engine's own call.
_RESERVED = frozenset((
    "self", "conversation", "conversations", "messages", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
))  # fmt: skip
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Engine flags that change prompts; the defaults are the engine's."""

    chat_template: Path | None = None  # --chat-template, a file
    content_format: ContentFormat | None = None  # --chat-template-content-format; None: detected
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # --default-chat-template-kwargs
    exclude_tools_when_tool_choice_none: bool = False  # --exclude-tools-when-tool-choice-none


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the engine tokenises it: a text, or token ids that were sent as such."""

    prompt: str | list[int]
    add_special_tokens: bool = False


class Renderer:
    """Renders requests for one model directory. Raises TokenizerError when the directory cannot be read."""

    def __init__(self, directory: str | Path, options: RenderOptions | None = None):
        self.directory = Path(directory)
        self.options = options or RenderOptions()
        self._memory = RecentlyUsed()
        self._templates: dict[str, ChatTemplate] = {}  # by source
        config = read_json(self.directory / "tokenizer_config.json") or {}
        fallback = read_json(self.directory / "special_tokens_map.json") or {}
        self._named = named_tokens({name: value for name, value in fallback.items() if name in NAMED_TOKENS} | config)
        self._sources, self._processor_source = self._find_templates(config)
        self._unsupported = self._own_rendering()
        self._merges_inline_system: bool | None = None
        self._disabled_effort: str | None = None
        for source in {*self._sources.values(), *filter(None, [self._processor_source])}:
            try:
                self._template(source)
            except NotReproducible as error:
                raise TokenizerError(f"{self.directory}: {error.reason}") from None

    def render(self, dialect: Dialect, fields: dict[str, Any]) -> Rendered:
        """The prompt the engine makes of a request. Raises NotReproducible. `fields` are as forwarded, and stay as they are."""
        _refuse_injections(fields)
        if dialect.name == "completions":
            return _completion(fields)
        if self._unsupported:
            raise NotReproducible(self._unsupported)
        if dialect.name == "chat":
            return self._chat(fields)
        if dialect.name == "responses":
            return self._responses(fields)
        if dialect.name == "messages":
            return self._anthropic(fields)
        raise NotReproducible(f"{dialect.name} requests have no prompt to cache")

    # --- dialects ---

    def _chat(self, fields: dict[str, Any]) -> Rendered:
        tools = None if fields.get("tools") is None else _list(fields, "tools")
        if tools == []:
            raise NotReproducible("tools is empty, which engines refuse")
        settings = {
            "add_generation_prompt": _boolean(fields, "add_generation_prompt", True),
            "continue_final_message": _boolean(fields, "continue_final_message", False),
            "documents": fields.get("documents"),
            "reasoning_effort": fields.get("reasoning_effort"),
        }
        special = _boolean(fields, "add_special_tokens", False)
        text = self._apply(fields, _list(fields, "messages"), self._offered(tools, fields.get("tool_choice")), settings, as_sent=True)
        return Rendered(text, special)

    def _responses(self, fields: dict[str, Any]) -> Rendered:
        if fields.get("truncation", "disabled") != "disabled":
            raise NotReproducible("truncation")
        messages = responses_messages(fields)
        reasoning = fields.get("reasoning")
        unfinished = continues_final_message(fields)
        settings = {
            "add_generation_prompt": not unfinished,
            "continue_final_message": unfinished,
            "reasoning_effort": reasoning.get("effort") if isinstance(reasoning, dict) else None,
        }
        tools = self._offered(responses_tools(fields.get("tools")), fields.get("tool_choice"))
        # the engine adds special tokens (BOS) to what the template renders on this route only
        return Rendered(self._apply(fields, messages, tools, settings, as_sent=False), add_special_tokens=True)

    def _anthropic(self, fields: dict[str, Any]) -> Rendered:
        messages = anthropic_messages(fields, self._merge_inline_system())
        thinking = fields.get("thinking")
        disabled = isinstance(thinking, dict) and thinking.get("type") == "disabled"
        settings = {
            "add_generation_prompt": True,
            "continue_final_message": False,
            "reasoning_effort": reasoning_effort(fields, self._effort_when_disabled() if disabled else ""),
        }
        choice = fields.get("tool_choice")
        tools = self._offered(anthropic_tools(fields.get("tools")), choice.get("type") if isinstance(choice, dict) else None)
        return Rendered(self._apply(fields, messages, tools, settings, as_sent=True))

    def _offered(self, tools: list[Any] | None, choice: Any) -> list[Any] | None:
        """The tools that reach the template."""
        if tools is None or (choice == "none" and self.options.exclude_tools_when_tool_choice_none):
            return None
        return template_tools(tools, self._memory)

    def _apply(
        self, fields: dict[str, Any], messages: list[Any], tools: list[Any] | None, settings: dict[str, Any], *, as_sent: bool
    ) -> str:
        """Normalise messages and render them with the template for these tools."""
        template = self._template(self._source(tools))
        settings = self._merged(fields.get("chat_template_kwargs"), settings)
        form = self.options.content_format or template.content_format
        made: list[dict[str, Any]] = conversation(messages, form, self._memory, as_sent=as_sent)
        if not made:
            raise NotReproducible("there is no message")
        if "developer" in {message["role"] for message in made}:
            if not template.knows_developer:
                made = without_developer(made)
            elif any(message.get("tools") for message in made):
                raise NotReproducible("a developer message brings tools")
        prompt = settings.pop("add_generation_prompt")
        unfinished = settings.pop("continue_final_message")
        context = {
            **self._named,
            **{name: value for name, value in settings.items() if name in template.variables},
            "messages": made,
            "tools": tools,
            "documents": settings.get("documents"),
            "add_generation_prompt": prompt,
        }
        if not unfinished:
            return template.render(context)
        if prompt or unfinished is not True:
            raise NotReproducible("continue_final_message with a generation prompt, which engines refuse")
        return template.render_open_ended(context)

    def _merged(self, sent: Any, settings: dict[str, Any]) -> dict[str, Any]:
        """The engine's defaults, the request's chat_template_kwargs over them, its own fields over those; what is unset falls out."""
        sent = {} if sent is None else sent
        if not isinstance(sent, dict):
            raise NotReproducible("chat_template_kwargs is not an object")
        if not _RESERVED.isdisjoint(sent):
            raise NotReproducible("chat_template_kwargs sets an argument of the engine's own")
        effort = settings["reasoning_effort"]
        if effort is not None and "enable_thinking" not in sent:
            settings["enable_thinking"] = effort != "none"
        merged = {**sent, **{name: value for name, value in settings.items() if value not in (None, "auto")}}
        return {**self.options.chat_template_kwargs, **{name: value for name, value in merged.items() if value not in (None, "auto")}}

    # --- what the engine finds out about a template at its start ---

    def _merge_inline_system(self) -> bool:
        if self._merges_inline_system is None:
            sources = {self._source(None), self._source([])}
            self._merges_inline_system = any(self._template(source).refuses_inline_system() for source in sources)
        return self._merges_inline_system

    def _effort_when_disabled(self) -> str:
        """`low` for templates that refuse or ignore the effort `none`."""
        if self._disabled_effort is None:
            none = self._probe("none")
            ignored = none is None or any(self._probe(effort) == none for effort in _EFFORTS)
            self._disabled_effort = "low" if ignored else "none"
        return self._disabled_effort

    def _probe(self, effort: str) -> str | None:
        settings = {"add_generation_prompt": True, "continue_final_message": False, "reasoning_effort": effort}
        try:
            return self._apply({}, [{"role": "user", "content": "Hi"}], None, settings, as_sent=True)
        except NotReproducible:
            return None

    # --- the model directory ---

    def _find_templates(self, config: dict[str, Any]) -> tuple[dict[str, str], str | None]:
        """The tokenizer's templates by name, and the processor's (multimodal models), which goes first without tools."""
        if self.options.chat_template is not None:
            return {"default": _read(self.options.chat_template)}, None
        paths = sorted((self.directory / "additional_chat_templates").glob("*.jinja"))
        files = {path.stem: _read(path) for path in paths}
        if (path := self.directory / "chat_template.jinja").is_file():
            files["default"] = _read(path)
        sources = dict(files)
        declared = config.get("chat_template")
        if not sources and isinstance(declared, str):
            sources["default"] = declared
        elif not sources and isinstance(declared, list):
            sources = {entry["name"]: entry["template"] for entry in declared if isinstance(entry, dict)}
        processor = (read_json(self.directory / "chat_template.json") or {}).get("chat_template")
        return sources, processor if isinstance(processor, str) and "default" not in files else None

    def _source(self, tools: list[Any] | None) -> str:
        if tools is None and self._processor_source is not None:
            return self._processor_source
        source = self._sources.get("tool_use") if tools is not None else None
        source = source or self._sources.get("default")
        if source is None:
            raise NotReproducible("the model directory has no chat template")
        return source

    def _template(self, source: str) -> ChatTemplate:
        template = self._templates.get(source)
        if template is None:
            template = self._templates[source] = ChatTemplate(source, self._memory)
        return template

    def _own_rendering(self) -> str:
        """Why this model's chat prompts are not its template's; empty when they are."""
        config = read_json(self.directory / "config.json") or {}
        architectures = config.get("architectures") or []
        if config.get("model_type") == "gpt_oss":
            return "gpt-oss is rendered by the engine's harmony library"
        if own := _OWN_RENDERING.intersection(architectures):
            return f"{own.pop()} is rendered by code of the engine's own"
        if (self.directory / "tekken.json").is_file() or any(self.directory.glob("tokenizer.model.v*")):
            return "the model comes with a mistral_common tokenizer, which renders by itself"
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None


def _refuse_injections(fields: dict[str, Any]) -> None:
    """Fields that put something else in the prompt's place, whatever the dialect."""
    for name in ("truncate_prompt_tokens", "prompt_embeds", "suffix", "chat_template"):
        if fields.get(name) is not None:
            raise NotReproducible(name)
    transfer = fields.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise NotReproducible("kv_transfer_params brings token ids")


def _boolean(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise NotReproducible(f"{name} is not a boolean")
    return value


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise NotReproducible(f"{name} is not a list")
    return value


def _completion(fields: dict[str, Any]) -> Rendered:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Rendered(prompt, _boolean(fields, "add_special_tokens", True))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Rendered(prompt)
    raise NotReproducible("not one prompt: each prompt of a list is cached by itself")
