"""Requests -> the prompt text (or token ids) an engine makes of them, or the reason why that cannot be told.

What is written here is how vLLM 0.32 renders. Other engines apply the same chat templates but normalise messages in their own
way; where that differs `warmroute doctor` shows it, and the worker's reported cached tokens do.
"""

from gateway.rendering.conversation import NotReproducible
from gateway.rendering.renderer import Rendered, Renderer, RenderOptions

__all__ = ["NotReproducible", "RenderOptions", "Rendered", "Renderer"]
