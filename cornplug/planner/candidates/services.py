"""Services that the applications need, and the paths of each request class through them.

A service is a set of components with the tasks that each replica does: E (encode), P (prefill), D (decode)
and G (generate). Applications share a service if it has the same components. Encoders whose towers have the
same fingerprint count as the same component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.inputs.schema import Component, Structure

ALL_STRUCTURES: Final[tuple[Structure, ...]] = ("monolith", "E+PD", "P+D", "E+P+D", "+G")


@dataclass(frozen=True)
class Service:
    tasks: str
    llm: Component | None = None
    towers: tuple[Component, ...] = ()
    generator: Component | None = None

    @property
    def components(self) -> tuple[Component, ...]:
        """Components of the service. The first component is the model on the command line."""
        first = (self.llm,) if self.llm else ()
        return first + self.towers + ((self.generator,) if self.generator else ())

    @property
    def name(self) -> str:
        return "+".join(c.name for c in self.components) + "/" + self.tasks

    def __hash__(self) -> int:
        return hash(self.name)

    def can_replace(self, other: Service) -> bool:
        """Return whether this service can do all tasks of `other`. It may have more towers, or a
        generator."""
        return (
            self.llm == other.llm
            and {t.name for t in self.towers} >= {t.name for t in other.towers}
            and other.generator in (None, self.generator)
            and set(self.tasks) - set("EG") == set(other.tasks) - set("EG")
        )


@dataclass(frozen=True)
class PathTemplate:
    """Services that a request visits, in order."""

    structure: str
    stages: tuple[Service, ...]


def canonical_encoders(components: Iterable[Component]) -> dict[str, Component]:
    """Map each encoder to the first encoder with the same fingerprint."""
    first: dict[str, Component] = {}
    encoders = [c for c in components if c.kind == "encoder"]
    return {c.name: first.setdefault(c.fingerprint or f"name:{c.name}", c) for c in encoders}


def paths(
    classes: Mapping[str, RequestClass], components: Sequence[Component]
) -> dict[str, tuple[PathTemplate, ...]]:
    """Return the paths of each request class.

    In addition to the class's own paths, these are paths through engines with towers for other classes'
    media. Such an engine may have the towers of all classes, so that one service is sufficient for all media.
    """
    encoders, by_name = canonical_encoders(components), {c.name: c for c in components}
    own = {name: tuple(_own_paths(c, by_name, encoders)) for name, c in classes.items()}
    known = tuple(
        dict.fromkeys(s for paths_of in own.values() for path in paths_of for s in path.stages if s.llm)
    )
    known = tuple(dict.fromkeys([*known, *_services_with_all_towers(known)]))
    return {
        name: tuple(dict.fromkeys(w for path in paths_of for w in _with_replacements(path, known)))
        for name, paths_of in own.items()
    }


def services(paths_of: Iterable[PathTemplate]) -> tuple[Service, ...]:
    return tuple(dict.fromkeys(s for path in paths_of for s in path.stages))


def _own_paths(
    request_class: RequestClass, components: Mapping[str, Component], encoders: Mapping[str, Component]
) -> list[PathTemplate]:
    listed = request_class.app.structures or ALL_STRUCTURES
    bases = [s for s in listed if s != "+G"] or ["monolith"]
    llm = components[request_class.app.llm]
    media = tuple(
        {encoders[m.encoder].name: encoders[m.encoder] for m in request_class.request.media}.values()
    )
    generator = (
        components[request_class.request.generates.generator] if request_class.request.generates else None
    )
    found: dict[tuple[Service, ...], PathTemplate] = {}
    for base in bases:
        for separate in _separate_generator_options(base, generator, listed):
            stages = _stages(base, llm, media, generator, separate=separate)
            name = _structure(base, media=bool(media), separate=separate)
            found.setdefault(stages, PathTemplate(name, stages))
    return list(found.values())


def _separate_generator_options(
    base: str, generator: Component | None, listed: Iterable[str]
) -> tuple[bool, ...]:
    """Return the allowed values of whether the generator is a separate service.

    The generator is always separate if prefill and decode are separate.
    """
    if generator is None:
        return (False,)
    if "P+D" in base:
        return (True,)
    if "+G" not in listed:
        return (False,)
    return (True,) if set(listed) == {"+G"} else (False, True)


def _structure(base: str, *, media: bool, separate: bool) -> str:
    if not media:
        base = {"E+PD": "monolith", "E+P+D": "P+D"}.get(base, base)
    return base + ("+G" if separate else "")


def _stages(
    base: str,
    llm: Component,
    media: tuple[Component, ...],
    generator: Component | None,
    *,
    separate: bool,
) -> tuple[Service, ...]:
    encoders_separate = base.startswith("E+")
    encoders = tuple(Service("E", towers=(t,)) for t in media) if encoders_separate else ()
    inside = () if encoders_separate else media
    e = "E" if inside else ""
    if "P+D" in base:
        engines: tuple[Service, ...] = (Service(e + "P", llm, inside), Service("D", llm))
    elif generator and not separate:
        engines = (Service(e + "PDG", llm, inside, generator),)
    else:
        engines = (Service(e + "PD", llm, inside),)
    last = (Service("G", generator=generator),) if generator and separate else ()
    return encoders + engines + last


def _services_with_all_towers(known: Sequence[Service]) -> list[Service]:
    """Return additional services whose engines load all towers: one service for each combination of language
    model and tasks, with the towers of all services in `known` with this combination."""
    towers: dict[tuple[str, str], dict[str, Component]] = {}
    for s in known:
        if s.llm and s.towers and s.generator is None:
            towers.setdefault((s.llm.name, s.tasks), {}).update({t.name: t for t in s.towers})
    llms = {s.llm.name: s.llm for s in known if s.llm}
    return [
        Service(tasks, llms[llm], tuple(of.values()))
        for (llm, tasks), of in towers.items()
        if not any(
            s.llm and (s.llm.name, s.tasks) == (llm, tasks) and {t.name for t in s.towers} == of.keys()
            for s in known
        )
    ]


def _with_replacements(path: PathTemplate, known: tuple[Service, ...]) -> list[PathTemplate]:
    """Return the path, and paths through engines with more towers instead of the path's own engine."""
    found = [path]
    if any(s.tasks == "E" for s in path.stages):
        return found
    for i, stage in enumerate(path.stages):
        if "P" not in stage.tasks:
            continue
        others = [s for s in known if s != stage and s.can_replace(stage)]
        if path.stages[-1].tasks == "G":
            others = [s for s in others if s.generator is None]
        found += [PathTemplate(path.structure, (*path.stages[:i], s, *path.stages[i + 1 :])) for s in others]
    return found
