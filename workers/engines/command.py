"""An engine's command line, and what collects it from a profile."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from workers.launchprofile import GATEWAY_ONLY, LaunchProfile


class UnsupportedError(ValueError):
    """An engine cannot do what a profile asks for; each problem says what, and what to do instead."""

    def __init__(self, problems: list[str]):
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Command:
    """How to start an engine.

    `args` groups each flag with its values. `options` is the content of the YAML file that follows `options_flag` (TensorRT-LLM),
    empty for the engines that have none. `serves_http` is false for a node that only computes for another one.
    """

    program: tuple[str, ...]
    args: tuple[tuple[str, ...], ...]
    env: Mapping[str, str]
    host: str
    port: int
    options: Mapping[str, Any] = field(default_factory=dict)
    options_flag: str = ""
    notes: tuple[str, ...] = ()
    serves_http: bool = True
    event_ports: tuple[int, ...] = ()  # KV events and their replay, over all data-parallel ranks

    @property
    def ports(self) -> tuple[int, ...]:
        """TCP ports that the engine listens on."""
        return (self.port, *self.event_ports) if self.serves_http else self.event_ports

    def argv(self, options_file: str) -> list[str]:
        """The program's argument vector. `options_file` is where `options` have been written; unused where there are none."""
        argv = [*self.program, *(part for group in self.args for part in group)]
        return [*argv, self.options_flag, options_file] if self.options else argv

    def options_text(self) -> str:
        return yaml.safe_dump(dict(self.options), sort_keys=False, default_flow_style=False)

    def shell(self, options_file: str) -> str:
        """The command as one would type it: a flag a line, variables in front, the options file as a here-document."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        lines.append(shlex.join(self.program))
        lines += ["  " + shlex.join(group) for group in self.args]
        if self.options:
            lines.append("  " + shlex.join((self.options_flag, options_file)))
        text = "".join(f"# {note}\n" for note in self.notes)
        if self.options:
            text += f"cat > {shlex.quote(options_file)} <<'EOF'\n{self.options_text()}EOF\n"
        return text + " \\\n".join(lines) + "\n"


@dataclass
class Draft:
    """A command line in the making."""

    args: list[tuple[str, ...]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def flag(self, name: str, *values: object) -> None:
        self.args.append((name, *(str(value) for value in values)))

    def json(self, name: str, value: Mapping[str, Any]) -> None:
        self.flag(name, json.dumps(value, separators=(",", ":")))

    def option(self, path: str, value: object) -> None:
        """Set `a.b.c` of the options file."""
        *parents, last = path.split(".")
        node = self.options
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value

    def note(self, text: str) -> None:
        self.notes.append(text)

    def refuse(self, problem: str) -> None:
        self.problems.append(problem)


@dataclass(frozen=True)
class Switch:
    """What a boolean field becomes. A value that has nothing is the engine's default."""

    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """A key of the options file, given by its dotted path."""

    path: str


@dataclass(frozen=True)
class Refused:
    """What the engine cannot do, and what to do instead."""

    reason: str


@dataclass(frozen=True)
class Elsewhere:
    """A field that another one's translation takes in."""

    where: str


@dataclass(frozen=True)
class OneOf:
    """A flag whose values the engine names itself: neutral value -> its name, or the names it takes as they are."""

    flag: str
    names: Mapping[str, str] | tuple[str, ...]


# A flag by its name, or what does the translation.
Rule: TypeAlias = str | OneOf | Switch | Option | Refused | Elsewhere | Callable[[LaunchProfile, Draft], None]


def apply_rules(profile: LaunchProfile, rules: Mapping[str, Rule], engine: str, always: tuple[str, ...] = ()) -> Draft:
    """Translate every field that the profile states, in the table's order, then `always`, then the profile's extra arguments.

    Raises UnsupportedError with all problems.
    """
    draft = Draft(env=dict(profile.env))
    for name, rule in rules.items():
        value = getattr(profile, name)
        if not profile.states(name):
            continue
        if isinstance(rule, str):
            draft.flag(rule, value)
        elif isinstance(rule, OneOf):
            names = rule.names if isinstance(rule.names, Mapping) else {name: name for name in rule.names}
            if chosen := choose(draft, name, value, names, engine):
                draft.flag(rule.flag, chosen)
        elif isinstance(rule, Switch):
            if words := (rule.on if value else rule.off):
                draft.flag(*words)
        elif isinstance(rule, Option):
            draft.option(rule.path, value)
        elif isinstance(rule, Refused):
            if value != type(profile).model_fields[name].get_default(call_default_factory=True):
                draft.refuse(f"{name}: {engine} {rule.reason}")
        elif not isinstance(rule, Elsewhere):
            rule(profile, draft)
    missing = [name for name in type(profile).model_fields if name not in rules and name not in GATEWAY_ONLY and profile.states(name)]
    draft.problems += [f"{name}: not known to the {engine} adapter" for name in missing]
    if draft.problems:
        raise UnsupportedError(draft.problems)
    for word in (*always, *profile.extra_args):
        if word.startswith("-") or not draft.args:
            draft.args.append((word,))
        else:
            draft.args[-1] += (word,)
    return draft


def choose(draft: Draft, field_name: str, value: str, names: Mapping[str, str], engine: str) -> str | None:
    """The engine's name for a neutral value; None, with a problem, where it has none."""
    if value in names:
        return names[value]
    draft.refuse(f"{field_name}: {engine} knows {', '.join(names)}; not {value}")
    return None


def quantization(engine: str, names: Mapping[str, str]) -> Callable[[LaunchProfile, Draft], None]:
    """The rule of engines that quantize while loading (neutral format -> method) and otherwise read the method from the checkpoint."""

    def rule(profile: LaunchProfile, draft: Draft) -> None:
        assert profile.quantization is not None
        if profile.quantization_source == "load":
            if method := choose(draft, "quantization", profile.quantization, names, f"{engine} while loading"):
                draft.flag("--quantization", method)
        elif profile.quantization_method is None:
            draft.note(f"{profile.quantization} weights: {engine} reads the method from the checkpoint")

    return rule
